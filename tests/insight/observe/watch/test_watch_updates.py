"""Tests of the live page under load: many and slow readers, many steps and ranks, and the command line around it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from meshwright.base.cli import main
from meshwright.base.records.run_folder import RunFolder
from meshwright.insight.watch.http_server import HttpServer
from meshwright.insight.watch.page.routes import make_page
from meshwright.insight.watch.page.updates import Updates
from meshwright.insight.watch.page.watched_run import WatchedRun
from tests.insight.observe.watch.written_run import write_run


class CountedRun(WatchedRun):
    """A run whose snapshot is another one every time, and is large."""

    made = 0
    is_alive = True

    def snapshot(self) -> bytes:
        self.made += 1
        return json.dumps({"id": self.number, "number": self.made, "filling": "x" * 20_000}).encode()


def test_readers_share_one_producer_and_a_slow_reader_gets_the_newest_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.insight.watch.page.updates.RUNNING_SECONDS", 0.01)
    monkeypatch.setattr("meshwright.insight.watch.page.updates.MAX_LOAD", 1e9)

    async def read() -> None:
        run = CountedRun(0, RunFolder(tmp_path))
        updates = Updates([run])
        slow, quick = updates.stream(), [updates.stream() for _ in range(200)]
        for stream in (slow, *quick):
            assert (await anext(stream)).startswith(b"retry:")
        first = parse(await anext(slow))
        for _ in range(5):
            received = [parse(await anext(stream)) for stream in quick]
        assert len(set(received)) <= 5
        late = parse(await anext(slow))
        assert late > first + 1  # what came between is skipped, not queued
        assert late >= max(received) - 1
        assert run.made < 100  # one producer, not one per reader
        for stream in (slow, *quick):
            await stream.aclose()
        assert updates.readers == 0
        made = run.made
        await asyncio.sleep(0.1)
        assert run.made <= made + 1  # nobody reads: nothing is made

    asyncio.run(read())


def parse(event: bytes) -> int:
    return json.loads(event.split(b"data: ", 1)[1])["number"]


@pytest.mark.long
def test_200_readers_of_which_half_never_read_do_not_block_the_page(tmp_path):
    folder = write_run(tmp_path / "run", steps=50, failed_at=None)
    server = HttpServer(make_page([RunFolder(folder)]))
    server.start()
    connections = []
    try:
        httpx.get(f"{server.address}api/runs/0/snapshot", timeout=60)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(200):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            if number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(b"GET /api/updates HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            connections.append(connection)
        lines = (folder / "events/rank-00000.jsonl").read_text().splitlines()
        step = json.loads(next(line for line in lines if '"kind":"step"' in line))
        for number in range(50, 56):
            with open(folder / "events/rank-00000.jsonl", "a") as file:
                file.write(json.dumps(step | {"step": number}, separators=(",", ":")) + "\n")
            for garbage in (b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"x" * 100_000):
                with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
                    raw.sendall(garbage)
            while httpx.get(f"{server.address}api/runs/0/curves", timeout=30).json()["step"][-1] < number:
                time.sleep(0.2)  # a history that was read a moment ago is not read again
        for connection in connections[::2]:
            assert b"event: run" in connection.recv(65536)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 60_000  # KiB; 200 queues of snapshots would be more
    finally:
        for connection in connections:
            connection.close()
        server.stop()
    assert not server.failure


@pytest.mark.long
def test_100_000_steps_of_64_ranks_are_answered_in_small_answers(tmp_path):
    folder = write_large_run(tmp_path / "large", steps=100_000, ranks=64)
    answers = {}
    client = TestClient(make_page([RunFolder(folder)]), base_url="http://127.0.0.1")
    client.get("/api/runs/0/snapshot")
    for address in (
        "snapshot",
        "curves",
        "curves?from=20000&to=60000",
        "heatmap",
        "heatmap?from=500&to=900",
        "timeline",
        "timeline?step=77777",
    ):
        begin = time.perf_counter()
        answer = client.get(f"/api/runs/0/{address}")
        answers[address] = (len(answer.content), round(time.perf_counter() - begin, 3))
        assert answer.status_code == 200
    print(answers)  # bytes and seconds
    assert all(size < 300_000 for size, _ in answers.values()), answers
    heat_map = client.get("/api/runs/0/heatmap").json()
    assert len(heat_map["ranks"]) == 64


def write_large_run(folder: Path, steps: int, ranks: int) -> Path:
    """Repeats the step records of a small run with other numbers."""
    write_run(folder, steps=10, ranks=ranks, failed_at=None)
    for rank in range(ranks):
        path = folder / f"events/rank-{rank:05d}.jsonl"
        lines = path.read_text().splitlines()
        step = next(line for line in lines if '"kind":"step"' in line)
        head, tail = re.split(r'"step":\d+', step, maxsplit=1)
        with open(path, "w") as file:
            file.write(lines[0] + "\n")
            file.writelines(f'{head}"step":{number}{tail}\n' for number in range(steps))
    return folder


def test_watch_serves_the_page_until_ctrl_c(tmp_path):
    folder = write_run(tmp_path / "run", steps=10, ranks=1, failed_at=None)
    code = "from meshwright.base.cli import main; main(['watch', 'run'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder.parent, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert process.stdout is not None
        address = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert address is not None
        assert "Meshwright" in httpx.get(address[0], timeout=60).text
        assert httpx.get(f"{address[0]}metrics", timeout=60).status_code == 200
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
        assert "10 of 10 steps" in rest
        assert process.returncode == 0
    finally:
        process.kill()


def test_watch_with_a_port_in_use_is_a_config_error(tmp_path, capsys):
    folder = write_run(tmp_path / "run", steps=3, ranks=1, failed_at=None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit) as ended:
            main(["watch", str(folder), "--port", str(taken.getsockname()[1])])
    assert ended.value.code == 2
    assert "cannot be used: Address already in use" in capsys.readouterr().err
