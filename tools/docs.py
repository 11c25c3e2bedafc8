"""
Write the pages that are generated from the code, check that links lead somewhere, build the site.

    python tools/docs.py            write the pages, then the site into build/site
    python tools/docs.py --check    write nothing, fail where a page is out of date
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from typer.main import get_command

import docs_sinks
from epochal.broker.handlers import rows as api_rows
from epochal.cli import application
from epochal.contract import Limits
from epochal.errors import EpochalError
from epochal.protocol.invariants import RULES
from epochal.protocol.machine import TABLE, diagram
from epochal.telemetry.instruments import INSTRUMENTS
from epochal.terms import Outcome

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
TROUBLE = ROOT / "docs" / "troubleshooting"
_MADE = "<!-- made by `make docs` from the code: edit there -->"
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
        f"```mermaid\n{diagram()}\n```",
        "\n".join(["| phase | move | next phase |", "| --- | --- | --- |", *rows]),
    )


def invariants_page() -> str:
    rows = [f"| {number} | {text} |" for number, text in RULES.items()]
    return _page(
        "The invariants",
        "Checked at run time where a breach can be seen, by the model checker in every state, and "
        "by the simulation at every seed.",
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
        "Sorted by what the caller may do next. Every message ends with its code in brackets and, "
        "where there is one, a `hint:` with the way out.",
        "\n".join(
            [
                "| error | code | while carrying out a decision | exit code | meaning |",
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
    return _page(
        "APIs of the embedded broker",
        "What it does not do as Apache Kafka does: [internals](../internals/broker.md).",
        "\n".join(
            [
                "| key | API | versions | with transaction.version 2 |",
                "| --- | --- | --- | --- |",
                *rows,
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
        "From drivers (`metrics_port=`, `push_otlp`) and, as far as a log knows them, from the "
        "console. Names and labels stay; no label holds an epoch. `sink` is empty where a phase is "
        "the whole epoch's. See [operating](../guides/operating.md).",
        "\n".join(["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |", *rows]),
    )


def commands_page() -> str:
    """Every verb with its help, as `epochal <verb> --help` tells it."""
    parts = []
    for words, command in _commands(get_command(application()), ()):
        options = [
            f"| `{'`, `'.join(one.opts)}` | {getattr(one, 'help', None) or ''} |"
            for one in command.params
            if one.name != "help"
        ]
        table = "\n".join(["| | |", "| --- | --- |", *options]) if options else ""
        parts += [f"## epochal {' '.join(words)}", inspect.cleandoc(command.help or ""), table]
    return _page("Commands", *(part for part in parts if part))


def options_page() -> str:
    return _page("Options of every sink", *docs_sinks.options())


def keys_page() -> str:
    return _page("Keys of a pipeline's file", *docs_sinks.keys())


def rights_page() -> str:
    return _page("Least rights", *docs_sinks.rights())


def tested_page() -> str:
    return _page("What was tested with what", *docs_sinks.tested())


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner: Mapping[str, Any] = getattr(command, "commands", {})
    if not inner:
        yield words, command
    for name, one in inner.items():
        yield from _commands(one, (*words, name))


PAGES = {
    "broker-apis.md": broker_page,
    "commands.md": commands_page,
    "epoch.md": epoch_page,
    "errors.md": errors_page,
    "grants.md": rights_page,
    "invariants.md": invariants_page,
    "limits.md": limits_page,
    "metrics.md": metrics_page,
    "options.md": options_page,
    "tested.md": tested_page,
    "yaml.md": keys_page,
}


def _page(title: str, *parts: str) -> str:
    # The title first: the site takes it for the navigation only where nothing stands before it.
    return "\n\n".join([f"# {title}", _MADE, *parts]) + "\n"


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
    """The string below each attribute, which Python itself throws away."""
    source = inspect.getsource(kind)
    found = re.findall(r'^    (\w+): [^\n]*\n    """(.*?)"""', source, re.DOTALL | re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _stale() -> list[str]:
    return [
        name
        for name, make in PAGES.items()
        if not (REFERENCE / name).exists() or (REFERENCE / name).read_text() != make()
    ]


def _untold_errors() -> list[str]:
    """Codes without a page that says what to do, or whose page says another exit code."""
    untold = []
    for kind in _errors(EpochalError):
        page = TROUBLE / f"{kind.code}.md"
        text = page.read_text() if page.exists() else ""
        facts = (f"# `{kind.code}`", f"`{kind.__name__}`", f"exit code {kind.exit_code}")
        if not all(fact in text for fact in facts):
            untold.append(f"{page.relative_to(ROOT)}: {', '.join(facts)}")
    return untold


def _dead_links() -> list[str]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in _LINK.findall(page.read_text())
        if not (page.parent / link).exists()
    ]


def _build_site() -> int:
    """As files in build/site; every warning is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
    # The theme advertises another generator at every build.
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def main() -> int:
    is_check = "--check" in sys.argv
    if not is_check:
        REFERENCE.mkdir(parents=True, exist_ok=True)
        for name, make in PAGES.items():
            (REFERENCE / name).write_text(make())
    stale, dead, untold = _stale(), _dead_links(), _untold_errors()
    for name in stale:
        print(f"docs/reference/{name} is out of date: run `make docs`", file=sys.stderr)
    for link in dead:
        print(f"dead link: {link}", file=sys.stderr)
    for page in untold:
        print(f"an error without its page: {page}", file=sys.stderr)
    if stale or dead or untold:
        return 1
    return 0 if is_check else _build_site()


if __name__ == "__main__":
    sys.exit(main())
