"""Pipelines in YAML: read with the line of every value, fitted to types, refused with the way out.

tree      YAML text to values that know their place; environment variables filled in
fitting   such values to the types that dataclasses declare; every mistake is collected
file      what a pipeline's file may say
schema    the same as a JSON schema, for editors
"""

from __future__ import annotations

from epochal.config.coerce import Mistakes, Vocabulary
from epochal.config.file import PipelineFile, read_file
from epochal.config.schema import json_schema

__all__ = ["Mistakes", "PipelineFile", "Vocabulary", "json_schema", "read_file"]
