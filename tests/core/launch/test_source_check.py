"""A user's dataset that blocks, fails or is random is refused before ranks start, by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest

from meshwright.base.config import LaunchConfig
from meshwright.core.data.source import IndexableSource
from meshwright.core.launch.source_check import check_source
from meshwright.errors import DataError

LAUNCH = LaunchConfig(device="cpu", hang_timeout=1.0)


class Squares:
    """A dataset of five samples; each test replaces one of its methods."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return np.array([index, index + 1]), np.array([index * index])


def never_return(*_):
    while True:
        with suppress(BaseException):  # a dataset may swallow anything
            time.sleep(1000)


def dataset(**methods):
    return IndexableSource(type("Dataset", (Squares,), methods)())


def test_checked_source_has_the_samples_and_the_fingerprint_of_the_dataset():
    source = dataset()
    checked = check_source(source, LAUNCH)
    assert (checked.name, len(checked), checked.fingerprint()) == ("Dataset", 5, source.fingerprint())
    assert [array.tolist() for array in checked[3]] == [[3, 4], [9]]
    assert checked.masked_sample()[-1].tolist() == [-100]


@pytest.mark.parametrize("method", ["__len__", "__getitem__", "fingerprint"])
def test_dataset_that_never_returns_is_refused_after_the_hang_timeout(method):
    with pytest.raises(DataError, match=r"source Dataset did not return .* launch\.hang_timeout = 1 s"):
        check_source(dataset(**{method: never_return}), LAUNCH)


def random_sample(_self, index):
    return np.random.rand(3), np.array([index])


def test_dataset_that_is_random_is_refused_with_the_index():
    state = np.random.get_state()[1].tolist()
    with pytest.raises(DataError, match=r"source Dataset, index 0: two reads of the sample differ") as error:
        check_source(dataset(__getitem__=random_sample), LAUNCH)
    assert "depend on the index alone" in error.value.hint
    assert np.random.get_state()[1].tolist() == state


def random_last_sample(self, index):
    return random_sample(self, index) if index == 4 else Squares.__getitem__(self, index)


def test_last_sample_of_a_dataset_is_read_twice_too():
    with pytest.raises(DataError, match="index 4"):
        check_source(dataset(__getitem__=random_last_sample, fingerprint=lambda _: "constant"), LAUNCH)


def raise_value_error(*_):
    raise ValueError("no such table")


def test_fingerprint_that_fails_is_a_data_error():
    with pytest.raises(DataError, match="source Dataset cannot be read: ValueError: no such table"):
        check_source(dataset(fingerprint=raise_value_error), LAUNCH)


def test_dataset_that_ends_its_process_is_a_data_error():
    with pytest.raises(DataError, match=r"source Dataset cannot be read: .*SIGKILL"):
        check_source(dataset(__getitem__=lambda *_: os.kill(os.getpid(), signal.SIGKILL)), LAUNCH)


SCRIPT = """
import time
from meshwright import RunConfig, train

class Blocking:
    def __len__(self):
        return 10
    def __getitem__(self, index):
        print("reading", flush=True)
        time.sleep(1000)

train(RunConfig(steps=1), model=None, source=Blocking(), run=None)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_run_whose_dataset_blocks(tmp_path, number):
    job = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert job.stdout.readline() == b"reading\n"
        job.send_signal(number)
        job.communicate(timeout=60)
        assert job.returncode == -number  # a shell reports 130 and 143
    finally:
        job.kill()
        job.wait()


def test_interrupt_during_the_hooks_of_a_fork_is_not_lost():
    """Python ignores an exception in a hook that runs after a fork."""
    script = """
import os, signal
from meshwright.core.launch.ranks import run_ranks
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
run_ranks(print, 1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGINT, done.stderr
