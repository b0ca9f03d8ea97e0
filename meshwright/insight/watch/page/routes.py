"""The live page of runs: its files, its answers as JSON, and its updates. Torch-free.

Addresses name a run by its number on the command line and a file by rank and attempt: no part of an address becomes a
path, so that nothing outside of the run folders can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from meshwright.base.history.account import PARTS
from meshwright.base.history.run_history import RunHistory
from meshwright.base.io import printable
from meshwright.base.records.run_folder import MAX_ATTEMPT, RunFolder
from meshwright.errors import MeshwrightError
from meshwright.insight.diagnose.run.diagnose import diagnose_run
from meshwright.insight.metrics.collector import RunsCollector
from meshwright.insight.metrics.endpoint import metrics_route
from meshwright.insight.watch.page.answers import encode, json_response
from meshwright.insight.watch.page.config_differences import config_differences
from meshwright.insight.watch.page.curves import describe_curves
from meshwright.insight.watch.page.heat_map import describe_heat_map
from meshwright.insight.watch.page.log_tail import describe_log
from meshwright.insight.watch.page.step_timeline import describe_timeline
from meshwright.insight.watch.page.updates import Updates
from meshwright.insight.watch.page.watched_run import WatchedRun
from meshwright.insight.watch.page_files import WATCH_PACKAGE, PageFiles

MAX_NUMBER = 1 << 53
MAX_RANK = 9_999_999
MAX_FINDINGS = 5


class Page:
    """Answers the requests of browsers for some runs."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self.runs = runs
        self.updates = Updates(runs)
        self._files = PageFiles([WATCH_PACKAGE], ["uplot"])

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/", lambda _: self._files.answer("index.html")),
            Route("/static/{name:path}", lambda request: self._files.answer(request.path_params["name"])),
            Route("/api/runs", self.list_runs),
            Route("/api/updates", self.stream),
            Route("/api/configs", self.configs),
            Route("/api/runs/{run:int}/snapshot", self.snapshot),
            Route("/api/runs/{run:int}/curves", self.curves),
            Route("/api/runs/{run:int}/heatmap", self.heat_map),
            Route("/api/runs/{run:int}/timeline", self.timeline),
            Route("/api/runs/{run:int}/diagnosis", self.diagnosis),
            Route("/api/runs/{run:int}/log", self.log),
        ]

    async def stream(self, _request: Request) -> Response:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self.updates.stream(), media_type="text/event-stream", headers=headers)

    def list_runs(self, _request: Request) -> Response:
        runs = [{"id": run.number, "name": run.name} for run in self.runs]
        return json_response(encode({"runs": runs, "parts": PARTS}))

    def configs(self, _request: Request) -> Response:
        differences = config_differences([run.config for run in self.runs])
        return json_response(encode({"differences": differences}))

    def snapshot(self, request: Request) -> Response:
        return json_response(self.run(request).snapshot())

    def curves(self, request: Request) -> Response:
        points, first, last = number(request, "points", 600), optional(request, "from"), optional(request, "to")
        return self.answer(request, lambda history: describe_curves(history, points, first, last))

    def heat_map(self, request: Request) -> Response:
        columns, first, last = number(request, "columns", 200), optional(request, "from"), optional(request, "to")
        return self.answer(request, lambda history: describe_heat_map(history, columns, first, last))

    def timeline(self, request: Request) -> Response:
        step = optional(request, "step")
        return self.answer(request, lambda history: describe_timeline(history, step))

    def diagnosis(self, request: Request) -> Response:
        return self.answer(request, describe_findings)

    def log(self, request: Request) -> Response:
        run = self.run(request)
        rank, lines = number(request, "rank", 0, MAX_RANK), number(request, "lines", 200)
        attempt = optional(request, "attempt", MAX_ATTEMPT) or run.folder.last_attempt()
        return json_response(encode(describe_log(run.folder, attempt, rank, lines)))

    def answer(self, request: Request, build: Callable[[RunHistory], Any]) -> Response:
        """Answers from the records of a run; requests with the same address share the answer."""
        return json_response(self.run(request).answer(f"{request.url.path}?{request.url.query}", build))

    def run(self, request: Request) -> WatchedRun:
        place: int = request.path_params["run"]
        if place >= len(self.runs):
            raise HTTPException(404, f"there is no run {place}: expected a number below {len(self.runs)}")
        return self.runs[place]


def describe_findings(history: RunHistory) -> dict[str, Any]:
    """The findings with the largest effect; none before a step is complete."""
    found = diagnose_run(history)[:MAX_FINDINGS] if len(history.steps()) else []
    return {"findings": [finding.to_json() for finding in found]}


def number(request: Request, name: str, default: int, maximum: int = MAX_NUMBER) -> int:
    """A natural number of the query, or the default if it has none."""
    value = optional(request, name, maximum)
    return default if value is None else value


def optional(request: Request, name: str, maximum: int = MAX_NUMBER) -> int | None:
    """A natural number of the query, or None; anything else is answered with 400."""
    text = request.query_params.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= maximum):
        raise HTTPException(400, f"{name} is not a natural number up to {maximum}")
    return int(text)


def make_page(folders: Sequence[RunFolder]) -> Starlette:
    """The application that shows runs: the page, and their metrics. Nothing is read before the first request."""
    runs = [WatchedRun(number, folder) for number, folder in enumerate(folders)]
    metrics = metrics_route(RunsCollector([run.updated_copy for run in runs]))
    return Starlette(routes=[*Page(runs).routes(), metrics], exception_handlers={MeshwrightError: show_error})


def show_error(_request: Request, error: Exception) -> Response:
    """Answers a request for a run that cannot be read, such as one whose folder was renamed."""
    return PlainTextResponse(printable(str(error)), 404)
