"""
Generate the reference pages and the table of packages, check links, build the site.

    python tools/docs.py            write the pages, then the site into build/site
    python tools/docs.py --check    write nothing, fail if a page is out of date
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from typer.main import get_command

import architecture_pictures
import column_types_page
import docs_sinks
from epochal.broker.core.settings import LIMITS as BROKER_LIMITS
from epochal.broker.core.settings import Settings as BrokerSettings
from epochal.broker.handlers import rows as api_rows
from epochal.cli import application
from epochal.errors import EpochalError
from epochal.protocol.invariants import RULES
from epochal.protocol.machine import TABLE
from epochal.telemetry.health import MEANINGS
from epochal.telemetry.instruments import INSTRUMENTS
from epochal.terms import Limits, Outcome

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
TROUBLE = ROOT / "docs" / "troubleshooting"
IMAGES = ROOT / "docs" / "images"
PACKAGE = ROOT / "src" / "epochal"
PART_PAGES = tuple(
    ROOT / name
    for name in (
        "CONTRIBUTING.md",
        "docs/internals/layers.md",
        "docs/concepts/promises.md",
        "docs/guides/your-own-sink.md",
    )
)
"""Pages of which only parts are generated."""
_GENERATED = "<!-- generated from the code by `make docs`: edit there -->"
_PART = re.compile(r"(<!-- ([\w-]+): [^\n]* -->\n).*?(<!-- \2 end -->)", re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def epoch_page() -> str:
    rows = [
        f"| {before.value} | {move.value} | {after.value} |"
        for (before, move), after in TABLE.items()
    ]
    return _page(
        "The life of an epoch",
        "A phase changes only by a row of this table; anything else is refused with an error that "
        "names both states.",
        "![The phases of an epoch and the moves between them](../images/epoch-phases.svg)",
        "\n".join(["| phase | move | next phase |", "| --- | --- | --- |", *rows]),
    )


def invariants_page() -> str:
    rows = [f"| {number} | {text} |" for number, text in RULES.items()]
    return _page(
        "The invariants",
        "Checked at run time where a violation is observable, by the model checker in every state, "
        "and by the simulation at every seed.",
        "\n".join(["| | |", "| --- | --- |", *rows]),
    )


def errors_page() -> str:
    rows = [
        f"| [`{kind.__name__}`](../troubleshooting/{kind.code}.md) | `{kind.code}` "
        f"| {_next_step(kind)} | {kind.exit_code} | {_first_line(kind)} |"
        for kind in _errors(EpochalError)
    ]
    return _page(
        "Errors",
        "Classified by what the caller may do next. Every message ends with its code in brackets, "
        "most also with a `hint:`.",
        "\n".join(
            [
                "| error | code | during a commit | exit code | meaning |",
                "| --- | --- | --- | --- | --- |",
                *rows,
            ]
        ),
    )


def limits_page() -> str:
    comments = _attribute_docs(Limits)
    rows = [
        f"| `{field.name}` | `{field.default}` | {comments.get(field.name, '')} |"
        for field in dataclasses.fields(Limits)
    ]
    return _page(
        "Limits",
        "`Pipeline(..., limits=epochal.Limits(commit_timeout_s=60))`. The unit is the last part of "
        "the name.",
        "\n".join(["| limit | default | meaning |", "| --- | --- | --- |", *rows]),
    )


def broker_page() -> str:
    rows = [
        f"| {key} | {name} | {versions} | {newer} |" for key, name, versions, newer in api_rows()
    ]
    settings = BrokerSettings()
    limits = [
        f"| `{name}` | {getattr(settings, name):,} | {meaning} |"
        for name, meaning in BROKER_LIMITS.items()
    ]
    return _page(
        "APIs and limits of the embedded broker",
        "Differences from Apache Kafka: [internals](../internals/broker.md).",
        "\n".join(
            [
                "## APIs",
                "| key | API | versions | with transaction.version 2 |",
                "| --- | --- | --- | --- |",
                *rows,
                "",
                "## Limits",
                "What any client that can connect may use. Each time a limit is reached is counted "
                'in `epochal_broker_limit_reached_total{limit="name"}` (`--metrics-port`), and is '
                "a line on stderr, at most one a second. In Python: "
                '`BrokerProcess(folder, settings={"connections_max": 100})`. Of a Fetch answer '
                "that a client is slow to take, the broker holds at most 0.8 MB in memory.",
                "",
                "| limit | default | of what, and what happens then |",
                "| --- | --- | --- |",
                *limits,
            ]
        ),
    )


def metrics_page() -> str:
    rows = [
        f"| `{name}` | {one.kind.value} | {', '.join(one.labels)} | {one.description} |"
        for name, one in INSTRUMENTS.items()
    ]
    return _page(
        "Metrics",
        "Exported by drivers (`metrics_port=`, `push_otlp`) and, as far as logs have them, by the "
        "console. Names and labels are stable; no label holds an epoch. `sink` is empty for a "
        "phase of the whole epoch. See [operating](../guides/operating.md).",
        "\n".join(["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |", *rows]),
    )


def health_page() -> str:
    rows = []
    for health, one in MEANINGS.items():
        alert = f"`{one.alert}`" if one.alert else ""
        rows.append(
            f"## {health.value}\n\n{_sentence(one.means)}\n\n| | |\n| --- | --- |\n"
            f"| blocks | {one.blocks} |\n| to do | {one.to_do} |\n"
            f"| exit code of `epochal status` | {one.exit_code} |\n| alert | {alert} |"
        )
    return _page(
        "Health of a pipeline",
        "One word, derived in one place from the epoch log and the driver's heartbeat, and used by "
        "`epochal status`, the console, the metric `epochal_health` of driver and console, the "
        "alert rules and exit codes. Most urgent first; the first line that follows it names the "
        "cause. See [operating](../guides/operating.md).",
        *rows,
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def commands_page() -> str:
    """Every verb with its help, as `epochal <verb> --help` prints it."""
    parts = []
    for path, command in _commands(get_command(application()), ()):
        options = [_parameter(one) for one in command.params if one.name != "help"]
        head = ["| | default | |", "| --- | --- | --- |"]
        table = "\n".join([*head, *options]) if options else ""
        parts += [f"## epochal {' '.join(path)}", inspect.cleandoc(command.help or ""), table]
    return _page("Commands", *(part for part in parts if part))


def _parameter(one: Any) -> str:
    """A row for an argument or an option."""
    if one.param_type_name == "argument":
        names = [one.metavar or str(one.name).upper()]
    else:
        names = [*one.opts, *one.secondary_opts]
    shown = ", ".join(f"`{name}`" for name in names).replace("|", r"\|")
    return f"| {shown} | {_default_of(one)} | {getattr(one, 'help', None) or ''} |"


def _default_of(one: Any) -> str:
    if one.required:
        return "**required**"
    value = getattr(one.default, "value", one.default)
    if value is True:
        value = one.opts[0]
    return f"`{value}`" if value or (value == 0 and not getattr(one, "is_flag", False)) else ""


def options_page() -> str:
    return _page("Options of every sink", *docs_sinks.options())


def keys_page() -> str:
    return _page("Keys of a pipeline's file", *docs_sinks.keys())


def grants_page() -> str:
    return _page("Least privileges", *docs_sinks.grants())


def types_page() -> str:
    return _page("Types of columns", *column_types_page.parts())


def broker_clients_page() -> str:
    kept = json.loads((ROOT / "tests/broker/client_suites.json").read_text())
    parts = [
        "Test suites of other people's clients, run by `make proof ONLY=clients` against this "
        "release and against Apache Kafka on the same machine. A test that fails is run once more, "
        "alone, as many of them have time-outs that a busy machine misses. A suite of "
        "`tests/broker/client_suites.py` that is missing here has not been run to its end.",
    ]
    for name, suite in sorted(kept.items()):
        parts += _client_suite(name, suite)
    parts.append(
        "## Not run\n\naiokafka's own suite can't be had as a package: none of its sdists has "
        "tests (0.5.2 to 0.14.0 were looked at), and Debian has no source package of it. The "
        "client itself is run by `tests/broker/test_real_clients.py`."
    )
    return _page("Client suites on the embedded broker", *parts)


def _client_suite(name: str, suite: Mapping[str, Any]) -> list[str]:
    rows = ["| | the embedded broker | Apache Kafka |", "| --- | --- | --- |"]
    for state in ("passed", "failed", "skipped"):
        counts = [sum(pair[at] == state for pair in suite["tests"].values()) for at in (0, 1)]
        rows.append(f"| {state} | {counts[0]} | {counts[1]} |")
    others = {
        test: pair
        for test, pair in sorted(suite["tests"].items())
        if "failed" in pair or pair[0] != pair[1]
    }
    found = [f"## {name}\n\n{suite['comes_as']}: {suite['remarks']}.", "\n".join(rows)]
    if others:
        listed = ["| test | the embedded broker | Apache Kafka | |", "| --- | --- | --- | --- |"]
        for test, (ours, theirs) in others.items():
            why = suite["why"].get(test, "fails on both" if ours == theirs else "")
            listed.append(f"| {test} | {ours} | {theirs} | {why} |")
        found.append("\n".join(listed))
    return found


def tested_page() -> str:
    return _page("Tested versions", *docs_sinks.tested())


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner: Mapping[str, Any] = getattr(command, "commands", {})
    if not inner:
        yield path, command
    for name, one in inner.items():
        yield from _commands(one, (*path, name))


PAGES = {
    "broker-apis.md": broker_page,
    "broker-clients.md": broker_clients_page,
    "commands.md": commands_page,
    "epoch.md": epoch_page,
    "errors.md": errors_page,
    "grants.md": grants_page,
    "types.md": types_page,
    "invariants.md": invariants_page,
    "health.md": health_page,
    "limits.md": limits_page,
    "metrics.md": metrics_page,
    "options.md": options_page,
    "tested.md": tested_page,
    "yaml.md": keys_page,
}


def _page(title: str, *parts: str) -> str:
    # The title first: the site uses it for the navigation only if nothing precedes it.
    return "\n\n".join([f"# {title}", _GENERATED, *parts]) + "\n"


def _errors(root: type[EpochalError]) -> Iterator[type[EpochalError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == root.__module__:
            yield from _errors(child)


def _next_step(kind: type[EpochalError]) -> str:
    return "retried" if kind.outcome is Outcome.RETRYABLE else "stops the query"


def _first_line(kind: type[object]) -> str:
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def _attribute_docs(kind: type[object]) -> dict[str, str]:
    """Return the string below each attribute, which Python itself discards."""
    source = inspect.getsource(kind)
    found = re.findall(r'^    (\w+): [^\n]*\n    """(.*?)"""', source, re.DOTALL | re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def layers_table() -> str:
    """
    The packages from top to bottom: the order is import-linter's, the text the first line of each
    package's docstring.
    """
    rows = [
        f"| `{name}` | {_first_docstring_line(file)} |"
        for layer in _layers()
        for name, file in layer
    ]
    return "\n".join(["| package | contains |", "| --- | --- |", *rows]) + "\n"


def _layers() -> Iterator[list[tuple[str, Path]]]:
    """Each layer of pyproject.toml, with those of its packages and modules that exist."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contract = next(one for one in settings["contracts"] if one["type"] == "layers")
    for layer in contract["layers"]:
        names = [name.strip(" ()") for name in re.split("[|:]", layer)]
        yield [found for name in names if (found := _located(name)) is not None]


def pictures() -> dict[str, str]:
    """The pictures of the architecture, by the name of their file."""
    return architecture_pictures.pictures([name for layer in _layers() for name, _ in layer])


def _located(name: str) -> tuple[str, Path] | None:
    for title, file in (
        (f"{name}/", PACKAGE / name / "__init__.py"),
        (f"{name}.py", PACKAGE / f"{name}.py"),
    ):
        if file.exists():
            return title, file
    return None


def _first_docstring_line(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return text.partition("\n")[0].rstrip(".")


def _example(name: str) -> str:
    """
    A file of examples/epochal-sqlite, as a block of code. `py` and not `python`: the blocks of a
    page are checked as one module, and this is a module by itself, which mypy checks in its place.
    """
    text = (ROOT / "examples" / "epochal-sqlite" / name).read_text()
    return f"```{name.rpartition('.')[2]}\n{text}```\n"


PARTS: dict[str, Callable[[], str]] = {
    "layers": layers_table,
    "promises-readers": docs_sinks.promises_to_readers,
    "promises-modes": docs_sinks.promised_modes,
    "promises-limits": docs_sinks.promised_limits,
    "example-sink": lambda: _example("epochal_sqlite.py"),
    "example-tests": lambda: _example("test_epochal_sqlite.py"),
    "example-package": lambda: _example("pyproject.toml"),
}


def _with_parts(text: str) -> str:
    return _PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n{found[3]}", text)


def write() -> None:
    """Write every generated page, and the generated parts of other pages."""
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (REFERENCE / name).write_text(make())
    for name, picture in pictures().items():
        (IMAGES / name).write_text(picture)
    for page in PART_PAGES:
        page.write_text(_with_parts(page.read_text()))


def _stale() -> list[str]:
    """The pages that are not as the code makes them."""
    reference = [
        f"docs/reference/{name}"
        for name, make in PAGES.items()
        if not (REFERENCE / name).exists() or (REFERENCE / name).read_text() != make()
    ]
    parts = [
        str(page.relative_to(ROOT))
        for page in PART_PAGES
        if not _PART.search(page.read_text()) or _with_parts(page.read_text()) != page.read_text()
    ]
    images = [
        f"docs/images/{name}"
        for name, picture in pictures().items()
        if not (IMAGES / name).exists() or (IMAGES / name).read_text() != picture
    ]
    return [*reference, *parts, *images]


def _undocumented_errors() -> list[str]:
    """Error codes without a page, or whose page lacks the class or the exit code."""
    missing = []
    for kind in _errors(EpochalError):
        page = TROUBLE / f"{kind.code}.md"
        text = page.read_text() if page.exists() else ""
        facts = (f"# `{kind.code}`", f"`{kind.__name__}`", f"exit code {kind.exit_code}")
        if not all(fact in text for fact in facts):
            missing.append(f"{page.relative_to(ROOT)}: {', '.join(facts)}")
    return missing


def _dead_links() -> list[str]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in _LINK.findall(page.read_text())
        if not (page.parent / link).exists()
    ]


def _build_site() -> int:
    """Build the site in build/site; every warning is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
    # Silences an advertisement of the theme.
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def main() -> int:
    is_check = "--check" in sys.argv
    if not is_check:
        write()
    stale, dead, undocumented = _stale(), _dead_links(), _undocumented_errors()
    for name in stale:
        print(f"{name} is out of date: run `make docs`", file=sys.stderr)
    for link in dead:
        print(f"dead link: {link}", file=sys.stderr)
    for page in undocumented:
        print(f"an error without its page: {page}", file=sys.stderr)
    if stale or dead or undocumented:
        return 1
    return 0 if is_check else _build_site()


if __name__ == "__main__":
    sys.exit(main())
