"""The client of an Iceberg catalog: how it is opened, and which of its settings are secrets.

Properties are those of pyiceberg, given here or in its own configuration (a file or environment
variables, on the driver and on executors alike). A value may be a secret that is kept elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pyiceberg.io import FileIO, load_file_io
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.utils.config import Config, merge_config

from epochal.errors import Misconfigured
from epochal.kit.secrets import EnvironmentSecret, FileSecret, HeldSecret, Secret
from epochal.sinks.iceberg.errors import translate_errors

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

_SECRET_KEYS = re.compile(
    r"password|secret|token|credential|access-key|account-key|sas|auth", re.IGNORECASE
)
_HIDDEN = "***"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableAddress:
    """A table of a catalog, and how to reach it."""

    catalog: str
    table: str
    properties: tuple[tuple[str, str | Secret], ...] = ()

    def __str__(self) -> str:
        return f"{self.catalog}.{self.table}"

    def open(self) -> Catalog:
        from pyiceberg.catalog import load_catalog  # noqa: PLC0415  tasks seldom need a catalog

        with translate_errors(f"open catalog {self.catalog}", scrub=self.scrub):
            try:
                return load_catalog(self.catalog, **self._revealed())
            except (ValueError, TypeError, ImportError) as error:
                # The cause is left out: pyiceberg's message may quote all properties.
                raise Misconfigured(
                    f"catalog {self.catalog!r} can't be opened: {self.scrub(str(error))}",
                    "properties={'type': 'rest' | 'sql' | 'glue' | 'hive', 'uri': …}, or the same "
                    "in pyiceberg's own configuration",
                ) from None

    @property
    def server_key(self) -> str | None:
        """Which REST server this is, and by which account it is asked; no secret. Else None."""
        given = merge_config(Config().get_catalog_config(self.catalog) or {}, self._revealed())
        uri = str(given.get("uri", ""))
        if str(given.get("type", "rest" if uri.startswith("http") else "")).lower() != "rest":
            return None
        digest = hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode())
        return f"{self.catalog} {digest.hexdigest()[:16]}"

    def load(self, catalog: Catalog) -> Table:
        with translate_errors(f"load {self}", scrub=self.scrub):
            return catalog.load_table(self.table)

    def files(self, metadata: TableMetadata) -> FileIO:
        """The table's files without asking the catalog: for tasks, which have the metadata."""
        given = merge_config(Config().get_catalog_config(self.catalog) or {}, self._revealed())
        properties: dict[str, Any] = {**given, **metadata.properties}
        return load_file_io(properties, metadata.location)

    def scrub(self, text: str) -> str:
        """A text without the secrets among the properties."""
        for secret in self._secrets():
            text = text.replace(secret, _HIDDEN)
        return text

    def _revealed(self) -> dict[str, Any]:
        return {
            key: value if isinstance(value, str) else value.reveal()
            for key, value in self.properties
        }

    def _secrets(self) -> Iterator[str]:
        for _, value in self.properties:
            if isinstance(value, str):
                continue
            try:
                held = value.reveal()
            except Misconfigured:
                continue
            if held:
                yield held
            if "://" in held and urlsplit(held).password:
                yield str(urlsplit(held).password)


def held(properties: Mapping[str, str | Secret]) -> tuple[tuple[str, str | Secret], ...]:
    """Properties with plain secrets set apart, so that no repr shows them."""
    return tuple(
        (key, HeldSecret(value) if isinstance(value, str) and _is_secret(key, value) else value)
        for key, value in sorted(properties.items())
    )


def parse_address(
    catalog: str, table: str | None, properties: Mapping[str, str | Secret]
) -> TableAddress:
    """`lake.shop.orders`, or the catalog and the table apart."""
    name, dot, rest = (catalog, ".", table) if table else catalog.partition(".")
    if not name or not dot or not rest or "." not in rest.strip("."):
        raise Misconfigured(
            f"Iceberg: {catalog!r}{f', {table!r}' if table else ''} does not name a table",
            'Iceberg("catalog.namespace.table"), or Iceberg("catalog", "namespace.table")',
        )
    for key, value in properties.items():
        if not isinstance(value, (str, EnvironmentSecret, FileSecret, HeldSecret)):
            raise Misconfigured(
                f"Iceberg: properties[{key!r}] is {type(value).__name__}",
                "text, env(variable) or file(path)",
            )
    return TableAddress(catalog=name, table=rest, properties=held(properties))


def _is_secret(key: str, value: str) -> bool:
    has_password = "://" in value and bool(urlsplit(value).password)
    return has_password or _SECRET_KEYS.search(key) is not None
