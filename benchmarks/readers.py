"""Step time of a run whose metrics 200 readers scrape, as a ratio to the step time of the same run without readers.

The run has a rank on every core up to two. Readers come and go in turns, so that both figures are of the same run; a
quarter of them are slow: they send half a request, or never read the answer. The readers run at the lowest priority,
as if they were on another machine.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder

READERS = 200
SLOW_READERS = 50
INTERVAL = 5.0
"""Seconds between two scrapes of a reader; Prometheus' own default is a minute."""
TURNS = 5
TURN_SECONDS = 10.0
START_SECONDS = 60.0
MAX_RATIO = 1.05
MAX_MEMORY = 200 << 20
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as root:
        folder, port = RunFolder(Path(root) / "run"), free_port()
        command = [sys.executable, "-m", "meshwright", "train", "--run", str(folder.root), "--steps=100000"]
        ranks = min(2, os.cpu_count() or 1)
        settings = [f"--ranks={ranks}", f"--metrics.port={port}", "--eval.every=0", "--checkpoint.mode=off"]
        job = subprocess.Popen([*command, *settings], stdout=subprocess.DEVNULL)
        try:
            wait_for_answer(port)
            turns, exporter = take_turns(port, job.pid)
        finally:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                if job.poll() is None:
                    job.send_signal(number)
                    with suppress(subprocess.TimeoutExpired):
                        job.wait(20)
        quiet, read = (step_seconds(folder, turns[parity::2]) for parity in (0, 1))
    return {
        "readers": READERS,
        "step_seconds": round(median(quiet), 5),
        "step_seconds_with_readers": round(median(read), 5),
        "ratio": round(median(read) / median(quiet), 4),
        "steps": [len(quiet), len(read)],
        **exporter,
    }


def take_turns(port: int, job: int) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """Alternates turns without and with readers; returns their times, and what the exporter used with readers."""
    turns, answers, processor = [], 0, 0.0
    exporter = next(pid for pid in children(job) if b"exporter_process" in Path(f"/proc/{pid}/cmdline").read_bytes())
    for turn in range(2 * TURNS):
        before, begin = processor_seconds(exporter), time.time()
        if turn % 2:
            with readers(port) as counts:
                time.sleep(TURN_SECONDS)
            answers += sum(counts)
            processor += processor_seconds(exporter) - before
        else:
            time.sleep(TURN_SECONDS)
        turns.append((begin, time.time()))
    return turns, {
        "answers": answers,
        "exporter_cores": round(processor / (TURNS * TURN_SECONDS), 4),
        "exporter_peak_bytes": peak_memory(exporter),
    }


@contextmanager
def readers(port: int) -> Iterator[list[int]]:
    """Readers in a few threads of this process, each with its share of the connections; counts the answers."""
    stop = threading.Event()
    counts = [0] * 10
    slow = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(SLOW_READERS)]
    for number, client in enumerate(slow):
        client.sendall(REQUEST if number % 2 else REQUEST[:30])

    def read(thread: int) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        every = INTERVAL * len(counts) / READERS
        while not stop.wait(every):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as client:
                client.sendall(REQUEST)
                answer = b""
                while block := client.recv(1 << 16):
                    answer += block
                counts[thread] += answer.startswith(b"HTTP/1.1 200 ")

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(counts))]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for client in slow:
            client.close()


def step_seconds(folder: RunFolder, turns: list[tuple[float, float]]) -> list[float]:
    """The step times of rank 0 in turns."""
    steps = [event for event in read_events(folder.events(0)) if event["kind"] == "step"]
    return [event["seconds"] for begin, end in turns for event in steps if begin < event["begin"] < end]


def wait_for_answer(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
            time.sleep(5)  # the first steps are slower
            return
        time.sleep(0.2)
    raise RuntimeError("the exporter did not start")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
