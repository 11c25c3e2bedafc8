"""How an object store is reached: options that hold their secrets as secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping

from epochal.errors import Misconfigured
from epochal.kit.secrets import HeldSecret, Secret
from epochal.sinks.files.urls import Options

S3_OPTIONS = (
    "access_key_id",
    "addressing_style",
    "encryption",
    "endpoint_url",
    "kms_key_id",
    "profile",
    "region",
    "secret_access_key",
    "session_token",
)
_PLAIN = frozenset({"kms_key_id"})
_SECRET_SIGNS = ("key", "token", "secret", "password", "credential", "sas", "account")


def storage_options(scheme: str, given: Mapping[str, str | Secret] | str) -> Options:
    """Checked and sorted; a value whose name sounds secret is held as one."""
    options = _parsed(given)
    if options and scheme == "file":
        raise Misconfigured("storage_options are for object stores, and the path is a folder")
    unknown = sorted(set(options) - set(S3_OPTIONS)) if scheme == "s3" else []
    if unknown:
        raise Misconfigured(
            f"storage_options {unknown} are not known for S3", f"it has {', '.join(S3_OPTIONS)}"
        )
    if "kms_key_id" in options and options.get("encryption") != "aws:kms":
        raise Misconfigured(
            "storage_options: kms_key_id without encryption='aws:kms'",
            'storage_options={"encryption": "aws:kms", "kms_key_id": …}',
        )
    return tuple(sorted((name, _held(name, value)) for name, value in options.items()))


def _parsed(given: Mapping[str, str | Secret] | str) -> Mapping[str, str | Secret]:
    """Also from text: Spark's options are strings."""
    if not isinstance(given, str):
        return given
    try:
        options = json.loads(given)
    except ValueError:
        options = None
    # The text is not shown: it may hold a key.
    if not isinstance(options, dict) or not all(isinstance(one, str) for one in options.values()):
        raise Misconfigured(
            "storage_options is text, and not a JSON object of strings",
            """'{"endpoint_url": "…", "region": "…"}'""",
        )
    return options


def _held(name: str, value: str | Secret) -> str | Secret:
    sounds_secret = any(sign in name.lower() for sign in _SECRET_SIGNS) and name not in _PLAIN
    return HeldSecret(value) if isinstance(value, str) and sounds_secret else value
