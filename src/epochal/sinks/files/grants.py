"""The least that credentials of a sink on S3 need, as a policy document of IAM."""

from __future__ import annotations

import json
from collections.abc import Mapping

from epochal.sinks.files import layout
from epochal.sinks.files.urls import Target
from epochal.terms import Json


def policy(target: Target, *, has_uploads: bool, kms_key_id: str | None) -> str:
    """
    For the driver and the executors alike. To remove is allowed below `_epochal/` only: no row that
    a reader sees can be removed with it.
    """
    bucket = f"arn:aws:s3:::{target.bucket}"
    below = f"{bucket}/{target.prefix}/" if target.prefix else f"{bucket}/"
    listing = ["s3:ListBucket"]
    writing = ["s3:GetObject", "s3:PutObject"]
    if has_uploads:
        listing += ["s3:GetLifecycleConfiguration", "s3:ListBucketMultipartUploads"]
        writing += ["s3:AbortMultipartUpload"]
    statements: list[Mapping[str, Json]] = [
        {"Effect": "Allow", "Action": listing, "Resource": bucket},
        {"Effect": "Allow", "Action": writing, "Resource": f"{below}*"},
        {"Effect": "Allow", "Action": "s3:DeleteObject", "Resource": f"{below}{layout.OURS}/*"},
    ]
    if kms_key_id is not None:
        # To complete an upload decrypts its parts.
        actions = ["kms:Decrypt", "kms:GenerateDataKey"]
        statements.append({"Effect": "Allow", "Action": actions, "Resource": kms_key_id})
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=2)
