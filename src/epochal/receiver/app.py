"""The receiver's HTTP side: addresses, who may ask, and how answers are told."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from epochal.receiver.answers import Refusal
from epochal.receiver.bodies import FORMATS, read_rows
from epochal.receiver.door import Door
from epochal.receiver.openapi import document
from epochal.receiver.store import Owner, Store

logger = logging.getLogger("epochal.receiver")

_Result = TypeVar("_Result")
Endpoint = Callable[[Request], Awaitable[Response]]

PROTOCOL = "epochal-two-phase"
_LISTED_MAX = 1000
_OPEN_TO_ALL = frozenset({"/health", "/openapi.json"})
_RETRY_AFTER_S = "1"


def make_app(store: Store, door: Door) -> Starlette:
    """Everything the receiver answers to, as `openapi.json` lists it."""
    verbs = _Verbs(store, door)
    routes = [
        ("GET", "/", verbs.about),
        ("GET", "/health", verbs.health),
        ("GET", "/openapi.json", verbs.openapi),
        ("POST", "/prepare/{txn}", verbs.prepare),
        ("POST", "/rehearse", verbs.rehearse),
        ("POST", "/commit/{txn}", verbs.commit),
        ("POST", "/abort/{txn}", verbs.abort),
        ("GET", "/transactions", verbs.transactions),
        ("GET", "/transactions/{txn}", verbs.transaction),
        ("POST", "/marks", verbs.mark),
        ("GET", "/marks", verbs.marks),
        ("DELETE", "/marks", verbs.forget),
        ("GET", "/rows", verbs.rows),
        ("GET", "/counts", verbs.counts),
    ]
    return Starlette(
        routes=[
            Route(path, _guarded(endpoint, door), methods=[method])
            for method, path, endpoint in routes
        ]
    )


class _Verbs:
    def __init__(self, store: Store, door: Door) -> None:
        self._store = store
        self._door = door

    async def about(self, request: Request) -> Response:  # noqa: ARG002
        about = {
            "protocol": PROTOCOL,
            "version": 1,
            "formats": list(FORMATS),
            "body_bytes_max": self._door.body_bytes_max,
            "rehearses": True,
            "counts": self._store.counts,
        }
        return JSONResponse(about)

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"status": "ok"})

    async def openapi(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse(document())

    async def prepare(self, request: Request) -> Response:
        txn, query = request.path_params["txn"], request.query_params
        body = await self._body(request)
        if "parts" in query:
            found = await _in_thread(self._store.seal, txn, _number(query, "parts"))
            return JSONResponse(found.told())
        rows = await _in_thread(read_rows, request.headers.get("content-type", ""), body)
        if "part" in query:
            found = await _in_thread(self._store.take_part, txn, _number(query, "part"), rows)
        else:
            found = await _in_thread(self._store.prepare, txn, rows)
        return JSONResponse(found.told())

    async def rehearse(self, request: Request) -> Response:
        told = await self._json(request)
        await _in_thread(self._store.rehearse, _names(told), _owner(told))
        return JSONResponse({"rehearsed": len(_names(told))})

    async def commit(self, request: Request) -> Response:
        owner = _owner(await self._json(request))
        found = await _in_thread(self._store.commit, request.path_params["txn"], owner)
        return JSONResponse(found.told())

    async def abort(self, request: Request) -> Response:
        found = await _in_thread(self._store.abort, request.path_params["txn"])
        return JSONResponse(found.told())

    async def transactions(self, request: Request) -> Response:
        query = request.query_params
        limit = min(_number(query, "limit", _LISTED_MAX), _LISTED_MAX)
        after = query.get("after", "")
        ask = partial(self._store.in_doubt, query.get("prefix", ""), after=after, limit=limit)
        found = await _in_thread(ask)
        more = found[-1].txn if found and len(found) == limit else None
        return JSONResponse({"transactions": [one.told() for one in found], "next": more})

    async def transaction(self, request: Request) -> Response:
        found = await _in_thread(self._store.find, request.path_params["txn"])
        return JSONResponse(found.told())

    async def mark(self, request: Request) -> Response:
        told = await self._json(request)
        uid, tag, epoch = told.get("uid"), told.get("tag"), told.get("epoch")
        if not (isinstance(uid, str) and isinstance(tag, str) and isinstance(epoch, int)):
            raise Refusal(400, "a mark needs uid, tag and epoch")
        await _in_thread(self._store.mark, uid, tag, epoch, _owner(told), _names(told))
        return JSONResponse({"uid": uid, "epoch": epoch})

    async def marks(self, request: Request) -> Response:
        query = request.query_params
        ask = partial(self._store.newest, _text(query, "pipeline"), _text(query, "sink"))
        return JSONResponse({"marks": await _in_thread(ask)})

    async def forget(self, request: Request) -> Response:
        query = request.query_params
        ask = partial(self._store.forget, _text(query, "uid"), _text(query, "tag"))
        return JSONResponse({"settled_below": await _in_thread(ask, _number(query, "below"))})

    async def rows(self, request: Request) -> Response:
        query = request.query_params
        limit = min(_number(query, "limit", _LISTED_MAX), _LISTED_MAX)
        ask = partial(
            self._store.rows,
            after=_number(query, "after", 0),
            limit=limit,
            is_whole=query.get("whole", "false") == "true",
            pipeline=query.get("pipeline", ""),
            sink=query.get("sink", ""),
        )
        found = await _in_thread(ask)
        more = found[-1]["seq"] if found and len(found) == limit else None
        return JSONResponse({"rows": found, "next": more})

    async def counts(self, request: Request) -> Response:
        query = request.query_params
        ask = partial(self._store.count, _text(query, "uid"), _text(query, "tag"))
        return JSONResponse({"epochs": await _in_thread(ask)})

    async def _json(self, request: Request) -> Mapping[str, Any]:
        try:
            told = json.loads(await self._body(request) or b"{}")
        except ValueError:
            raise Refusal(400, "the body is not JSON") from None
        if not isinstance(told, dict):
            raise Refusal(400, "the body is not a JSON object")
        return told

    async def _body(self, request: Request) -> bytes:
        """The whole body, or nothing: a connection that breaks in the middle raises."""
        pieces, size, most = [], 0, self._door.body_bytes_max
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                raise Refusal(413, f"a body may have {most} bytes: send the rows in more parts")
            pieces.append(piece)
        return b"".join(pieces)


def _guarded(endpoint: Endpoint, door: Door) -> Endpoint:
    async def guarded(request: Request) -> Response:
        if request.url.path not in _OPEN_TO_ALL and not door.admits(
            request.headers.get("authorization", "")
        ):
            headers = {"WWW-Authenticate": "Bearer"}
            return JSONResponse({"error": "a bearer token is needed"}, 401, headers)
        try:
            return await endpoint(request)
        except Refusal as refusal:
            return _refused(refusal)
        except ClientDisconnect:
            return Response(status_code=400)
        except sqlite3.OperationalError as error:
            # Locked, full or unreadable: nothing of the transaction has happened.
            logger.warning("%s %s: %s", request.method, request.url.path, error)
            headers = {"Retry-After": _RETRY_AFTER_S}
            return JSONResponse({"error": f"not now: {error}"}, 503, headers)

    return guarded


def _refused(refusal: Refusal) -> JSONResponse:
    told: dict[str, str] = {"error": str(refusal)}
    if refusal.state is not None:
        told["state"] = refusal.state.value
    return JSONResponse(told, refusal.status)


async def _in_thread(verb: Callable[..., _Result], *args: Any) -> _Result:
    return await run_in_threadpool(verb, *args)


def _owner(told: Mapping[str, Any]) -> Owner:
    pipeline, sink, run = told.get("pipeline"), told.get("sink"), told.get("run")
    if not (isinstance(pipeline, str) and isinstance(sink, str) and isinstance(run, str | None)):
        raise Refusal(400, "whose rows are these? pipeline and sink are needed")
    return Owner(pipeline=pipeline, sink=sink, run=run)


def _names(told: Mapping[str, Any]) -> list[str]:
    txns = told.get("txns")
    if not (isinstance(txns, list) and all(isinstance(txn, str) for txn in txns)):
        raise Refusal(400, "txns is a list of transaction names")
    return txns


def _text(query: Mapping[str, str], name: str) -> str:
    if name not in query:
        raise Refusal(400, f"{name} is needed")
    return query[name]


def _number(query: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = query.get(name, "" if default is None else str(default))
    if not text.isdecimal() or len(text) > 18:
        raise Refusal(400, f"{name} is a number, not {text!r}")
    return int(text)
