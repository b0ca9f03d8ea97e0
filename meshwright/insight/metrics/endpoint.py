"""The route /metrics: the metrics of runs in the format that the scraper asks for. Torch-free."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from meshwright.insight.metrics.collector import OPENMETRICS, TEXT, RunsCollector


def metrics_route(collector: RunsCollector, path: str = "/metrics") -> Route:
    """A route for a starlette application; other servers may mount it beside their own."""
    reading = asyncio.Lock()  # one thread reads, and all requests that wait get what it has read

    async def metrics(request: Request) -> Response:
        content_type = choose_content_type(request.headers.get("accept", ""))
        async with reading:
            content = await asyncio.to_thread(collector.encode, content_type)
        return Response(content, headers={"content-type": content_type})

    return Route(path, metrics, methods=["GET"])


def choose_content_type(accept: str) -> str:
    """OpenMetrics if the scraper accepts it, else the text format, which every scraper reads."""
    accepted = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    return OPENMETRICS if "application/openmetrics-text" in accepted else TEXT


def metrics_application(collector: RunsCollector) -> Starlette:
    """The application of a server that has metrics only."""
    return Starlette(routes=[metrics_route(collector)])
