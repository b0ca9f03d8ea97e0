"""Live bytes are counted by class to the byte, and the tracker leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshwright.base.records.memory_classes import TENSOR_CLASSES
from meshwright.core.telemetry.comm_counter import CommCounter
from meshwright.core.telemetry.memory_tracker import MemoryTracker
from meshwright.core.torch_private import fsdp_tensors
from meshwright.testing import run_ranks

WIDTH, HIDDEN, LAYERS, RANKS = 8, 9, 3, 2


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(LAYERS)]
    )


UNIT = (WIDTH * HIDDEN * 2 + HIDDEN + WIDTH) * 4
"""the bytes of one block's parameters"""
PADDED = UNIT + (WIDTH + 1) * 4
"""the same with padding: one row more for each parameter whose rows two ranks cannot share evenly"""
FULL, SHARD = LAYERS * UNIT, LAYERS * PADDED // RANKS


def test_gradient_assigned_directly_is_counted_at_the_next_phase():
    model = nn.Linear(WIDTH, HIDDEN)
    tracker = MemoryTracker(model)
    with tracker:
        tracker.phase = "backward"
        model.weight.grad = torch.ones(HIDDEN, WIDTH)
        tracker.phase = "sync"
        assert tracker.current_bytes["gradient"] == HIDDEN * WIDTH * 4


def optimizer_state(optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]


def train(model, optimizer, tracker, synchronized=lambda last: nullcontext(), micro=2) -> dict[str, int]:
    """Runs a step and returns the bytes between backward and update."""
    for index in range(micro):
        with synchronized(index == micro - 1):
            tracker.phase = "forward"
            loss = model(torch.ones(4, WIDTH)).square().sum()
            tracker.phase = "backward"
            loss.backward()
            del loss
    tracker.phase = "update"
    reduced = tracker.current_bytes
    optimizer.step()
    optimizer.zero_grad()
    return reduced


def measured(
    model, synchronized=lambda last: nullcontext(), micro=2, internal_tensors=lambda: (), gradients=lambda: ()
):
    """Returns peaks, and bytes before the update, of the third step; communication is counted at the same time."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(3):
        tracker = MemoryTracker(model, optimizer_state(optimizer), internal_tensors)
        tracker.assign_class("gradient", gradients())
        with tracker, CommCounter({}):
            reduced = train(model, optimizer, tracker, synchronized, micro)
        assert tracker.peak_total >= max(tracker.peak.values())
        assert (
            tracker.current_bytes["activation"] == 0
        )  # a Gloo worker may keep buffers of the last collective a little longer
    return tracker.peak, reduced, tracker.peak_total


def test_model_without_parallelism_is_counted_to_the_byte():
    model = nn.Linear(16, 4, bias=False)
    model.register_buffer("scale", torch.ones(10))
    with MemoryTracker(model) as tracker:
        x = torch.ones(8, 16)
        hidden = torch.relu(model(x))
        assert tracker.current_bytes == dict.fromkeys(TENSOR_CLASSES, 0) | {
            "parameter": 256,
            "buffer": 40,
            "activation": 512 + 128,
        }
        tracker.phase = "backward"
        hidden.sum().backward()
        del hidden, x
        assert tracker.current_bytes == dict.fromkeys(TENSOR_CLASSES, 0) | {
            "parameter": 256,
            "buffer": 40,
            "gradient": 256,
        }
        model.weight.grad = None
        assert tracker.total == 296
    assert tracker.peak["activation"] == 512 + 128 + 128  # the product is alive until relu is done
    assert (tracker.peak["gradient"], tracker.peak["parameter"]) == (256, 256)


def test_views_count_once_and_resized_storages_at_their_size():
    with MemoryTracker(nn.Module()) as tracker:
        tensor = torch.zeros(100)
        views = [tensor[:50], tensor.view(10, 10).t(), tensor.detach()]
        assert tracker.total == 400
        tensor.untyped_storage().resize_(0)
        assert tracker.total == 0
        tensor.untyped_storage().resize_(800)
        assert tracker.current_bytes["activation"] == 800
        tracker.assign_class("optimizer", views)
        assert (tracker.current_bytes["activation"], tracker.current_bytes["optimizer"]) == (0, 800)
        del tensor, views
        assert tracker.total == 0


def test_tracker_changes_no_bits_and_keeps_no_tensor_alive():
    def gradients(watched: bool) -> list[torch.Tensor]:
        model = blocks()
        with MemoryTracker(model) if watched else nullcontext(), CommCounter({}) if watched else nullcontext():
            model(torch.ones(4, WIDTH)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, gradients(True), gradients(False)))
    before = torch.UntypedStorage.resize_
    model, state = blocks(), torch.ones(5)
    tracker = MemoryTracker(model, [state])
    with suppress(KeyError), tracker:
        loss = model(torch.ones(4, WIDTH)).sum()
        loss.backward()
        raise KeyError
    assert torch.UntypedStorage.resize_ is before
    assert "resize_" not in vars(torch.UntypedStorage)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    refs = [weakref.ref(t) for t in (model, state, loss, *model.parameters(), *[p.grad for p in model.parameters()])]
    del model, state, loss
    gc.collect()
    assert not [ref for ref in refs if ref() is not None]
    assert tracker.peak["gradient"] == FULL


def ddp(world):
    model = nn.parallel.DistributedDataParallel(blocks(), bucket_cap_mb=0.0005, gradient_as_bucket_view=True)
    buckets = {}

    def summed(_state, bucket):
        buckets[bucket.index()] = bucket.buffer()
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, summed)
    accumulate = measured(model, lambda last: nullcontext() if last else model.no_sync(), gradients=buckets.values)
    return measured(model, micro=1, gradients=buckets.values), accumulate


def fsdp(world, reshard: bool, each: bool, micro: int = 2):
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("shard",))
    model = blocks()
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    @contextmanager
    def synchronized(last):
        model.set_requires_gradient_sync(last or each)
        yield

    return measured(model, synchronized, micro, lambda: fsdp_tensors(model))


def tensor(world):
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tensor",))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return measured(model)


def two_ranks(world):
    once, each = [[fsdp(world, reshard, each) for reshard in (False, True)] for each in (False, True)]
    return ddp(world), once, each, fsdp(world, True, True, micro=1), tensor(world)


@pytest.fixture(scope="module")
def pair():
    return run_ranks(two_ranks, RANKS)


def local_shard(rank: int) -> int:
    """Optimizer state has no padding: the last rank has the remaining rows."""
    return LAYERS * ((HIDDEN // 2 + (rank == 0)) * (WIDTH + 1) + WIDTH // 2 * (HIDDEN + 1)) * 4


def test_ddp_replicates_parameters_gradients_and_optimizer_state(pair):
    for (single, accumulated), *_ in pair:
        for peak, reduced, _ in (single, accumulated):
            assert (peak["parameter"], peak["optimizer"]) == (FULL, 2 * FULL)
            assert reduced["gradient"] == FULL  # the buckets are the gradients
            assert peak["communication"] == 0
        assert single[0]["gradient"] == FULL
        # Cleared gradients are new tensors beside the buckets until a synchronized backward moves them in.
        assert accumulated[0]["gradient"] == 2 * FULL


def test_fsdp_gradients_stay_unsharded_when_synchronized_once(pair):
    for rank, (_, (unsharded, resharded), *_) in enumerate(pair):
        for (peak, reduced, _), parameters in ((unsharded, SHARD * (1 + RANKS)), (resharded, SHARD + PADDED)):
            assert peak["parameter"] == parameters
            assert peak["gradient"] == FULL  # unsharded until the last micro-batch
            assert reduced["gradient"] == SHARD
            assert peak["optimizer"] == 2 * local_shard(rank)


def test_fsdp_gradients_are_sharded_when_synchronized_every_micro_step(pair):
    for rank, (_, _, (unsharded, resharded), single, _) in enumerate(pair):
        for (peak, reduced, _), parameters in ((unsharded, SHARD * (1 + RANKS)), (resharded, SHARD + PADDED)):
            assert peak["parameter"] == parameters
            assert peak["gradient"] == SHARD + UNIT  # the shards of the first micro-batch and one unit's in flight
            assert reduced["gradient"] == SHARD
            assert peak["optimizer"] == 2 * local_shard(rank)
        # With one micro-batch the unit in flight has no gradient shard yet.
        assert single[0]["gradient"] == SHARD - PADDED // RANKS + UNIT
        # Forward: the flat buffers of two unsharded units. Backward, resharded: one, and a unit in reduce-scatter.
        # Gloo's own thread may still hold the buffers of one reduce-scatter when the next collective starts.
        held = (0, PADDED // RANKS, PADDED, PADDED + PADDED // RANKS)
        assert unsharded[0]["communication"] - 2 * PADDED in held
        assert resharded[0]["communication"] - 2 * PADDED - PADDED // RANKS in held


def test_dtensor_counts_as_its_local_shard(pair):
    for *_, (peak, reduced, total) in pair:
        half = WIDTH * WIDTH * 4  # two matrices, half of each here
        assert (peak["parameter"], peak["gradient"], peak["optimizer"]) == (half, half, 2 * half)
        assert reduced["gradient"] == half
        assert total < 8 * half
