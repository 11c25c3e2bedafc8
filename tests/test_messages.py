"""Every message that only a person can act on says how, and names commands that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from epochal import cli

SOURCE = Path(cli.__file__).parents[1]
FOR_A_PERSON = ("Misconfigured", "Refused", "Unsettled", "GateRefused")
COMMAND = re.compile(r"`epochal ([a-z][^`]+)`")
PLACEHOLDER = "…"


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for file in sorted(SOURCE.rglob("*.py")):
        yield file, ast.parse(file.read_text(encoding="utf-8"))


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
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in FOR_A_PERSON
        and len(node.args) < 2
        and not any(one.arg == "hint" for one in node.keywords)
    ]
    assert without == []


def commands() -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for verb, command in typer.main.get_command(cli.application()).commands.items():  # type: ignore[attr-defined]
        found |= {(verb, name): one for name, one in getattr(command, "commands", {}).items()} or {
            (verb,): command
        }
    return found


def named() -> Iterator[tuple[str, str]]:
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                for written in COMMAND.findall(text_of(node)):
                    yield f"{file.relative_to(SOURCE)}:{node.lineno}", written


@pytest.mark.parametrize("written", sorted({written for _, written in named()}))
def test_a_command_that_a_message_names_exists_with_its_options(written: str) -> None:
    """Also whether it has all that it needs, where it is written with any of it."""
    known, words = commands(), written.split()
    if words in [[group] for group, *_ in known]:
        return
    name = next((words[:length] for length in (2, 1) if tuple(words[:length]) in known), None)
    assert name is not None, f"epochal {written}"
    command = known[tuple(name)]
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert given <= {option for one in command.params for option in one.opts} | {"--help"}
    if len(words) > len(name):
        needed = {one.opts[0] for one in command.params if one.required and one.opts[0][0] == "-"}
        assert needed <= given or given == {"--dry-run"}
