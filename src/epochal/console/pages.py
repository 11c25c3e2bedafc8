"""The pages, and the same reports as JSON. Every page works without scripts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from epochal.console import charts
from epochal.console.access import COOKIE, Sessions
from epochal.console.actions import Actions
from epochal.console.index import Index
from epochal.coordinator.journal import EpochLog
from epochal.errors import EpochalError, Misconfigured
from epochal.reports import to_json
from epochal.reports.epochs import epoch_attempts, epoch_receipts, epochs
from epochal.reports.model import EpochsReport, PipelineReport
from epochal.reports.status import pipeline_status
from epochal.telemetry.health import Health
from epochal.terms import quantity

PAGE = 50
_EPOCHS_DRAWN = 60
_RECEIPTS_SHOWN_MAX = 500
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    index: Index
    sessions: Sessions
    actions: Actions

    # Pages

    def pipelines(self, request: Request) -> Response:
        snapshot = self.index.snapshot
        query = request.query_params
        found = snapshot.find(query.get("q", ""), query.get("health", ""))
        page = _number(query.get("page", "1"))
        shown = found[(page - 1) * PAGE : page * PAGE]
        return self._page(
            request,
            "pipelines.html",
            root=self.index.root,
            snapshot=snapshot,
            counts=snapshot.counts(),
            shown=shown,
            found=len(found),
            page=page,
            pages=max(1, -(-len(found) // PAGE)),
            health=query.get("health", ""),
        )

    def pipeline(self, request: Request) -> Response:
        with self._log(request) as (key, log):
            report = pipeline_status(log)
            history = epochs(log, limit=_EPOCHS_DRAWN)
            return self._page(
                request,
                "pipeline.html",
                key=key,
                one=report,
                history=history,
                figures=_figures(history),
                target=self.actions.target_of(report),
            )

    def epochs(self, request: Request) -> Response:
        with self._log(request) as (key, log):
            query = request.query_params
            report = epochs(
                log,
                limit=PAGE,
                cursor=query.get("cursor") or None,
                only=query.get("outcome") or None,
            )
            return self._page(
                request,
                "epochs.html",
                key=key,
                history=report,
                outcome=query.get("outcome", ""),
                is_newest=not query.get("cursor"),
            )

    def epoch(self, request: Request) -> Response:
        with self._log(request) as (key, log):
            number = _number(request.path_params["epoch"], least=0)
            attempts = epoch_attempts(log, number)
            receipts = epoch_receipts(log, number)
            if not attempts and not receipts:
                raise HTTPException(404, f"neither log nor history has epoch {number}")
            return self._page(
                request,
                "epoch.html",
                key=key,
                one=pipeline_status(log),
                number=number,
                attempts=attempts,
                receipts=receipts,
                receipts_max=_RECEIPTS_SHOWN_MAX,
            )

    # The same as JSON

    def api_status(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse(to_json(self.index.snapshot.report(self.index.root)))

    def api_pipeline(self, request: Request) -> Response:
        with self._log(request) as (_, log):
            return JSONResponse(to_json(pipeline_status(log)))

    def api_epochs(self, request: Request) -> Response:
        with self._log(request) as (_, log):
            query = request.query_params
            limit = _number(query.get("limit", str(PAGE)))
            return JSONResponse(
                to_json(epochs(log, limit=limit, cursor=query.get("cursor") or None))
            )

    def metrics(self, request: Request) -> Response:  # noqa: ARG002
        try:
            from epochal.reports.metrics_export import prometheus_text  # noqa: PLC0415  an extra
        except Misconfigured as error:
            return PlainTextResponse(str(error), 501)
        text = prometheus_text(self.index.snapshot.report(self.index.root))
        return Response(text, media_type=_PROMETHEUS)

    def health(self, request: Request) -> Response:  # noqa: ARG002
        return PlainTextResponse("ok")

    # Shared by the pages

    @contextmanager
    def _log(self, request: Request) -> Iterator[tuple[str, EpochLog]]:
        key = request.path_params["key"]
        log = self.index.log(key)
        if log is None:
            raise HTTPException(404, "there is no pipeline at this address")
        try:
            yield key, log
        except EpochalError as error:
            status = 400 if isinstance(error, Misconfigured) else 409
            raise HTTPException(status, str(error)) from error
        finally:
            log.close()

    def _page(self, request: Request, template: str, **values: Any) -> Response:
        return HTMLResponse(self.render(request, template, **values))

    def render(self, request: Request, template: str, **values: Any) -> str:
        session = request.cookies.get(COOKIE)
        is_signed_in = self.sessions.token is not None and self.sessions.holds(session)
        return _TEMPLATES.get_template(template).render(
            request=request,
            now=time.time(),
            is_signed_in=is_signed_in,
            has_token=self.sessions.token is not None,
            csrf_token=self.sessions.csrf_token(session) if is_signed_in and session else "",
            Health=Health,
            **values,
        )


def _figures(history: EpochsReport) -> dict[str, Markup]:
    """Return the charts by title. `charts` escapes every text in them."""
    shown = history.epochs
    drawn = {
        "Seconds by phase": charts.timeline(shown),
        "Rows per second": charts.plot(
            "Rows per second", shown, charts.rows_per_second, lambda rows: f"{rows:,.0f}"
        ),
        "From decision to visible": charts.plot(
            "Seconds from decision to visible",
            shown,
            charts.seconds_to_commit,
            charts.seconds_text,
        ),
    }
    return {title: Markup(figure) for title, figure in drawn.items() if figure}  # noqa: S704  escaped


def _number(text: str, least: int = 1) -> int:
    if not text.isdigit() or len(text) > 18 or int(text) < least:
        raise HTTPException(400, f"{text!r} is not a valid number")
    return int(text)


def _age(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, span in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= span:
            return f"{seconds / span:.3g} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _when(at: float | None) -> str:
    """Return a time as HTML that may break between date and time."""
    if at is None:
        return ""
    utc = time.gmtime(at)
    day, hour = time.strftime("%Y-%m-%d %H:%M:%S", utc).split()
    machine = time.strftime("%Y-%m-%dT%H:%M:%SZ", utc)
    return Markup('<time datetime="{}"><span>{}</span> <span>{} UTC</span></time>').format(
        machine, day, hour
    )


def _with_commands(text: str) -> Markup:
    """Return a text of ours as HTML, what is between backticks as code."""
    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if at % 2 else escape(part)
        for at, part in enumerate(parts)
    )


def _bytes(count: int | None) -> str:
    if count is None:
        return ""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _named(one: PipelineReport) -> str:
    return one.pipeline if one.run is None else f"{one.pipeline} (run {one.run})"


_TEMPLATES = Environment(
    loader=PackageLoader("epochal.console"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "age": _age,
    "when": _when,
    "bytes": _bytes,
    "named": _named,
    "quantity": quantity,
    "spent": charts.seconds_text,
    "with_commands": _with_commands,
}
