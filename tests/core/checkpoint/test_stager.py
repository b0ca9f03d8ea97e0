"""Staging: what a checkpoint contains if its copies to host memory run at the last moment that the device allows."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.base.checkpoint.listing import list_published
from meshwright.base.config import CheckpointConfig
from meshwright.base.store.posix import PosixStore
from meshwright.base.topology.layout import Layout
from meshwright.core.checkpoint import saver as saver_module
from meshwright.core.checkpoint import stager as stager_module
from meshwright.core.checkpoint.host_memory import CopyStream
from meshwright.core.checkpoint.stager import HostStager, first_nonfinite
from meshwright.core.checkpoint.unsharded import state_digest
from tests.core.checkpoint.checkpoint_fixtures import metadata_at, saver_at
from tests.kit.custom_model import custom_config, run_custom


class DeferredStream(CopyStream):
    """A stream that copies when the current stream waits for it, or half a second after the host began to wait."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.blocked = threading.Event()
        self.running = threading.Lock()

    @contextmanager
    def copies(self):
        self.blocked.clear()
        with QueueCopies(self.queue):
            yield

    def block_current(self) -> None:
        self.run()
        self.blocked.set()

    def synchronize(self) -> None:
        self.blocked.wait(0.5)
        self.run()

    def run(self) -> None:
        with self.running:
            while self.queue:
                target, source = self.queue.pop()
                target.copy_(source)

    def blocked_seconds(self) -> float:
        return 0.5


class QueueCopies(TorchDispatchMode):
    def __init__(self, queue) -> None:
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.queue.append(args[:2])
            return args[0]
        return function(*args, **(kwargs or {}))


@pytest.fixture
def state():
    names = ["model/weight", "model/frozen", "buffer/mean", "optimizer/weight/exp_avg", "optimizer/weight/step"]
    return {name: torch.full((3,), index + 1.0) for index, name in enumerate(names)}


def staged_names(stager, state) -> set[str]:
    return {name for name, host in stager.host.items() if torch.equal(host.local, state[name])}


# A forward pass writes buffers, and may write parameters that the optimizer does not update.
def test_only_what_the_optimizer_updates_is_copied_beside_the_next_step(state):
    stager = HostStager(state, Layout(), 0, DeferredStream())
    stager.copy(state)
    assert staged_names(stager, state) == {"model/frozen", "buffer/mean"}
    stager.block_update()
    assert staged_names(stager, state) == state.keys()


class RecordedCalls:
    """The operations that `CopyStream` queues, by the stream that they are queued on, in order."""

    def __init__(self, monkeypatch) -> None:
        self.queued: list[tuple[str, str]] = []
        self.current = "training"
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_stream=self.wait_stream))
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: SimpleNamespace(record=lambda: self.add("event")))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "training")
        monkeypatch.setattr(torch.cuda, "stream", self.stream)

    def add(self, operation: str) -> None:
        self.queued.append((self.current, operation))

    def wait_stream(self, stream) -> None:
        self.queued.append(("copies", f"wait for {stream}"))

    @contextmanager
    def stream(self, _stream):
        self.current = "copies"
        yield
        self.current = "training"


# A step ends with a copy to the host, behind which CUDA would queue the first event of the next step, and so behind the
# copies of the checkpoint.
def test_kernel_of_the_training_stream_follows_the_copies(monkeypatch):
    calls = RecordedCalls(monkeypatch)
    stream = CopyStream(torch.device("cpu"))
    stream.kernels = SimpleNamespace(add_=lambda _: calls.add("kernel"))
    with stream.copies():
        calls.add("copy")
    assert calls.queued == [
        ("copies", "wait for training"),
        ("copies", "copy"),
        ("copies", "event"),
        ("training", "kernel"),
    ]


def test_first_nonfinite_names_the_first_tensor_and_leaves_buffers_out():
    values = torch.zeros(40)
    large, infinite, nan = torch.full_like(values, 3e38), values.clone(), values.clone()
    infinite[-1], nan[0] = torch.inf, torch.nan
    tensors = {
        "buffer/mean": nan,
        "model/large": large,
        "model/step": torch.ones(2, dtype=torch.int64),
        "model/0": values,
    }
    assert first_nonfinite(tensors) == ""
    assert first_nonfinite(tensors | {"optimizer/b": infinite, "optimizer/c": nan}) == "optimizer/b"
    assert first_nonfinite({"model/empty": values[:0]}) == ""


def test_tensors_are_checked_in_parts(monkeypatch):
    monkeypatch.setattr(stager_module, "CHECK_ELEMENTS", 16)
    values = torch.zeros(5, 8)
    assert first_nonfinite({"model/weight": values}) == ""
    values[2, 3] = torch.nan
    assert first_nonfinite({"model/weight": values}) == "model/weight"


def test_tensors_are_referenced_until_they_are_copied(state):
    stager = HostStager(state, Layout(), 0, DeferredStream())
    stager.copy({name: tensor.clone() for name, tensor in state.items()})
    assert len(stager.sources) == len(state)
    stager.wait()
    assert stager.sources == []
    assert staged_names(stager, state) == state.keys()


def test_stall_includes_the_time_that_an_update_was_blocked(tmp_path, monkeypatch):
    monkeypatch.setattr(saver_module, "HostStager", partial(HostStager, stream=DeferredStream()))
    saver = saver_at(1, PosixStore(tmp_path))
    saver.config = CheckpointConfig(mode="async")
    saver.save(metadata_at(1))
    saver.block_update()
    (result,) = saver.wait()
    saver.close()
    assert result.error is None
    assert 0.5 <= result.stall_seconds < 1.0


def test_save_that_is_due_by_time_waits_for_the_host_memory(tmp_path, monkeypatch):
    saver = saver_at(1, PosixStore(tmp_path))
    saver.config = CheckpointConfig(mode="async", seconds=1e-9, every=0)
    assert saver.due(1)
    monkeypatch.setattr(saver.stager.memory, "ready", lambda: False)
    assert not saver.due(1)
    saver.config = CheckpointConfig(mode="async", seconds=0.0, every=1)
    assert saver.due(1)
    saver.close()


def test_checkpoint_of_a_run_has_the_state_of_its_step_if_it_is_copied_at_the_last_moment(tmp_path, monkeypatch):
    digests = []
    for folder in ("at once", "deferred"):
        if folder == "deferred":
            monkeypatch.setattr(saver_module, "HostStager", partial(HostStager, stream=DeferredStream()))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        checkpoint = CheckpointConfig(every=2, keep=9)
        run_custom(tmp_path / folder, custom_config(steps=4, ranks=1, checkpoint=checkpoint), model=model)
        entries = list_published(PosixStore(tmp_path / folder))
        digests.append({entry.step: state_digest(entry) for entry in entries})
    assert digests[0].keys() == {2, 4}
    assert digests[0] == digests[1]
