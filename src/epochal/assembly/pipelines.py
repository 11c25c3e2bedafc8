"""A pipeline from its file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from epochal.assembly.vocabulary import vocabulary
from epochal.config import PipelineFile, read_file
from epochal.coordinator import Gate
from epochal.spark.pipeline import Pipeline

SUFFIXES = (".yaml", ".yml")


def is_file(where: str) -> bool:
    return where.endswith(SUFFIXES)


def file_at(path: Path, *, is_to_run: bool = False) -> PipelineFile:
    """A pipeline's file, fitted; raises `Mistakes` with every line that is wrong."""
    return read_file(path, vocabulary(finds_names=is_to_run))


def pipeline_of(file: PipelineFile, gates: Iterable[Gate] = ()) -> Pipeline:
    """What a file declares. Its gates may be left out where no query runs that would ask them."""
    return Pipeline(
        file.pipeline,
        sinks=file.sinks,
        gates=gates,
        limits=file.limits,
        log=file.log,
        checkpoint=file.checkpoint,
        fingerprint=file.fingerprint,
        metrics_port=file.metrics.port,
        metrics_host=file.metrics.host,
    )
