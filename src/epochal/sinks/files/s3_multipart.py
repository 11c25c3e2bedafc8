"""
The back end of a Files sink on S3: multipart uploads that stay incomplete until the decision.

An upload has its final key from the start, is invisible until it is completed, and can be completed
by any process that knows its id and the tags of its parts, which are in the receipt. Nothing is
copied. A bucket lists uploads by key, and the key carries the handle (I6): an upload is its own
marker.

Completing an upload again is answered differently by different servers, and "done" does not show
who did it. The proof is the metadata that the upload was begun with, found on the object (I9).
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import pyarrow as pa

from epochal.errors import EpochalError, Misconfigured, PreparedLost, TryAgain
from epochal.kit.marked_files import at_once
from epochal.sinks.files import layout
from epochal.sinks.files.backend import PreparedFile, Showing, Stores, files_of
from epochal.sinks.files.local import half_published
from epochal.sinks.files.s3 import (
    Completion,
    PartSender,
    PartStream,
    S3Store,
    Upload,
    check_lifecycle,
)
from epochal.sinks.files.whole_objects import check_put_if_absent, remove_old_objects
from epochal.terms import (
    NO_ROWS,
    Ability,
    EpochNumber,
    Handle,
    Identity,
    InDoubt,
    Json,
    Receipt,
    handle_prefix,
)

_SCRATCH_AGE_S = 600.0
_DAY_S = 86400.0


class MultipartAttempt:
    """One attempt's uploads."""

    def __init__(self, store: S3Store, ours: S3Store, *, file_bytes_max: int) -> None:
        self.ours = ours
        self._store = store
        self._sender = PartSender(store, file_bytes_max=file_bytes_max)
        self._streams: dict[str, PartStream] = {}

    @property
    def held_bytes(self) -> int:
        return sum(stream.held_bytes for stream in self._streams.values())

    def errors(self) -> AbstractContextManager[None]:
        """The store raises our errors itself."""
        return nullcontext()

    def create(self, relative: str) -> pa.NativeFile:
        stream = self._streams[relative] = PartStream(relative, self._sender)
        return pa.PythonFile(stream, mode="w")

    def seal(self, relatives: Sequence[str]) -> list[dict[str, Json]]:
        sent = [(relative, self._streams[relative].sent()) for relative in relatives]
        self._sender.stop()
        return [
            {"path": relative, "bytes": one.bytes, "upload": one.upload, "parts": list(one.parts)}
            for relative, one in sent
        ]

    def discard(self) -> None:
        self._sender.stop()
        begun = [
            (stream.key, upload)
            for stream in self._streams.values()
            if (upload := stream.begun()) is not None
        ]
        at_once(lambda one: self._store.abort_upload(*one), begun)


class MultipartStaging:
    """Uploads as the driver sees them."""

    trusts_rehearsal = True
    shows_by_manifest = False

    def __init__(
        self, store: S3Store, ours: S3Store, identity: Identity, *, recovery_days: int
    ) -> None:
        self.stores = Stores(shown=store, ours=ours)
        self.store = store
        self._ours = ours
        self._identity = identity
        self._prefix = handle_prefix(identity.uid)
        self._scratch = layout.scratch_of(identity.uid, identity.tag)
        self._recovery_days = recovery_days

    def check(self) -> Sequence[Ability]:
        return [
            check_put_if_absent(self._ours, self._identity),
            self._try_upload(),
            check_lifecycle(self.store, self._ours, recovery_days=self._recovery_days),
        ]

    def rehearse(self, receipts: Sequence[Receipt]) -> None:
        there = self._uploads() if any(map(files_of, receipts)) else {}
        for receipt in receipts:
            for file in files_of(receipt):
                if there.get((layout.require_inside(file.path), file.upload)) is None:
                    raise TryAgain(
                        f"{self.store.location} does not list the upload of {file.path} that a "
                        "task has made",
                        "somebody aborts uploads: look for a lifecycle rule, or another tool",
                    )

    def publish(self, epoch: EpochNumber, receipts: Sequence[Receipt], showing: Showing) -> bool:
        files = [(receipt.handle, file) for receipt in receipts for file in files_of(receipt)]
        shown = at_once(lambda one: self._complete(*one), files)
        gone = [file for (_, file), done in zip(files, shown, strict=True) if done is None]
        if gone:
            self.require_prepared(epoch, receipts, showing)
            there = self._uploads()
            if any((file.path, file.upload) in there for file in gone):
                raise TryAgain(
                    f"epoch {epoch}: not all uploads below {self.store.location} are complete"
                )
        return all(shown)

    def is_published(self, receipt: Receipt) -> bool:
        return any(self._are_published(receipt))

    def is_prepared(self, receipt: Receipt) -> bool:
        there = self._uploads() if files_of(receipt) else {}
        return any((file.path, file.upload) in there for file in files_of(receipt))

    def discard(self, receipt: Receipt) -> None:
        files = files_of(receipt)
        named = [(layout.require_inside(file.path), file.upload) for file in files]
        uploads = named or [
            key for key in self._uploads() if layout.handle_in(key[0]) == receipt.handle
        ]
        at_once(lambda one: self.store.abort_upload(*one), uploads)

    def clear(self, receipts: Sequence[Receipt]) -> None:
        """A completed upload leaves nothing beside its object."""

    def listed(self) -> Sequence[InDoubt]:
        """One entry per attempt, with all its uploads."""
        groups: dict[Handle | str, list[Upload]] = defaultdict(list)
        for upload in self._uploads().values():
            name = layout.name_of(upload.key)
            if name.startswith(self._prefix):
                groups[layout.handle_in(upload.key) or name].append(upload)
        return [_in_doubt(owner, uploads) for owner, uploads in groups.items()]

    def clear_listed(self, found: InDoubt) -> None:
        """Abort an upload that was begun twice because the first reply was lost."""
        if found.receipt is not None:
            self.discard(found.receipt)

    @property
    def engine_location(self) -> str:
        return self.stores.shown.location

    def engine_refusal(self) -> str:
        return "objects are uploaded by tasks"

    def engine_attempt(self, handle: Handle) -> None:
        """Only tasks upload."""

    def remove_old_scratch(self) -> None:
        remove_old_objects(self._ours, self._identity)
        for upload in self._ours.uploads(self._scratch):
            if upload.age_s > _SCRATCH_AGE_S:
                self._ours.abort_upload(upload.key, upload.id)

    def _uploads(self) -> dict[tuple[str, str], Upload]:
        return {(upload.key, upload.id): upload for upload in self.store.uploads()}

    def _complete(self, handle: Handle, file: PreparedFile) -> bool | None:
        """True where this call did it, False where it was done, None where it can't be."""
        key = layout.require_inside(file.path)
        completion = self.store.complete(key, file.upload, file.parts)
        is_mine = completion is Completion.DONE
        if self.store.is_object_of(key, handle, file.bytes):
            return is_mine
        if completion is Completion.UNSURE:
            # Not lost: the repeat finds the note that it may have been shown, and taken away since.
            raise TryAgain(
                f"{self.store.location} may have completed the upload of {key} before its answer "
                "was lost, and does not show its object"
            )
        if is_mine:
            raise TryAgain(
                f"{self.store.location} reports the upload of {key} as complete, and does not show "
                "its object",
                "the server must show an object as soon as it is there, as S3 does",
            )
        return None

    def _are_published(self, receipt: Receipt) -> list[bool]:
        return at_once(
            lambda file: self.store.is_object_of(
                layout.require_inside(file.path), receipt.handle, file.bytes
            ),
            files_of(receipt),
        )

    def require_prepared(
        self, epoch: EpochNumber, receipts: Sequence[Receipt], showing: Showing
    ) -> None:
        """
        Before anything is published: only what is lost whole can be written again. An upload that
        may have been completed before, and its object taken away since, is done; unless the bucket
        may have aborted it by now.
        """
        there = self._uploads()
        missing: list[tuple[Receipt, list[str], list[str]]] = []
        for receipt in receipts:
            files = files_of(receipt)
            waiting = [(file.path, file.upload) in there for file in files]
            if all(waiting):
                continue
            shown = self._are_published(receipt)
            found = list(zip(files, waiting, shown, strict=True))
            gone = [file.path for file, is_waiting, is_seen in found if not (is_waiting or is_seen)]
            if gone:
                missing.append(
                    (receipt, gone, [file.path for file, _, is_seen in found if is_seen])
                )
        if not missing:
            return
        shown_for_s = showing.age_s()
        is_showing = shown_for_s is not None
        if shown_for_s is not None and shown_for_s < self._recovery_days * _DAY_S:
            return
        for _, gone, seen in missing:
            if seen or is_showing:
                raise half_published(epoch, gone, seen, showing)
        raise PreparedLost(
            f"epoch {epoch}: uploads of {len(missing)} of {len(receipts)} receipts are neither "
            f"listed below {self.store.location} nor complete",
            "somebody aborted them: look at the bucket's lifecycle rules",
            handles=tuple(str(receipt.handle) for receipt, _, _ in missing),
        )

    def _try_upload(self) -> Ability:
        """Every request of a prepare and a commit, on a scratch key."""
        key = f"{self._scratch}{secrets.token_hex(8)}"
        upload = self._ours.begin_upload(key)
        try:
            tag = self._ours.put_part(key, upload, 1, b"probe")
            is_listed = any(one.id == upload for one in self._ours.uploads(self._scratch))
            is_hidden = self._ours.entry(key) is None
            if not (is_listed and is_hidden):
                raise Misconfigured(
                    f"{self._ours.location} "
                    + ("shows incomplete uploads" if is_listed else "does not list uploads by key"),
                    'uploads="manifest" asks less of a server',
                )
            self._ours.complete(key, upload, [tag])
        except EpochalError:
            self._ours.abort_upload(key, upload)
            raise
        self._ours.delete([key])
        return Ability(
            name="incomplete uploads",
            granted=True,
            because=f"{self._ours.location} kept one invisible, listed it and completed it",
        )


def _in_doubt(owner: Handle | str, uploads: Sequence[Upload]) -> InDoubt:
    age_s = max(upload.age_s for upload in uploads)
    if isinstance(owner, str):
        return InDoubt(name=owner, handle=None, age_s=age_s)
    files: list[Json] = [
        {"path": upload.key, "rows": 0, "bytes": 0, "upload": upload.id} for upload in uploads
    ]
    receipt = Receipt(handle=owner, fingerprint=NO_ROWS, token={"files": files})
    return InDoubt(name=str(owner), handle=owner, age_s=age_s, receipt=receipt)
