"""Runs experiments in a process of their own, with limits on time and memory. Torch-free.

A server process imports torch once and forks a child per experiment: a hang, a crash or too much memory ends the child,
never the session. It starts while the reader still thinks about the first question.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from meshwright.base.environment import start_python
from meshwright.base.io import finite
from meshwright.base.scratch_folder import ScratchFolder, remove_stale_folders
from meshwright.core.launch.descendants import MARK, end_descendants, with_mark
from meshwright_practice.cards.card import EXPERIMENTS, Experiment, Knobs, KnobValue, Observation
from meshwright_practice.pictures import picture_from_json, picture_to_json

MAX_SECONDS = 20.0
MAX_BYTES = 3 << 30
SERVER = "meshwright_practice.cards.experiment_process"
FOLDER_PREFIX = "meshwright-experiments-"
START_SECONDS = 120.0
"""How long the server may take to import torch, on a machine that is busy."""
GRACE_SECONDS = 10.0
"""How long the server may take to end an experiment that has reached its limit."""


@dataclass(frozen=True)
class RunLimits:
    """The limits of an experiment: seconds of wall time, and bytes of memory of its processes together.

    Memory is the proportional set size (PSS) of the child and its descendants, in which a page that several processes
    share is counted once; it is sampled every 0.2 s, so a shorter peak is not seen. RLIMIT_AS would limit addresses, of
    which torch reserves many times what it uses.
    """

    seconds: float = MAX_SECONDS
    bytes: int = MAX_BYTES


@dataclass(frozen=True)
class ExperimentRun:
    """A run of an experiment: what it has observed, or why there is nothing."""

    knobs: Mapping[str, KnobValue]
    observation: Observation | None
    failure: str
    seconds: float
    peak_bytes: int
    """0 if the experiment ended before memory was sampled"""
    log: str = ""
    """the last lines that a failed experiment has printed"""

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "knobs": dict(self.knobs),
            "failure": self.failure,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
        }
        if self.observation is not None:
            value |= observation_to_json(self.observation)
        result: dict[str, Any] = finite(value)
        return result


def observation_to_json(observation: Observation) -> dict[str, Any]:
    return {
        "values": {name: float(value) for name, value in observation.values.items()},
        "picture": picture_to_json(observation.picture),
        "notes": list(observation.notes),
    }


def observation_from_json(value: Mapping[str, Any]) -> Observation:
    return Observation(value["values"], picture_from_json(value["picture"]), tuple(value["notes"]))


class ExperimentRunner:
    """A server that runs one experiment at a time. `start` returns at once; the first `run` waits until torch is there.

    Args:
        limits: what an experiment may take.
        package: where the modules of experiments are.
    """

    def __init__(self, limits: RunLimits | None = None, package: str = EXPERIMENTS) -> None:
        self.limits, self.package = limits or RunLimits(), package
        self._process: subprocess.Popen[bytes] | None = None
        self._reader, self._buffer, self._mark = -1, b"", ""

    def __enter__(self) -> ExperimentRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the server unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        remove_stale_folders(FOLDER_PREFIX)
        self._folder = ScratchFolder(FOLDER_PREFIX)
        self._reader, writer = os.pipe()
        self._buffer, self._mark = b"", secrets.token_hex(8)
        self._process = start_python(
            SERVER,
            str(writer),
            str(os.getpid()),
            str(self._folder.path),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(writer,),
            start_new_session=True,  # the terminal's Ctrl-C reaches this process only
            env=os.environ | {"OMP_NUM_THREADS": "1", MARK: with_mark(self._mark)},
        )
        os.close(writer)

    def run(
        self, experiment: Experiment, knobs: Knobs, progress: Callable[[float, int], None] | None = None
    ) -> ExperimentRun:
        """Runs an experiment. `progress` is called with its seconds and bytes, several times a second."""
        self.start()
        began = time.monotonic()
        try:
            answer = self._request(experiment, knobs, progress)
        except BaseException:  # Ctrl-C: nothing of the experiment may go on
            self.close()
            raise
        if answer is None:
            self.close()
            failure = "the process that runs experiments ended or did not answer"
            return ExperimentRun(knobs, None, failure, time.monotonic() - began, 0)
        observation = observation_from_json(answer) if "values" in answer else None
        failure, log = answer.get("failure", ""), answer.get("log", "")
        return ExperimentRun(knobs, observation, failure, answer["seconds"], answer["peak_bytes"], log)

    def _request(
        self, experiment: Experiment, knobs: Knobs, progress: Callable[[float, int], None] | None
    ) -> dict[str, Any] | None:
        """Sends a request and returns its answer, or None if the server has ended or is silent beyond its limits."""
        assert self._process is not None
        assert self._process.stdin is not None
        request: dict[str, Any] = {"package": self.package, "run": experiment.run, "knobs": dict(knobs)}
        request |= {"seconds": self.limits.seconds, "bytes": self.limits.bytes}
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        deadline = time.monotonic() + START_SECONDS
        while (message := self._receive(deadline)) is not None:
            if message["event"] == "end":
                return message
            if message["event"] == "start":
                deadline = time.monotonic() + self.limits.seconds + GRACE_SECONDS
            elif progress is not None:
                progress(message["seconds"], message["bytes"])
        return None

    def _receive(self, deadline: float) -> dict[str, Any] | None:
        """The next message of the server, or None if it has ended or the deadline has passed."""
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._reader], [], [], left)[0]:
                return None
            block = os.read(self._reader, 1 << 16)
            if not block:
                return None
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def interrupt(self) -> None:
        """Ends the experiment that another thread runs: its `run` returns a failure."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """Ends the server and whatever it has started."""
        if self._process is None:
            return
        self._process.kill()  # an experiment ends with the server, and its ranks with the experiment
        self._process.wait()
        end_descendants(self._mark)
        with suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        os.close(self._reader)
        self._folder.remove()
        self._process = None
