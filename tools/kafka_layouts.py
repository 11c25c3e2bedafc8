"""The straight-line code for one struct in one run of versions. Used by kafka_schemas.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kafka_model import FIXED, WIDTH, Field, Schema, Struct, snake


class Run:
    """Fixed-width fields in a row, which one call packs or unpacks."""

    def __init__(self) -> None:
        self.codes: list[str] = []
        self.items: list[str] = []

    def add(self, code: str, item: str) -> None:
        self.codes.append(code)
        self.items.append(item)

    def _close(self) -> tuple[str, str, int]:
        name = "".join(self.codes).replace("16s", "u").replace("H", "w").replace("?", "o")
        items = ", ".join(self.items)
        width = sum(WIDTH[code] for code in self.codes)
        self.codes, self.items = [], []
        return name, items, width

    def read(self) -> list[str]:
        """The lines that read what has gathered; nothing is left of it then."""
        if not self.items:
            return []
        comma = "," if len(self.items) == 1 else ""
        name, items, width = self._close()
        return [f"({items}{comma}) = _unpack_{name}(data, at)", f"at += {width}"]

    def write(self, put: str) -> list[str]:
        if not self.items:
            return []
        name, items, _ = self._close()
        return [f"{put}(_pack_{name}({items}))"]


@dataclass(frozen=True)
class Layout:
    """One struct in one run of versions: writes the two functions for it."""

    schema: Schema
    struct: Struct
    version: int

    @property
    def flexible(self) -> bool:
        return self.version in self.schema.flexible

    def function(self, verb: str, struct: str) -> str:
        return f"_{verb}_{snake(struct)}_v{self.schema.first_alike(struct, self.version)}"

    def is_compact(self, field: Field) -> bool:
        return self.flexible and not field.never_compact

    def plain_fields(self) -> list[Field]:
        return [
            f
            for f in self.struct.fields
            if self.version in f.versions and self.version not in f.tagged
        ]

    def tagged_fields(self) -> list[Field]:
        found = [
            f for f in self.struct.fields if self.version in f.versions and self.version in f.tagged
        ]
        return sorted(found, key=lambda field: field.tag)

    def absent_fields(self) -> list[Field]:
        return [f for f in self.struct.fields if self.version not in f.versions]

    # Decoding

    def decoder(self) -> Iterator[str]:
        name = self.struct.name
        if not self.plain_fields() and not self.flexible and name != self.schema.name:
            raise SystemExit(f"{name} {self.version} takes no bytes: a count can't bound it")
        yield f"def {self.function('decode', name)}(data: bytes, at: int) -> tuple[{name}, int]:"
        yield f"    message = new({name})"
        run = Run()
        for field in self.plain_fields():
            yield from indent(self.read_field(field, run))
        yield from indent(run.read())
        for field in [*self.absent_fields(), *self.tagged_fields()]:
            yield f"    message.{field.name} = {field.default_value()}"
        if self.flexible:
            yield from indent(self.read_tagged())
        yield "    return message, at"

    def read_field(self, field: Field, run: Run) -> Iterator[str]:
        """Lines that read one field; fixed-width ones only join the run."""
        target = f"message.{field.name}"
        if field.type in FIXED:
            run.add(FIXED[field.type], target)
            return
        if field.is_struct and not field.is_array:
            yield from run.read()
            line = f"{target}, at = {self.function('decode', field.element)}(data, at)"
            if self.version in field.nullable:
                # A byte of its own says whether it is there.
                yield "at += 1"
                yield "if data[at - 1] > 127:"
                yield f"    {target} = None"
                yield "else:"
                yield f"    {line}"
            else:
                yield line
            return
        compact = self.is_compact(field)
        if compact:
            yield from run.read()
            yield "size = data[at]"
            yield "at += 1"
            yield "if size > 127:"
            reader = "read_text_size" if field.type == "string" else "read_uvarint"
            yield f"    size, at = {reader}(data, at - 1)"
            yield "size -= 1"
        else:
            run.add("h" if field.type == "string" else "i", "size")
            yield from run.read()
        yield "if size < 0:"
        if self.version in field.nullable:
            yield f"    {target} = None"
            yield "else:"
            yield from indent(self.read_sized(field, target))
        else:
            yield f'    raise null_refused("{self.struct.name}.{field.name}")'
            yield from self.read_sized(field, target)

    def read_sized(self, field: Field, target: str) -> Iterator[str]:
        if field.is_array:
            yield from self.read_array(field, target)
            return
        if field.type == "records":
            yield f"{target} = memoryview(data)[at : at + size]"
        elif field.type == "bytes":
            yield f"{target} = data[at : at + size]"
        else:
            yield f"{target} = data[at : at + size].decode()"
        yield "at += size"

    def read_array(self, field: Field, target: str) -> Iterator[str]:
        code = FIXED.get(field.element)
        width = WIDTH[code] if code else 1
        needed = f"size * {width}" if width > 1 else "size"
        yield f"if {needed} > len(data) - at or size > ALLOWED.elements:"
        yield f'    raise count_refused("{self.struct.name}.{field.name}", size)'
        yield "ALLOWED.elements -= size"
        if code:
            if field.element == "uuid":
                raise SystemExit("arrays of uuids are not needed yet")
            yield f'{target} = list(unpack_from(f">{{size}}{code}", data, at))'
            yield f"at += {needed}"
        elif field.element == "string":
            reader = "read_compact_strings" if self.is_compact(field) else "read_strings"
            yield f"{target}, at = {reader}(data, at, size)"
        else:
            items = f"found_{field.name}"
            yield f"{items}: list[{field.element}] = []"
            yield "for _ in range(size):"
            variable = snake(field.element)
            yield f"    {variable}, at = {self.function('decode', field.element)}(data, at)"
            yield f"    {items}.append({variable})"
            yield f"{target} = {items}"

    def read_tagged(self) -> Iterator[str]:
        fields = self.tagged_fields()
        yield "if data[at]:"
        if not fields:
            yield "    at = skip_tagged(data, at)"
        else:
            yield "    tags, at = read_uvarint(data, at)"
            yield "    if tags > ALLOWED.elements:"
            yield '        raise count_refused("tagged fields", tags)'
            yield "    ALLOWED.elements -= tags"
            yield "    for _ in range(tags):"
            yield "        tag, at = read_uvarint(data, at)"
            yield "        tag_size, at = read_uvarint(data, at)"
            yield "        end = at + tag_size"
            for position, field in enumerate(fields):
                yield f"        {'elif' if position else 'if'} tag == {field.tag}:"
                run = Run()
                lines = [*self.read_field(field, run), *run.read()]
                yield from indent(lines, 3)
                yield "            if at != end:"
                yield f'                raise tag_size_refused("{self.struct.name}.{field.name}")'
            yield "        at = end"
        yield "else:"
        yield "    at += 1"

    # Encoding

    def encoder(self) -> Iterator[str]:
        name = self.struct.name
        yield f"def {self.function('encode', name)}(put: Put, message: {name}) -> None:"
        before = 0
        for line in self.encoder_body():
            before += 1
            yield f"    {line}"
        if not before:
            yield "    pass"

    def encoder_body(self) -> Iterator[str]:
        for field in self.absent_fields():
            if not field.ignorable:
                default = field.default_value()
                test = f"is not {default}" if default in ("None", "True") else f"!= {default}"
                plain = default in ("False", "[]", '""', "''") and "None" not in field.python_type()
                condition = f"message.{field.name}" + ("" if plain else f" {test}")
                yield f"if {condition}:"
                label = f"{self.struct.name}.{field.name}"
                yield f'    raise not_in_version("{label}", {self.version})'
        run = Run()
        for field in self.plain_fields():
            yield from self.write_field(field, run, "put")
        yield from run.write("put")
        if self.flexible:
            yield from self.write_tagged()

    def write_field(self, field: Field, run: Run, put: str) -> Iterator[str]:
        source = f"message.{field.name}"
        if field.type in FIXED:
            run.add(FIXED[field.type], source)
            return
        if field.is_struct and not field.is_array:
            yield from run.write(put)
            line = f"{self.function('encode', field.element)}({put}, {source})"
            if self.version in field.nullable:
                yield f"if {source} is None:"
                yield f'    {put}(b"\\xff")'
                yield "else:"
                yield f'    {put}(b"\\x01")'
                yield f"    {line}"
            else:
                yield line
            return
        if self.version in field.nullable:
            yield from run.write(put)
            yield f"if {source} is None:"
            code = "h" if field.type == "string" else "i"
            null = 'b"\\x00"' if self.is_compact(field) else f"_NULL_{code.upper()}"
            yield f"    {put}({null})"
            yield "else:"
            yield from indent(self.write_sized(field, source, Run(), put))
        else:
            if "None" in field.python_type():
                yield f"if {source} is None:"
                label = f"{self.struct.name}.{field.name}"
                yield f'    raise no_null_in_version("{label}", {self.version})'
            yield from self.write_sized(field, source, run, put)

    def write_sized(self, field: Field, source: str, run: Run, put: str) -> Iterator[str]:
        """A length and what it counts. The length closes the run where it is of fixed width."""
        if field.type == "string":
            yield f"text = {source}.encode()"
            source = "text"
        if self.is_compact(field):
            yield from run.write(put)
            yield f"size = len({source}) + 1"
            yield f"{put}(SMALL_UVARINT[size] if size < 128 else uvarint(size))"
        else:
            run.add("h" if field.type == "string" else "i", f"len({source})")
            yield from run.write(put)
        if not field.is_array:
            yield f"{put}({source})"
        elif field.is_struct:
            variable = snake(field.element)
            yield f"for {variable} in {source}:"
            yield f"    {self.function('encode', field.element)}({put}, {variable})"
        elif field.element == "string":
            writer = "put_compact_strings" if self.is_compact(field) else "put_strings"
            yield f"{writer}({put}, {source})"
        else:
            code = FIXED[field.element]
            yield f'{put}(pack(f">{{len({source})}}{code}", *{source}))'

    def write_tagged(self) -> Iterator[str]:
        fields = self.tagged_fields()
        if not fields:
            yield 'put(b"\\x00")'
            return
        yield "tagged: list[tuple[int, list[Part]]] = []"
        for field in fields:
            default = field.default_value()
            if default in ("None", "True"):
                test = f"message.{field.name} is not {default}"
            elif default == "False" or (default == "[]" and "None" not in field.python_type()):
                test = f"message.{field.name}"
            else:
                test = f"message.{field.name} != {default}"
            yield f"if {test}:"
            yield f"    {field.name}: list[Part] = []"
            put = f"{field.name}.append"
            run = Run()
            lines = list(self.write_field(field, run, put))
            yield from indent([*lines, *run.write(put)])
            yield f"    tagged.append(({field.tag}, {field.name}))"
        yield "if tagged:"
        yield "    put_tagged(put, tagged)"
        yield "else:"
        yield '    put(b"\\x00")'


def indent(lines: Iterable[str], depth: int = 1) -> Iterator[str]:
    for line in lines:
        yield "    " * depth + line
