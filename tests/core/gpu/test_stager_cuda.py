"""Staging on CUDA: copies beside the work of the current stream, which waits for them only before an update."""

from __future__ import annotations

import gc

import pytest
import torch

from meshwright.base.topology.layout import Layout
from meshwright.core.checkpoint.stager import HostStager

pytestmark = pytest.mark.cuda

ELEMENTS = 1 << 27
"""Of a float32 tensor whose copy to the host takes about 10 ms."""


def make_state() -> dict[str, torch.Tensor]:
    names = ["model/weight", "optimizer/weight/exp_avg", "optimizer/weight/exp_avg_sq", "buffer/mean"]
    return {name: torch.full((ELEMENTS,), index + 1.0, device="cuda") for index, name in enumerate(names)}


def test_update_and_forward_do_not_change_what_is_copied():
    state = make_state()
    stager = HostStager(state, Layout(), 0)
    for number in range(2):
        expected = {name: float(tensor[-1]) for name, tensor in state.items()}
        torch.cuda.synchronize()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")  # neither the copies nor the update wait on the host
        host = stager.copy(state)
        state["buffer/mean"].add_(1)  # as a forward pass does
        stager.block_update()
        for tensor in state.values():
            tensor.add_(1)
        torch.cuda.set_sync_debug_mode(before)
        stager.wait()
        for name, shard in host.items():
            assert float(shard.local.min()) == float(shard.local.max()) == expected[name], (number, name)
        torch.cuda.synchronize()
        assert 0.0 < stager.blocked_seconds() < 5.0


def test_training_stream_does_not_wait_for_the_copies():
    state = make_state()
    stager = HostStager(state, Layout(), 0)
    stager.memory.wait()
    number, host = torch.zeros((), device="cuda"), torch.zeros((), pin_memory=True)
    for _ in range(2):
        host.copy_(number, non_blocking=True)  # the last operation of a step
        torch.cuda.synchronize()
        stager.copy(state)
        event = torch.cuda.Event()
        event.record()  # the first one of the next step
        event.synchronize()
        assert not stager.stream.copied.query()
        stager.wait()


def test_temporary_tensors_keep_their_memory_until_they_are_copied():
    state = make_state()
    stager = HostStager(state, Layout(), 0)
    stager.memory.wait()
    stager.copy({name: tensor.clone() for name, tensor in state.items()})
    torch.full((4 * ELEMENTS,), -1.0, device="cuda")  # would reuse their memory
    stager.wait()
    assert {float(shard.local.min()) for shard in stager.host.values()} == {1.0, 2.0, 3.0, 4.0}


def test_pages_are_locked_for_the_life_of_a_stager_only():
    for _ in range(3):  # the same addresses are locked again
        stager = HostStager(make_state(), Layout(), 0)
        stager.memory.wait()
        assert stager.memory.bytes.is_pinned()
        assert all(shard.local.is_pinned() for shard in stager.host.values())
        del stager
        gc.collect()
