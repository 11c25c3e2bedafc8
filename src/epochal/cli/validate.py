"""`epochal validate` and `epochal init`: check and create a pipeline's YAML file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from epochal.config import Mistakes, json_schema
from epochal.config.coerce import Mistake
from epochal.config.pipeline import file_at
from epochal.errors import Misconfigured

_READ_MODEL = 1


def validate(
    file: Annotated[
        Path | None, typer.Argument(metavar="[PIPELINE.YAML]", help="The file to check.")
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of such files, for editors.")
    ] = False,
    is_json: Annotated[bool, typer.Option("--json", help="Print the mistakes as JSON.")] = False,
) -> None:
    """
    List the mistakes in a pipeline's file with their lines, without starting Spark.

    Example: epochal validate orders.yaml
    """
    if schema:
        sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
        return
    if file is None:
        raise typer.BadParameter("give a file: epochal validate orders.yaml")
    try:
        declared = file_at(file, is_to_run=True)
    except Mistakes as mistakes:
        if is_json:
            _print_json(mistakes.found)
            raise typer.Exit(1) from None
        raise
    if is_json:
        _print_json([])
        return
    sinks = ", ".join(sink.name for sink in declared.sinks)
    sys.stdout.write(f"{file}: pipeline {declared.pipeline!r} into {sinks}: no mistake found\n")
    sys.stderr.write(f"epochal run {file} --check also checks SQL, the source and the targets\n")


def _print_json(mistakes: Sequence[Mistake]) -> None:
    found = [
        {
            "file": one.position.file,
            "line": one.position.line,
            "column": one.position.column,
            "message": one.message,
            "hint": one.hint,
        }
        for one in mistakes
    ]
    sys.stdout.write(json.dumps({"version": _READ_MODEL, "mistakes": found}) + "\n")


def init(
    file: Annotated[
        Path, typer.Argument(metavar="PIPELINE.YAML", help="The file to write.")
    ] = Path("pipeline.yaml"),
) -> None:
    """
    Write a commented example of a pipeline's file that runs without changes.

    Example: epochal init orders.yaml && epochal run orders.yaml --available-now
    """
    example = files("epochal.config").joinpath("example.yaml").read_text(encoding="utf-8")
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(example)
    except FileExistsError:
        raise Misconfigured(f"{file} exists already", "name another file, or remove it") from None
    except OSError as error:
        raise Misconfigured(
            f"{file} can't be written: {error.strerror}", "name a file in an existing folder"
        ) from None
    sys.stderr.write(f"wrote {file}; next: epochal validate {file}, epochal run {file}\n")
