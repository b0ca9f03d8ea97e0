"""The reward worker: rewards of groups, every way in which a reward function fails, and no process left behind."""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
import torch

from meshwright.errors import ConfigError
from meshwright.rl.rewards.worker import CompletionText, RewardFailure, RewardWorker
from tests.kit.reward_processes import ends_soon, processes_below, worker_of

ITEM = {"prompt": "say it", "answer": "yes"}
GROUP = [CompletionText("yes", [1, 0]), CompletionText("no", [2, 0])]
GRACE = 60.0
"""Seconds after its time limit within which a group is answered on a busy machine; rewards that hang take 1000."""


def exact(item, completion):
    return completion == item["answer"]


def test_worker_returns_the_rewards_of_a_group_in_order():
    with worker_of(exact) as worker:
        assert worker.score(ITEM, GROUP, 30) == [1.0, 0.0]
        assert worker.score({"answer": "no"}, GROUP[::-1], 30) == [1.0, 0.0]
        assert worker.score(ITEM, [], 30) == []


def test_worker_runs_in_another_process_and_gets_plain_data():
    def reward(item, completion, tokens):
        assert (type(item), type(tokens), {type(token) for token in tokens}) == (dict, list, {int})
        assert item == {"prompt": [1, 2], "nested": {"text": "é\ud800", "none": None}}
        return os.getpid()

    with worker_of(reward) as worker:
        item = {"prompt": [1, 2], "nested": {"text": "é\ud800", "none": None}}
        [pid] = worker.score(item, [CompletionText("x", np.array([1, 2], np.int32))], 30)
        assert pid != os.getpid()
        assert worker.score(item, [CompletionText("x", [3])], 30) == [pid]


@pytest.mark.parametrize(
    "value",
    [0, 1.5, True, -3, np.float32(2), np.int64(7), np.bool_(True), np.array(2.5), torch.tensor(0.5), Fraction(1, 4)],
)
def test_numbers_of_any_library_are_rewards(value):
    with worker_of(lambda item, completion: value) as worker:
        assert worker.score(ITEM, GROUP, 30) == [float(value)] * 2


def test_rewards_are_exact():
    values = [0.1 + 0.2, 1e-308, -math.pi, 5e-324]
    with worker_of(lambda item, completion: values[int(completion)]) as worker:
        assert worker.score(ITEM, [CompletionText(str(index), [1]) for index in range(4)], 30) == values


def test_function_with_three_arguments_gets_the_tokens():
    with worker_of(lambda item, completion, tokens: len(tokens)) as worker:
        assert worker.score(ITEM, [CompletionText("", [5, 6, 7]), CompletionText("", [0])], 30) == [3.0, 1.0]


def raise_error(item, completion):
    raise RuntimeError("no such\nanswer")


def raise_for_the_second(item, completion):
    return {"yes": 1.0}[completion]


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


def raise_unprintable(item, completion):
    raise Unprintable


def crash(item, completion):
    ctypes.string_at(0)


def allocate(item, completion):
    return len(bytearray(1 << 40))


FAILURES = {
    "exception": (raise_error, r"raised RuntimeError: no such answer \(.*test_reward_worker.py, line \d+\), for compl"),
    "second completion": (raise_for_the_second, r"KeyError: 'no' .* for completion 1 of the group"),
    "exception without text": (raise_unprintable, "raised Unprintable"),
    "sys.exit": (lambda item, completion: sys.exit(3), "raised SystemExit: 3"),
    "interrupt": (lambda item, completion: (_ for _ in ()).throw(KeyboardInterrupt), "raised KeyboardInterrupt"),
    "NaN": (lambda item, completion: math.nan, "the reward is nan, expected a finite number, for completion 0"),
    "infinity": (lambda item, completion: -math.inf, "the reward is -inf"),
    "None": (lambda item, completion: None, "the reward is a NoneType, expected a number"),
    "text": (lambda item, completion: "1.0", "the reward is a str"),
    "array": (lambda item, completion: np.ones(1), "the reward is a ndarray"),
    "complex": (lambda item, completion: 1j, "the reward is a complex"),
    "huge integer": (lambda item, completion: 10**400, "OverflowError"),
    "os._exit": (
        lambda item, completion: os._exit(7),
        "the process of the reward exited with code 7, for completion 0",
    ),
    "exit 0": (lambda item, completion: os._exit(0), "exited with code 0"),
    "segmentation fault": (crash, r"was killed by signal 11 \(segmentation fault\)"),
    "kill": (
        lambda item, completion: os.kill(os.getpid(), 9),
        r"killed by signal 9 \(killed; the kernel does so if mem",
    ),
    "memory": (allocate, "MemoryError"),
    "closed files": (lambda item, completion: os.closerange(3, 1000) or 1.0, "the process of the reward"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failure_is_named_and_the_next_group_has_a_new_worker(failure):
    function, expected = FAILURES[failure]

    def reward(item, completion):
        return os.getpid() if item.get("pid") else function(item, completion)

    with worker_of(reward) as worker:
        [before] = worker.score({"pid": 1}, GROUP[:1], 30)
        found = worker.score(ITEM, GROUP, 30)
        assert isinstance(found, RewardFailure)
        assert re.search(expected, found.text), found.text
        assert "\n" not in found.text
        [after] = worker.score({"pid": 1}, GROUP[:1], 30)
        assert after != before
        assert ends_soon({int(before)})


def sleep(item, completion):
    time.sleep(1000)


def loop(item, completion):
    while True:
        pass


def hold_the_interpreter_lock(item, completion):
    ctypes.PyDLL(None).sleep(1000)  # a PyDLL function keeps the lock


def ignore_signals(item, completion):
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)


def stop(item, completion):
    os.kill(os.getpid(), signal.SIGSTOP)


def backtrack(item, completion):
    return bool(re.match(r"(a+)+$", "a" * 60 + "!"))


HANGS = [sleep, loop, hold_the_interpreter_lock, ignore_signals, stop, backtrack]


@pytest.mark.parametrize("hang", HANGS)
def test_hang_ends_at_the_time_limit(hang):
    def reward(item, completion):
        return hang(item, completion) if completion == "no" and "hang" in item else os.getpid()

    with worker_of(reward) as worker:
        [before] = worker.score({}, GROUP[:1], 30)
        started = time.monotonic()
        found = worker.score({"hang": True}, GROUP, 0.3)
        assert 0.3 <= time.monotonic() - started <= 0.3 + GRACE
        assert found == RewardFailure(
            "the reward took longer than 0.3 s (rl.reward_timeout), for completion 1 of the group"
        )
        [after, _] = worker.score({}, GROUP, 30)
        assert after != before
        assert ends_soon({int(before)})


def test_group_is_scored_at_most_once(tmp_path):
    calls = tmp_path / "calls"

    def reward(item, completion):
        with calls.open("a") as file:
            file.write(f"{item['group']}\n")
        return {"exit": lambda: os._exit(1), "hang": lambda: time.sleep(1000)}.get(item["how"], lambda: 1.0)()

    with worker_of(reward) as worker:
        for group, how in enumerate(["", "exit", "hang", "", "hang", "exit", ""]):
            worker.score({"group": group, "how": how}, GROUP[:1], 0.3 if how == "hang" else 30)
    assert calls.read_text().split() == [str(group) for group in range(7)]


def process_id(item, completion):
    return os.getpid()


def test_worker_killed_between_groups_is_replaced(capfd):
    with worker_of(process_id) as worker:
        [before] = worker.score(ITEM, GROUP[:1], 30)
        os.kill(int(before), signal.SIGKILL)
        assert ends_soon({int(before)})
        [after] = worker.score(ITEM, GROUP[:1], 30)
        assert after != before
    assert "the reward worker was killed by signal 9" in capfd.readouterr().err


def test_worker_killed_during_a_group_is_a_failure(tmp_path):
    file = tmp_path / "pid"

    def reward(item, completion):
        file.write_text(str(os.getpid()))
        file.rename(tmp_path / "ready")
        time.sleep(1000)

    def kill():
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(int((tmp_path / "ready").read_text()), signal.SIGKILL)

    with worker_of(reward) as worker:
        thread = threading.Thread(target=kill)
        thread.start()
        found = worker.score(ITEM, GROUP, 30)
        thread.join()
        assert found.text.startswith("the process of the reward was killed by signal 9")


def test_server_killed_between_groups_is_replaced():
    with worker_of(process_id) as worker:
        [before] = worker.score(ITEM, GROUP[:1], 30)
        server = worker._server.pid
        os.kill(server, signal.SIGKILL)
        assert ends_soon({server, int(before)})
        [after] = worker.score(ITEM, GROUP[:1], 30)
        assert after != before


def test_server_killed_during_a_group_is_a_failure():
    def reward(item, completion):
        if "kill" in item:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        return 1.0

    with worker_of(reward) as worker:
        found = worker.score({"kill": True}, GROUP, 30)
        assert isinstance(found, RewardFailure)
        assert "the process that forks reward workers was killed by signal 9" in found.text
        assert worker.score({}, GROUP, 30) == [1.0, 1.0]


def test_stopped_server_does_not_block_the_generator():
    with worker_of(exact) as worker:
        os.kill(worker._server.pid, signal.SIGSTOP)
        started = time.monotonic()
        found = worker.score(ITEM, GROUP, 0.2)
        assert time.monotonic() - started <= 0.2 + GRACE
        assert isinstance(found, RewardFailure)
        assert worker.score(ITEM, GROUP, 30) == [1.0, 0.0]


def test_memory_limit_fails_the_group_alone():
    def reward(item, completion):
        return float(len(bytearray(int(completion))))

    with worker_of(reward, memory=64 << 20) as worker:
        assert worker.score({}, [CompletionText(str(1 << 20), [1])], 30) == [float(1 << 20)]
        found = worker.score({}, [CompletionText(str(256 << 20), [1])], 30)
        assert isinstance(found, RewardFailure)
        assert "MemoryError" in found.text
        assert worker.score({}, [CompletionText("5", [1])], 30) == [5.0]


def test_printed_text_goes_to_the_output_of_the_generator(capfd):
    def reward(item, completion):
        print("printed", completion)
        print("to stderr", file=sys.stderr)
        if completion == "no":
            os._exit(1)
        return 1.0

    with worker_of(reward) as worker:
        worker.score(ITEM, GROUP, 30)
    written = capfd.readouterr()
    assert written.out.count("printed yes\n") == 1
    assert written.out.count("printed no\n") == 1  # also what is printed before a crash
    assert written.err.count("to stderr\n") == 2


def test_reward_cannot_read_standard_input():
    with worker_of(lambda item, completion: len(os.read(0, 1))) as worker:
        assert worker.score(ITEM, GROUP, 5) == [0.0, 0.0]


def test_processes_that_a_failed_reward_started_are_killed(tmp_path):
    file = tmp_path / "pids"

    def reward(item, completion):
        file.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        return {"exit": lambda: os._exit(1), "hang": lambda: time.sleep(1000)}[item["how"]]()

    with worker_of(reward) as worker:
        for how in ("exit", "hang"):
            assert isinstance(worker.score({"how": how}, GROUP, 0.5), RewardFailure)
            assert ends_soon({int(file.read_text())})


def test_state_of_a_function_survives_groups_and_ends_with_a_failure():
    calls = []

    def reward(item, completion):
        calls.append(completion)
        return len(calls) if completion == "yes" else math.nan

    with worker_of(reward) as worker:
        assert worker.score(ITEM, GROUP[:1], 30) == [1.0]
        assert worker.score(ITEM, GROUP[:1], 30) == [2.0]
        assert isinstance(worker.score(ITEM, GROUP[1:], 30), RewardFailure)
        assert worker.score(ITEM, GROUP[:1], 30) == [1.0]
    assert not calls


def test_large_groups_are_scored():
    completions = [CompletionText("x" * 5000, list(range(5000))) for _ in range(200)]
    with worker_of(lambda item, completion, tokens: len(completion) + len(tokens)) as worker:
        assert worker.score(ITEM, completions, 60) == [10_000.0] * 200


def test_sockets_of_the_generator_are_not_kept_open():
    ours, peer = socket.socketpair()
    with worker_of(exact) as worker:
        assert worker.score(ITEM, GROUP, 30) == [1.0, 0.0]
        ours.close()
        peer.settimeout(5)
        assert peer.recv(1) == b""  # the peer learns at once that the generator has closed it
    peer.close()


GENERATOR = """
import os, sys, time
from meshwright.rl.rewards.worker import CompletionText, RewardWorker

worker = RewardWorker(lambda item, completion: time.sleep(1000) if completion == "hang" else 1.0)
assert worker.score({}, [CompletionText("", [1])], 30) == [1.0]
print("ready", flush=True)
worker.score({}, [CompletionText("hang", [1])], 1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_survives_a_generator_that_is_killed(number):
    generator = subprocess.Popen([sys.executable, "-c", GENERATOR], stdout=subprocess.PIPE, text=True)
    assert generator.stdout.readline() == "ready\n"
    below = processes_below(generator.pid)
    assert len(below) == 2
    time.sleep(0.2)
    generator.send_signal(number)
    generator.wait(10)
    assert ends_soon(below)
    generator.stdout.close()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (3, "the reward is a int"),
        (lambda: 1.0, "cannot be called with (item, completion)"),
        (lambda item: 1.0, "cannot be called with (item, completion)"),
        (lambda a, b, c, d: 1.0, "cannot be called with (item, completion)"),
        (Unprintable, "is a class"),
    ],
)
def test_what_is_not_a_reward_function_is_an_error(reward, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        RewardWorker(reward)


def test_third_argument_with_a_default_is_a_setting_unless_it_is_named_tokens():
    with worker_of(lambda item, completion, scale=2.0: scale) as worker:
        assert worker.score(ITEM, GROUP, 30) == [2.0, 2.0]
    with worker_of(lambda item, completion, tokens=None: len(tokens)) as worker:
        assert worker.score(ITEM, GROUP, 30) == [2.0, 2.0]
