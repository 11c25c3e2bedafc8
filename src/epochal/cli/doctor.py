"""`epochal doctor`: query the log and every target, and list problems."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from epochal.cli.output import (
    EXIT_FAILED,
    AsJson,
    Checkpoint,
    Target,
    age,
    lines,
    message,
    show_json,
    standby_lines,
)
from epochal.config.resolve_target import open_target
from epochal.reports.doctor import diagnose
from epochal.reports.model import DoctorReport, SinkDiagnosis
from epochal.terms import Ability


def doctor(pipeline: Target, checkpoint: Checkpoint = None, is_json: AsJson = False) -> None:
    """
    Query every target: its abilities, its clock, and the prepared work it holds.

    Prepared work is listed with its age, what recovery would do with it, and what it blocks.
    Changes nothing that readers see. Exits with 1 if there is a problem.

    Example: epochal doctor jobs.orders:pipeline
    """
    report = diagnose(open_target(pipeline, checkpoint=checkpoint))
    if is_json:
        show_json(report)
    else:
        _show(report)
    if report.problems:
        raise typer.Exit(EXIT_FAILED)


def _show(report: DoctorReport) -> None:
    lines([f"log: {report.log}", *_ability_lines(report.log_servers)])
    if report.driver is not None:
        lines([f"driver: {report.driver.liveness.value}: {report.driver.because}"])
    lines(standby_lines(report.standbys))
    for sink in report.sinks:
        lines(_sink_lines(sink))
    if not report.sinks:
        message("no target was queried: a checkpoint was named, and a log holds no credentials")
    for problem in report.problems:
        message(f"problem: {problem}")
    if not report.problems:
        message("no problems")
    elif any(one.found for one in report.sinks):
        message(f"hint: `epochal recover {report.target} --dry-run` shows what recovery would do")


def _ability_lines(abilities: Sequence[Ability]) -> list[str]:
    return [f"  {'yes' if one.granted else 'no':3} {one.name}: {one.because}" for one in abilities]


def _sink_lines(sink: SinkDiagnosis) -> list[str]:
    head = f"{sink.sink}: {'reached' if sink.is_reached else 'NOT reached: ' + sink.error}"
    text = [head]
    if sink.hint:
        text.append(f"  hint: {sink.hint}")
    text += _ability_lines(sink.abilities)
    if sink.newest:
        text.append(f"  {sink.newest}")
    if sink.clock_skew_s is not None:
        text.append(f"  clock: {sink.clock_skew_s:+.3f} s against this machine")
    for one in sink.found:
        blocks = f"; blocks {one.blocks}" if one.blocks else ""
        text.append(f"  {one.name}, {age(one.age_s) or 'age unknown'}: {one.verdict}{blocks}")
    return text
