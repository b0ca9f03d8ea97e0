"""Tests of the errors: message, hint, exit codes, and hints for Python."""

from __future__ import annotations

import errno
import os

import pytest

from meshwright import errors
from meshwright.errors import ConfigError, MeshwrightError, limit_error, with_python_hint


def test_error_prints_message_and_hint_in_one_line():
    error = ConfigError("steps = x has the wrong type", "expected an integer")
    assert str(error) == "steps = x has the wrong type; expected an integer"
    assert (error.message, error.hint) == ("steps = x has the wrong type", "expected an integer")
    assert str(MeshwrightError("no hint")) == "no hint"


def test_exit_codes_are_distinct():
    classes = [
        c for c in MeshwrightError.__subclasses__() if c.__module__ == errors.__name__ and "exit_code" in vars(c)
    ]
    codes = [c.exit_code for c in classes]
    assert sorted(codes) == [2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("number", [2, 15])
def test_errors_of_signals_can_be_rebuilt_from_their_arguments(number):
    for error in (
        errors.StoppedBySignal(number, 5),
        errors.StoppedBeforeStart(number),
        errors.KilledBySignal(number),
    ):
        assert str(type(error)(*error.args)) == str(error)
        assert error.exit_code == 128 + number


@pytest.mark.parametrize(
    ("hint", "python"),
    [
        ("try another --run DIR, --fresh or --fork", "try another run=DIR, fresh=True or fork=True"),
        ("leave out --no-fallback", "leave out fallback=False"),
        ("try --layout.replicate=1", "try layout.replicate = 1"),
        ("try --model my.models:build --parallel-spec my:SPEC", "try model=my.models:build parallel_spec=my:SPEC"),
        ("try --accept-code", "try accept_code=True"),
        (
            "try --critical-batch 5 or torchrun --nproc-per-node 2",
            "try critical_batch 5 or torchrun --nproc-per-node 2",
        ),
    ],
)
def test_command_line_options_in_a_hint_become_keyword_arguments(hint, python):
    assert with_python_hint(MeshwrightError("message", hint)).hint == python


def test_command_line_options_in_a_message_become_names_of_arguments():
    error = with_python_hint(ConfigError("--precision fp9 is unknown", "expected fp32"))
    assert str(error) == "precision fp9 is unknown; expected fp32"


def test_gloo_and_nccl_errors_of_a_lost_peer_are_recognized():
    assert errors.is_peer_loss(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234"))
    assert errors.is_peer_loss(RuntimeError("NCCL error: remote process exited or there was a network error"))
    assert not errors.is_peer_loss(RuntimeError("Connection closed by peer"))
    assert not errors.is_peer_loss(errors.PeerError("gloo: Connection closed by peer"))


def test_limit_of_the_machine_is_one_line_with_what_to_try():
    reached = limit_error(OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a/file"))
    assert str(reached) == "Too many open files: a/file; try a larger number of open files: ulimit -n"
    assert "ulimit -f" in str(limit_error(OSError(errno.EFBIG, "File too large")))
    assert "ulimit -n" in str(limit_error(RuntimeError("[gloo/device.cc:186] rv != -1. Too many open files")))
    assert limit_error(OSError(errno.ENOENT, "No such file")) is None
    assert limit_error(RuntimeError("a shape does not fit")) is None
