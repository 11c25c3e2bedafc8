"""`epochal doctor`: ask the log and every target, and say what needs somebody."""

from __future__ import annotations

import typer

from epochal.assembly import reach
from epochal.cli.showing import EXIT_FAILED, AsJson, Checkpoint, Target, age, lines, say, show_json
from epochal.reports.doctor import examine
from epochal.reports.model import DoctorReport, SinkDiagnosis


def doctor(pipeline: Target, checkpoint: Checkpoint = None, is_json: AsJson = False) -> None:
    """
    Ask every target what it can promise, how its clock goes, and what lingers there.

    Prepared work is listed with its age, what would become of it, and what it blocks meanwhile.
    Changes nothing that a reader sees. Exits with 1 where something needs somebody.

    Example: epochal doctor jobs.orders:pipeline
    """
    report = examine(reach(pipeline, checkpoint=checkpoint))
    if is_json:
        show_json(report)
    else:
        _show(report)
    if report.problems:
        raise typer.Exit(EXIT_FAILED)


def _show(report: DoctorReport) -> None:
    lines([f"log: {report.log}"])
    if report.driver is not None:
        lines([f"driver: {report.driver.liveness.value}: {report.driver.because}"])
    for sink in report.sinks:
        lines(_told(sink))
    if not report.sinks:
        say("no target was asked: a place was named, and a log holds no credentials")
    for problem in report.problems:
        say(f"needs somebody: {problem}")
    if not report.problems:
        say("nothing needs anybody")
    elif any(one.found for one in report.sinks):
        say(f"hint: `epochal recover {report.target} --dry-run` shows what would become of it")


def _told(sink: SinkDiagnosis) -> list[str]:
    head = f"{sink.sink}: {'reached' if sink.is_reached else 'NOT reached: ' + sink.error}"
    told = [head]
    if sink.hint:
        told.append(f"  hint: {sink.hint}")
    told += [
        f"  {'yes' if one.granted else 'no':3} {one.name}: {one.because}" for one in sink.abilities
    ]
    if sink.newest:
        told.append(f"  {sink.newest}")
    if sink.clock_skew_s is not None:
        told.append(f"  clock: {sink.clock_skew_s:+.3f} s against this machine")
    for one in sink.found:
        blocks = f"; blocks {one.blocks}" if one.blocks else ""
        told.append(f"  {one.name}, {age(one.age_s) or 'age unknown'}: {one.verdict}{blocks}")
    return told
