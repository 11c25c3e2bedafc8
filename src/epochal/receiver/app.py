"""`make_app`: the receiver's HTTP routes, access control and answers."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from epochal.receiver.openapi import document
from epochal.receiver.store import Owner, Store
from epochal.receiver.transactions import FORMATS, Refusal, read_rows

if TYPE_CHECKING:
    from epochal.receiver.server import Access

logger = logging.getLogger("epochal.receiver")

_Result = TypeVar("_Result")
Endpoint = Callable[[Request], Awaitable[Response]]

PROTOCOL = "epochal-two-phase"
_LISTED_MAX = 1000
_WITHOUT_TOKEN = frozenset({"/health", "/openapi.json"})
_RETRY_AFTER_S = "1"


def make_app(store: Store, access: Access) -> Starlette:
    """All routes of the receiver, as `openapi.json` lists them."""
    endpoints = _Endpoints(store, access)
    routes = [
        ("GET", "/", endpoints.about),
        ("GET", "/health", endpoints.health),
        ("GET", "/openapi.json", endpoints.openapi),
        ("POST", "/prepare/{txn}", endpoints.prepare),
        ("POST", "/rehearse", endpoints.rehearse),
        ("POST", "/commit/{txn}", endpoints.commit),
        ("POST", "/abort/{txn}", endpoints.abort),
        ("GET", "/transactions", endpoints.transactions),
        ("GET", "/transactions/{txn}", endpoints.transaction),
        ("POST", "/marks", endpoints.mark),
        ("GET", "/marks", endpoints.marks),
        ("DELETE", "/marks", endpoints.forget),
        ("GET", "/rows", endpoints.rows),
        ("GET", "/counts", endpoints.counts),
    ]
    return Starlette(
        routes=[
            Route(path, _guarded(endpoint, access), methods=[method])
            for method, path, endpoint in routes
        ]
    )


class _Endpoints:
    def __init__(self, store: Store, access: Access) -> None:
        self._store = store
        self._access = access

    async def about(self, request: Request) -> Response:  # noqa: ARG002
        about = {
            "protocol": PROTOCOL,
            "version": 1,
            "formats": list(FORMATS),
            "body_bytes_max": self._access.body_bytes_max,
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
            return JSONResponse(found.as_json())
        rows = await _in_thread(read_rows, request.headers.get("content-type", ""), body)
        if "part" in query:
            found = await _in_thread(self._store.take_part, txn, _number(query, "part"), rows)
        else:
            found = await _in_thread(self._store.prepare, txn, rows)
        return JSONResponse(found.as_json())

    async def rehearse(self, request: Request) -> Response:
        given = await self._json(request)
        await _in_thread(self._store.rehearse, _names(given), _owner(given))
        return JSONResponse({"rehearsed": len(_names(given))})

    async def commit(self, request: Request) -> Response:
        owner = _owner(await self._json(request))
        found = await _in_thread(self._store.commit, request.path_params["txn"], owner)
        return JSONResponse(found.as_json())

    async def abort(self, request: Request) -> Response:
        found = await _in_thread(self._store.abort, request.path_params["txn"])
        return JSONResponse(found.as_json())

    async def transactions(self, request: Request) -> Response:
        query = request.query_params
        limit = min(_number(query, "limit", _LISTED_MAX), _LISTED_MAX)
        after = query.get("after", "")
        ask = partial(self._store.in_doubt, query.get("prefix", ""), after=after, limit=limit)
        found = await _in_thread(ask)
        more = found[-1].txn if found and len(found) == limit else None
        return JSONResponse({"transactions": [one.as_json() for one in found], "next": more})

    async def transaction(self, request: Request) -> Response:
        found = await _in_thread(self._store.find, request.path_params["txn"])
        return JSONResponse(found.as_json())

    async def mark(self, request: Request) -> Response:
        given = await self._json(request)
        uid, tag, epoch = given.get("uid"), given.get("tag"), given.get("epoch")
        if not (isinstance(uid, str) and isinstance(tag, str) and isinstance(epoch, int)):
            raise Refusal(400, "a mark needs uid, tag and epoch")
        await _in_thread(self._store.mark, uid, tag, epoch, _owner(given), _names(given))
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
            given = json.loads(await self._body(request) or b"{}")
        except ValueError:
            raise Refusal(400, "the body is not JSON") from None
        if not isinstance(given, dict):
            raise Refusal(400, "the body is not a JSON object")
        return given

    async def _body(self, request: Request) -> bytes:
        """The whole body; a connection that breaks in the middle raises."""
        pieces, size, most = [], 0, self._access.body_bytes_max
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                raise Refusal(413, f"a body may have {most} bytes: send the rows in more parts")
            pieces.append(piece)
        return b"".join(pieces)


def _guarded(endpoint: Endpoint, access: Access) -> Endpoint:
    async def guarded(request: Request) -> Response:
        if request.url.path not in _WITHOUT_TOKEN and not access.allows(
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
            # Locked, full or unreadable: the transaction changed nothing.
            logger.warning("%s %s: %s", request.method, request.url.path, error)
            headers = {"Retry-After": _RETRY_AFTER_S}
            return JSONResponse({"error": f"not now: {error}"}, 503, headers)

    return guarded


def _refused(refusal: Refusal) -> JSONResponse:
    body: dict[str, str] = {"error": str(refusal)}
    if refusal.state is not None:
        body["state"] = refusal.state.value
    return JSONResponse(body, refusal.status)


async def _in_thread(verb: Callable[..., _Result], *args: Any) -> _Result:
    return await run_in_threadpool(verb, *args)


def _owner(given: Mapping[str, Any]) -> Owner:
    pipeline, sink, run = given.get("pipeline"), given.get("sink"), given.get("run")
    if not (isinstance(pipeline, str) and isinstance(sink, str) and isinstance(run, str | None)):
        raise Refusal(400, "pipeline and sink are needed: whose rows are these?")
    claims = given.get("claims", [])
    if not (isinstance(claims, list) and all(isinstance(claim, str) for claim in claims)):
        raise Refusal(400, "claims is a list of texts")
    return Owner(pipeline=pipeline, sink=sink, run=run, claims=tuple(claims))


def _names(given: Mapping[str, Any]) -> list[str]:
    txns = given.get("txns")
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
