"""`epochal compact`: few large files in the place of many small ones."""

from __future__ import annotations

from typing import Annotated

import typer

from epochal.cli.output import (
    EXIT_FAILED,
    AsJson,
    Checkpoint,
    DryRun,
    Named,
    lines,
    message,
    show_json,
)
from epochal.config.resolve_target import open_target
from epochal.kit.compaction import TARGET_MB
from epochal.reports.compact import compact as compact_now


def compact(  # noqa: PLR0917  typer calls it by name
    pipeline: Named,
    checkpoint: Checkpoint = None,
    sink: Annotated[str | None, typer.Option(help="Only this sink.")] = None,
    target_mb: Annotated[
        int, typer.Option("--target-mb", min=1, help="How large files should become.")
    ] = TARGET_MB,
    dry_run: DryRun = False,
    is_json: AsJson = False,
) -> None:
    """
    Compact small files of Delta and Iceberg tables. Readers see the same rows before and after.

    The pipeline may run meanwhile: only what is visible is touched, by one commit of the table's
    own. What was replaced stays for readers of older versions until VACUUM, or until snapshots are
    expired. With compact= on the sink the driver does the same now and then.

    Example: epochal compact jobs.orders:pipeline --dry-run
    """
    report = compact_now(
        open_target(pipeline, checkpoint=checkpoint),
        target_mb=target_mb,
        dry_run=dry_run,
        only=sink,
    )
    if is_json:
        show_json(report)
    else:
        message(f"pipeline {report.pipeline!r} at {report.location}")
        lines(f"{name}: {one.result}" for name, one in report.sinks.items())
    if any(one.is_failed for one in report.sinks.values()):
        raise typer.Exit(EXIT_FAILED)
