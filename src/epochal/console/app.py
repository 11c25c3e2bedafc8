"""The ASGI application: routes, the forms that change something, and a server on a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from epochal.console.access import (
    COOKIE,
    LOOPBACK,
    SESSION_MAX_S,
    AccessControl,
    Sessions,
    TooManyWrongTokens,
    address_of,
    own_path,
)
from epochal.console.actions import Actions
from epochal.console.index import Index
from epochal.console.pages import Pages
from epochal.errors import EpochalError
from epochal.reports.model import PipelineReport, RecoveryReport, ResolutionReport

_FORM_BYTES_MAX = 64 * 1024
_HOST = "127.0.0.1"
_SHUTDOWN_MAX_S = 1
Form = dict[str, str]


def console(
    root: str,
    *,
    targets: Sequence[str] = (),
    token: str | None = None,
    hosts: Sequence[str] = LOOPBACK,
    every_s: float = 2.0,
) -> Starlette:
    """Return the console of all pipelines below a root as an ASGI application."""
    index = Index(root, every_s=every_s)
    sessions = Sessions(token)
    pages = Pages(index=index, sessions=sessions, actions=Actions(tuple(targets)))
    forms = _Forms(pages)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await run_in_threadpool(index.start)
        try:
            yield
        finally:
            await run_in_threadpool(index.stop)

    return Starlette(
        lifespan=lifespan,
        middleware=[Middleware(AccessControl, sessions=sessions, hosts=frozenset(hosts))],
        exception_handlers={HTTPException: _refused(pages), Exception: _failed(pages)},
        routes=[
            Route("/", pages.pipelines),
            Route("/pipelines/{key}", pages.pipeline),
            Route("/pipelines/{key}/epochs", pages.epochs),
            Route("/pipelines/{key}/epochs/{epoch}", pages.epoch),
            Route("/pipelines/{key}/recover", forms.recover, methods=["GET", "POST"]),
            Route("/pipelines/{key}/resolve", forms.resolve, methods=["GET", "POST"]),
            Route("/login", forms.login, methods=["GET", "POST"]),
            Route("/logout", forms.logout, methods=["POST"]),
            Route("/api/status", pages.api_status),
            Route("/api/pipelines/{key}", pages.api_pipeline),
            Route("/api/pipelines/{key}/epochs", pages.api_epochs),
            Route("/metrics", pages.metrics),
            Route("/health", pages.health),
            Mount("/static", StaticFiles(directory=str(files("epochal.console") / "static"))),
        ],
    )


@dataclass(frozen=True, slots=True)
class _Forms:
    pages: Pages

    async def login(self, request: Request) -> Response:
        if request.method == "GET":
            asked = own_path(request.query_params.get("next", "/"))
            return HTMLResponse(self.pages.render(request, "login.html", wrong="", asked=asked))
        form = await _form(request)
        asked = own_path(form.get("next", "/"))
        try:
            session = self.pages.sessions.open(
                form.get("token", ""),
                user=form.get("user", "").strip(),
                address=address_of(request),
            )
        except TooManyWrongTokens:
            wrong = "Too many wrong tokens: wait a minute."
            page = self.pages.render(request, "login.html", wrong=wrong, asked=asked)
            return HTMLResponse(page, 429)
        if session is None:
            wrong = "Wrong token."
            page = self.pages.render(request, "login.html", wrong=wrong, asked=asked)
            return HTMLResponse(page, 403)
        answer = RedirectResponse(asked, 303)
        answer.set_cookie(
            COOKIE,
            session,
            max_age=SESSION_MAX_S,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    async def logout(self, request: Request) -> Response:
        await self._own_form(request)
        self.pages.sessions.close(request.cookies.get(COOKIE))
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(COOKIE)
        return answer

    async def recover(self, request: Request) -> Response:
        """GET shows the plan; POST recovers and shows what was done."""
        one = await run_in_threadpool(self._pipeline, request)
        if request.method == "GET":
            self._require_token()
            report = await _in_thread(lambda: self.pages.actions.plan(one))
            return self._shown(request, "recover.html", one, report)
        form = await self._own_form(request)
        take_over = form.get("take_over") == "yes"
        report = await _in_thread(lambda: self.pages.actions.recover(one, take_over=take_over))
        return self._shown(request, "recover.html", one, report)

    async def resolve(self, request: Request) -> Response:
        one = await run_in_threadpool(self._pipeline, request)
        if request.method == "GET":
            self._require_token()
            return self._shown(request, "resolve.html", one, None)
        form = await self._own_form(request)
        by = self.pages.sessions.user(request.cookies.get(COOKIE))
        report = await _in_thread(lambda: self._resolve(one, form, f"{by} (console)".strip()))
        return self._shown(request, "resolve.html", one, report, form=form)

    def _resolve(self, one: PipelineReport, form: Form, by: str) -> ResolutionReport:
        sink, epoch = form.get("sink", ""), form.get("epoch", "")
        if not epoch.isdigit():
            raise HTTPException(400, "the epoch is missing")
        dry_run = form.get("confirmed") != "yes"
        if form.get("action") == "finish":
            return self.pages.actions.finish(one, sink, int(epoch), by=by, dry_run=dry_run)
        kept_at, because = (form.get(name, "").strip() for name in ("kept_at", "because"))
        if not kept_at or not because:
            raise HTTPException(400, "to give up, state where the rows are kept and why")
        return self.pages.actions.give_up(
            one, sink, int(epoch), by=by, kept_at=kept_at, because=because, dry_run=dry_run
        )

    def _pipeline(self, request: Request) -> PipelineReport:
        found = self.pages.index.snapshot.pipelines.get(request.path_params["key"])
        if found is None:
            raise HTTPException(404, "there is no pipeline at this address")
        return found

    def _require_token(self) -> None:
        if self.pages.sessions.token is None:
            raise HTTPException(
                403, "actions are disabled: start the console with --token-env or --token-file"
            )

    async def _own_form(self, request: Request) -> Form:
        self._require_token()
        form = await _form(request)
        csrf_token = form.get("csrf_token", "")
        if not self.pages.sessions.is_own_form(request.cookies.get(COOKIE), csrf_token):
            raise HTTPException(403, "this form was not sent by a page of this console")
        return form

    def _shown(
        self,
        request: Request,
        template: str,
        one: PipelineReport,
        report: RecoveryReport | ResolutionReport | None,
        **more: Any,
    ) -> Response:
        key = request.path_params["key"]
        form = more.get("form", {})
        return HTMLResponse(
            self.pages.render(
                request,
                template,
                key=key,
                one=one,
                report=report,
                form=form,
                target=self.pages.actions.target_of(one),
            )
        )


async def _form(request: Request) -> Form:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _FORM_BYTES_MAX:
            raise HTTPException(413, "the form is too large")
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))


async def _in_thread(work: Callable[[], Any]) -> Any:
    """Run work that queries targets in a thread; the page shows its errors."""
    try:
        return await run_in_threadpool(work)
    except EpochalError as error:
        raise HTTPException(409, str(error)) from error


def _refused(pages: Pages) -> Callable[[Request, Exception], Response]:
    def answer(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 500)
        detail = getattr(error, "detail", "")
        if request.url.path.startswith("/api/"):
            return JSONResponse({"error": detail}, status)
        page = pages.render(request, "refused.html", status=status, detail=detail)
        return HTMLResponse(page, status)

    return answer


def _failed(pages: Pages) -> Callable[[Request, Exception], Response]:
    def answer(request: Request, error: Exception) -> Response:
        detail = f"{type(error).__name__}; details are in the console's output"
        return HTMLResponse(pages.render(request, "refused.html", status=500, detail=detail), 500)

    return answer


@contextmanager
def served(root: str) -> Iterator[str]:
    """Serve a read-only console on a free loopback port until the block ends; yields its URL."""
    # The socket listens already: requests before the server is up wait and are not refused.
    with socket.create_server((_HOST, 0)) as listening:
        config = uvicorn.Config(
            console(root),
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=_SHUTDOWN_MAX_S,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listening]}, name="epochal-console", daemon=True
        )
        thread.start()
        try:
            yield f"http://{_HOST}:{listening.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()
