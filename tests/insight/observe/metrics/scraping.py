"""Scrapes exporters on the loopback interface: once, with many readers at a time, and with garbage."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress

import httpx
from prometheus_client import parser

from tests.kit.raw_requests import exchange, get

TIMEOUT = 60.0
READERS = 200


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def scrape(port: int) -> dict[tuple[str, str], float]:
    """(name, state or nothing) -> value of every sample without other labels than the run."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT).text
    families = parser.text_string_to_metric_families(text)
    return {(s.name, s.labels.get("state", "")): s.value for family in families for s in family.samples}


def wait_for(condition, seconds: float = TIMEOUT):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            if found := condition():
                return found
        time.sleep(0.05)
    raise AssertionError("the condition did not come true")


def is_refused(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


async def scrape_many(address: str) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=READERS, max_keepalive_connections=READERS)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        return await asyncio.gather(*(client.get(address) for _ in range(READERS)))


def send_garbage(port: int) -> None:
    requests = (
        b"\0\xff\xfe garbage \r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Huge: " + b"h" * (1 << 18) + b"\r\n\r\n",
        get("/metrics", method="POST", headers="Content-Length: 99999999\r\n"),
        get("/metrics?" + "q" * 4000),
        get("/metrics").replace(b"127.0.0.1", b"attacker.example"),
    )
    for request in requests * 4:
        status = int(exchange(port, request).split()[1])
        assert 400 <= status < 500
