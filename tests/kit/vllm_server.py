"""A local server that gives answers in the format of vLLM's API.

vllm_answers.json was written by the fields that vLLM documents; it was not recorded from a running server.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ANSWERS = json.loads((Path(__file__).parents[1] / "rl" / "generator" / "vllm_answers.json").read_text())


class FakeServer(ThreadingHTTPServer):
    """Answers with the content of vllm_answers.json, and keeps the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, object, str | None]] = []
        self.answers = {
            "/v1/completions": (200, json.dumps(ANSWERS["completions"]).encode()),
            "/collective_rpc": (200, json.dumps(ANSWERS["collective_rpc"]).encode()),
            "/reset_prefix_cache": (200, b""),
        }
        self.hangs = threading.Event()
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, json.loads(body) if body else None, self.headers["Authorization"]))
        if self.server.hangs.is_set():
            self.server.released.wait(20)
        status, content = self.server.answers[self.path]
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args) -> None:
        pass


@contextmanager
def serving() -> Iterator[FakeServer]:
    """A server while the block runs."""
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield fake
    fake.released.set()
    fake.shutdown()
    thread.join()
    fake.server_close()
