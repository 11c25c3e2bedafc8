"""Compaction of a pipeline's targets by hand: few large files in the place of many small ones."""

from __future__ import annotations

from epochal.config.resolve_target import OpenedTarget
from epochal.coordinator.targets import by_name
from epochal.errors import EpochalError, Misconfigured
from epochal.kit.compaction import compacted, describe
from epochal.reports.inspect import committer_of, error_text
from epochal.reports.model import CompactReport, SinkCompaction
from epochal.reports.status import require_record

_MB = 1024 * 1024


def compact(
    opened: OpenedTarget, *, target_mb: int, dry_run: bool, only: str | None = None
) -> CompactReport:
    """Compact every sink, or one; the pipeline may run meanwhile."""
    state = require_record(opened.require_log()).record.state
    sinks = by_name(opened.require_sinks())
    if only is not None and only not in sinks:
        raise Misconfigured(f"there is no sink {only!r}", f"the sinks are {', '.join(sinks)}")
    found: dict[str, SinkCompaction] = {}
    for name, sink in sinks.items():
        if only in (None, name):
            try:
                with committer_of(sink, state, opened.limits) as committer:
                    done = compacted(committer, target_mb * _MB, is_dry_run=dry_run)
            except (EpochalError, OSError) as error:
                found[name] = SinkCompaction(is_failed=True, result=error_text(error))
                continue
            found[name] = SinkCompaction(
                files_before=done.files_before,
                files_after=done.files_after,
                result=describe(done, is_dry_run=dry_run),
            )
    return CompactReport(
        location=state.location, pipeline=state.pipeline, is_dry_run=dry_run, sinks=found
    )
