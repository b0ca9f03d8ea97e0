"""The practice page: its files, its answers as JSON, and the experiments that it starts. Torch-free.

Addresses name a card, a chapter or a run; each is looked up in a table, and none becomes a path. What changes something
is a POST request, which the guard of the server accepts from its own page alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from meshwright.base.io import parse_json, printable
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.insight.watch.http_server import HttpServer
from meshwright.insight.watch.page.answers import encode, json_response
from meshwright.insight.watch.page_files import WATCH_PACKAGE, PageFiles
from meshwright_practice.cards.card import Card, KnobValue
from meshwright_practice.cards.registry import all_cards, find_card, parse_knobs
from meshwright_practice.cards.reviews import Answers, take_answers
from meshwright_practice.cards.runner import ExperimentRunner
from meshwright_practice.cards.schedule import CardState, Clock, load_cards, local_clock, read_states, review_queue
from meshwright_practice.page.descriptions import (
    describe_deck,
    describe_explanation,
    describe_progress,
    describe_question,
    describe_queue,
)
from meshwright_practice.page.handbook import find_chapters, handbook_folder, render_chapter
from meshwright_practice.page.jobs import ExperimentJob, ExperimentJobs, QueueFull
from meshwright_practice.progress import PracticeProgress, progress_file

LOOPBACK = "127.0.0.1"
PREFERRED_PORT = 8341
NEWS_SECONDS = 0.1
"""How often a stream looks for news of its experiment."""
SILENCE_SECONDS = 10.0
MAX_ANSWERS = 64


class PracticePage:
    """Answers the requests of a browser. The progress file is read for every answer: the terminal may write it too."""

    def __init__(self, cards: Mapping[str, Card], jobs: ExperimentJobs, path: Path, clock: Clock, token: str) -> None:
        self.cards, self.jobs, self.path, self.clock, self.token = cards, jobs, path, clock, token
        self.chapters = find_chapters(handbook_folder())
        self._files = PageFiles([WATCH_PACKAGE, "meshwright_practice.page"])

    def app(self) -> Starlette:
        routes = [
            Route("/", self.index),
            Route("/static/{name}", lambda request: self._files.answer(request.path_params["name"])),
            Route("/api/queue", self.queue),
            Route("/api/deck", self.deck),
            Route("/api/progress", self.progress),
            Route("/api/handbook", self.handbook),
            Route("/api/handbook/{name}", self.chapter),
            Route("/api/cards/{card}", self.question),
            Route("/api/cards/{card}/explanation", self.explanation),
            Route("/api/runs", self.start_run, methods=["POST"]),
            Route("/api/runs/{run:int}", self.run_state),
            Route("/api/runs/{run:int}/events", self.events),
        ]
        return Starlette(routes=routes, exception_handlers={MeshwrightError: show_mistake})

    def index(self, _request: Request) -> Response:
        """The page, with the token that its requests carry; no other site can read it."""
        text = self._files.text("practice.html").replace("{{token}}", escape(self.token, quote=True))
        return HTMLResponse(text, headers={"cache-control": "no-store"})

    def queue(self, _request: Request) -> Response:
        states, now = self.states()
        queue = describe_queue(review_queue(self.cards, states, now), states, now)
        return json_response(encode(queue | {"messages": self.messages()}))

    def deck(self, _request: Request) -> Response:
        states, now = self.states()
        return json_response(encode(describe_deck(self.cards, states, now)))

    def progress(self, _request: Request) -> Response:
        sections = describe_progress(self.load())
        return json_response(encode({"sections": sections, "messages": self.messages()}))

    def handbook(self, _request: Request) -> Response:
        chapters = [{"name": chapter.name, "title": chapter.title} for chapter in self.chapters.values()]
        return json_response(encode({"chapters": chapters}))

    def chapter(self, request: Request) -> Response:
        chapter = self.chapters.get(request.path_params["name"])
        if chapter is None:
            raise HTTPException(404, "there is no such chapter")
        html = render_chapter(chapter, self.chapters)
        return json_response(encode({"name": chapter.name, "title": chapter.title, "html": html}))

    def question(self, request: Request) -> Response:
        states, now = self.states()
        card = self.card(request)
        return json_response(encode(describe_question(card, states[card.id], now)))

    def explanation(self, request: Request) -> Response:
        return json_response(encode(describe_explanation(self.card(request))))

    async def start_run(self, request: Request) -> Response:
        """Starts the experiment of a card; with `answers`, it is a review."""
        body = parse_json(await request.body(), "the request", "the JSON of the page")
        job = await run_in_threadpool(self.submit, body)
        return json_response(encode(job.to_json()))

    def submit(self, body: Any) -> ExperimentJob:
        if not isinstance(body, dict) or not isinstance(body.get("card"), str):
            raise ConfigError("the request names no card", "expected an object with card, knobs and answers")
        card = find_card(self.cards, body["card"])
        try:
            return self.jobs.submit(card, requested_knobs(card, body), requested_answers(card, body))
        except QueueFull:
            raise HTTPException(429, "other experiments are waiting: try again in a moment") from None

    def run_state(self, request: Request) -> Response:
        return json_response(encode(self.job(request).to_json()))

    async def events(self, request: Request) -> Response:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(stream_job(self.job(request)), media_type="text/event-stream", headers=headers)

    def job(self, request: Request) -> ExperimentJob:
        job = self.jobs.find(request.path_params["run"])
        if job is None:
            raise HTTPException(404, "there is no such run")
        return job

    def card(self, request: Request) -> Card:
        return find_card(self.cards, request.path_params["card"])

    def states(self) -> tuple[dict[str, CardState], datetime]:
        return read_states(self.cards, self.load()), self.clock()

    def messages(self) -> list[str]:
        """What happened to the progress file since the page was started, for the user to read."""
        return [printable(message) for message in tuple(self.jobs.messages)]

    def load(self) -> PracticeProgress:
        return load_cards(self.path, self.jobs.messages.append)


def requested_knobs(card: Card, body: Mapping[str, Any]) -> dict[str, KnobValue]:
    """The knobs of a request: only values that the card lists."""
    knobs = body.get("knobs", {})
    if not isinstance(knobs, dict) or len(knobs) > len(card.experiment.knobs):
        raise ConfigError("the knobs of the request are not those of the card", "expected an object")
    return parse_knobs(card.experiment, [f"{name}={value}" for name, value in knobs.items()])


def requested_answers(card: Card, body: Mapping[str, Any]) -> Answers | None:
    answers = body.get("answers")
    if answers is None:
        return None
    if (
        not isinstance(answers, list)
        or len(answers) > MAX_ANSWERS
        or not all(isinstance(item, str) for item in answers)
    ):
        raise ConfigError("the answers of the request are not a list of texts", "expected one per question")
    return take_answers(card, answers)


async def stream_job(job: ExperimentJob) -> AsyncIterator[bytes]:
    """The states of an experiment as server-sent events, until it is done."""
    sent, silence = -1, 0.0
    while True:
        version, value = job.version, job.to_json()
        if version != sent:
            sent, silence = version, 0.0
            yield b"data: " + encode(value) + b"\n\n"
            if value["state"] == "done":
                return
        elif silence > SILENCE_SECONDS:
            silence = 0.0
            yield b": no news\n\n"
        await asyncio.sleep(NEWS_SECONDS)
        silence += NEWS_SECONDS


def show_mistake(_request: Request, error: Exception) -> Response:
    """Answers a request with a mistake in it, such as an answer that is not a number."""
    return PlainTextResponse(printable(str(error)), 400)


def serve_page(
    port: int | None = None,
    *,
    cards: Mapping[str, Card] | None = None,
    runner: ExperimentRunner | None = None,
    clock: Clock = local_clock,
) -> tuple[HttpServer, Callable[[], None]]:
    """Starts the page and returns its server, and the function that ends both it and the experiments. Only browsers of
    this machine reach it: a page that starts processes has no other address.
    """
    token = secrets.token_urlsafe(32)
    jobs = ExperimentJobs(runner or ExperimentRunner(), progress_file(), clock)
    page = PracticePage(all_cards() if cards is None else cards, jobs, progress_file(), clock, token)
    server = HttpServer(page.app(), LOOPBACK, port, PREFERRED_PORT, token)
    jobs.start()
    server.start()

    def stop() -> None:
        server.stop()
        jobs.stop()

    return server, stop
