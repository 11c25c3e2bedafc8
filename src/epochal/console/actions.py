"""
The actions of the console: recover and resolve, as on the command line.

They need a token, a confirmation on the page that shows the plan, and, to reach the targets, a
pipeline named with --pipeline: a log holds no credentials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from epochal.config.resolve_target import OpenedTarget, log_at, open_target
from epochal.errors import Refused
from epochal.protocol.state import GivenUp
from epochal.reports import resolve
from epochal.reports.model import PipelineReport, RecoveryReport, ResolutionReport
from epochal.reports.recover import plan_recovery, recover
from epochal.terms import EpochNumber, SinkName


@dataclass(frozen=True, slots=True)
class Actions:
    targets: Sequence[str] = ()
    """`module:pipeline` or YAML files, through which targets are reached."""

    def target_of(self, one: PipelineReport) -> str | None:
        """The name on the command line through which the targets are reached; None if unknown."""
        return next((each.target for each in self._all() if each.pipeline == one.pipeline), None)

    def plan(self, one: PipelineReport) -> RecoveryReport:
        return plan_recovery(self._opened(one))

    def recover(self, one: PipelineReport, *, take_over: bool) -> RecoveryReport:
        return recover(self._opened(one), take_over=take_over)

    def finish(
        self, one: PipelineReport, sink: str, epoch: int, *, by: str, dry_run: bool
    ) -> ResolutionReport:
        return resolve.finish(self._opened(one), sink=sink, epoch=epoch, by=by, dry_run=dry_run)

    def give_up(
        self,
        one: PipelineReport,
        sink: str,
        epoch: int,
        *,
        by: str,
        kept_at: str,
        because: str,
        dry_run: bool,
    ) -> ResolutionReport:
        given_up = GivenUp(
            epoch=EpochNumber(epoch),
            sink=SinkName(sink),
            kept_at=kept_at,
            by=by,
            because=because,
        )
        is_known = self.target_of(one) is not None
        opened = self._opened(one) if is_known else self._log_alone(one)
        return resolve.give_up(opened, given_up, dry_run=dry_run)

    def _all(self) -> list[OpenedTarget]:
        return [open_target(target) for target in self.targets]

    def _opened(self, one: PipelineReport) -> OpenedTarget:
        for opened in self._all():
            if opened.pipeline == one.pipeline:
                # The log of this report: a pipeline has a log per run.
                return replace(opened, log=log_at(one.log))
        raise Refused(
            f"the console does not know the targets of {one.pipeline!r}",
            "start it with --pipeline module:object, or use `epochal recover`",
        )

    def _log_alone(self, one: PipelineReport) -> OpenedTarget:
        return OpenedTarget(target=one.location, log=log_at(one.log))
