"""Pipelines in YAML: parsing, checking against types, and errors with line and hint.

tree            parses YAML to nodes with positions, and substitutes environment variables
type_hints      classifies type hints
coerce          converts nodes to the types of dataclass fields, and collects all mistakes
file            the keys of a pipeline's file
schema          the same keys as a JSON schema, for editors
pipeline        a file as a Pipeline, with its Spark session, stream and gates
resolve_target  the log and the sinks of what a person names: a pipeline, a file, a checkpoint
"""

from __future__ import annotations

from epochal.config.coerce import Mistakes
from epochal.config.file import PipelineFile, read_file
from epochal.config.schema import json_schema

__all__ = ["Mistakes", "PipelineFile", "json_schema", "read_file"]
