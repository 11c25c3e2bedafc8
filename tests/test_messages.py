"""Every message that only a person can act on says how, and names commands that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from epochal import cli

SOURCE = Path(cli.__file__).parents[1]
FOR_A_PERSON = ("Misconfigured", "Refused", "Unsettled", "GateRefused")
COMMAND = re.compile(r"`epochal ([a-z][^`]+)`")
PLACEHOLDER = "…"


@cache
def trees() -> dict[Path, ast.Module]:
    """Of the files that may have such a message, by their text: many are generated and long."""
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(SOURCE.rglob("*.py"))}
    words = ("epochal ", *FOR_A_PERSON)
    return {
        file: ast.parse(text) for file, text in texts.items() if any(word in text for word in words)
    }


def text_of(node: ast.expr) -> str:
    """A text with a placeholder for each value; empty for what is no text."""
    match node:
        case ast.Constant(value=str()):
            return str(node.value)
        case ast.JoinedStr():
            return "".join(map(text_of, node.values))
        case ast.FormattedValue():
            return PLACEHOLDER
    return ""


def test_every_error_for_a_person_has_a_hint() -> None:
    without = [
        f"{file}:{node.lineno}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in FOR_A_PERSON
        and len(node.args) < 2
        and not any(one.arg == "hint" for one in node.keywords)
    ]
    assert without == []


@cache
def commands() -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for verb, command in typer.main.get_command(cli.application()).commands.items():  # type: ignore[attr-defined]
        found |= {(verb, name): one for name, one in getattr(command, "commands", {}).items()} or {
            (verb,): command
        }
    return found


def named() -> Iterator[tuple[str, str]]:
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                for written in COMMAND.findall(text_of(node)):
                    yield f"{file.relative_to(SOURCE)}:{node.lineno}", written


def fault_of(written: str) -> str | None:
    """Why nobody can run it. It must have all that it needs, where it is written with any of it."""
    known, words = commands(), written.split()
    if words in [[group] for group, *_ in known]:
        return None
    name = next((words[:length] for length in (2, 1) if tuple(words[:length]) in known), None)
    if name is None:
        return "there is no such command"
    command = known[tuple(name)]
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    if unknown := given - {option for one in command.params for option in one.opts} - {"--help"}:
        return f"there is no {sorted(unknown)}"
    needed = {one.opts[0] for one in command.params if one.required and one.opts[0][0] == "-"}
    if len(words) == len(name) or needed <= given or given == {"--dry-run"}:
        return None
    return f"{sorted(needed - given)} is missing"


def test_a_command_that_a_message_names_exists_with_its_options() -> None:
    faults = [(at, written, fault_of(written)) for at, written in named()]
    assert len(faults) > 50
    assert [one for one in faults if one[-1]] == []
