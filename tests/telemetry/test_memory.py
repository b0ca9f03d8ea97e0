"""Live bytes are counted by class to the byte, and the ledger leaves nothing behind."""

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

from meshwright.telemetry.comm_counter import CommCounter
from meshwright.telemetry.memory_tracker import KINDS, MemoryTracker
from meshwright.testing import run_ranks
from meshwright.torch_private import fsdp_tensors

WIDTH, HIDDEN, LAYERS, RANKS = 8, 9, 3, 2


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(LAYERS)]
    )


UNIT = (WIDTH * HIDDEN * 2 + HIDDEN + WIDTH) * 4
"""one block's parameters"""
PADDED = UNIT + (WIDTH + 1) * 4
"""and with a row more for each parameter whose rows two ranks cannot share evenly"""
WHOLE, SHARD = LAYERS * UNIT, LAYERS * PADDED // RANKS


def test_a_gradient_that_was_written_by_hand_is_known_at_the_next_phase():
    model = nn.Linear(WIDTH, HIDDEN)
    ledger = MemoryTracker(model)
    with ledger:
        ledger.phase = "backward"
        model.weight.grad = torch.ones(HIDDEN, WIDTH)
        ledger.phase = "sync"
        assert ledger.current_bytes["gradient"] == HIDDEN * WIDTH * 4


def state_of(optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]


def train(model, optimizer, ledger, synchronised=lambda last: nullcontext(), micro=2) -> dict[str, int]:
    """A step; gives the bytes as they are between backward and update."""
    for index in range(micro):
        with synchronised(index == micro - 1):
            ledger.phase = "forward"
            loss = model(torch.ones(4, WIDTH)).square().sum()
            ledger.phase = "backward"
            loss.backward()
            del loss
    ledger.phase = "update"
    reduced = ledger.current_bytes
    optimizer.step()
    optimizer.zero_grad()
    return reduced


def measured(model, synchronised=lambda last: nullcontext(), micro=2, classify=lambda: (), gradients=lambda: ()):
    """Peaks, and bytes before the update, of the third step; a traffic ledger is open too."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(3):
        ledger = MemoryTracker(model, state_of(optimizer), classify)
        ledger.assign_class("gradient", gradients())
        with ledger, CommCounter({}):
            reduced = train(model, optimizer, ledger, synchronised, micro)
        assert ledger.peak_total >= max(ledger.peak.values())
        assert (
            ledger.current_bytes["activation"] == 0
        )  # of the last collective a Gloo worker may hold buffers a moment longer
    return ledger.peak, reduced, ledger.peak_total


def test_a_plain_model_is_counted_to_the_byte():
    model = nn.Linear(16, 4, bias=False)
    model.register_buffer("scale", torch.ones(10))
    with MemoryTracker(model) as ledger:
        x = torch.ones(8, 16)
        hidden = torch.relu(model(x))
        assert ledger.current_bytes == dict.fromkeys(KINDS, 0) | {
            "parameter": 256,
            "buffer": 40,
            "activation": 512 + 128,
        }
        ledger.phase = "backward"
        hidden.sum().backward()
        del hidden, x
        assert ledger.current_bytes == dict.fromkeys(KINDS, 0) | {"parameter": 256, "buffer": 40, "gradient": 256}
        model.weight.grad = None
        assert ledger.total == 296
    assert ledger.peak["activation"] == 512 + 128 + 128  # the product lives until relu is done
    assert (ledger.peak["gradient"], ledger.peak["parameter"]) == (256, 256)


def test_views_are_counted_once_and_resized_storages_as_they_are():
    with MemoryTracker(nn.Module()) as ledger:
        whole = torch.zeros(100)
        parts = [whole[:50], whole.view(10, 10).t(), whole.detach()]
        assert ledger.total == 400
        whole.untyped_storage().resize_(0)
        assert ledger.total == 0
        whole.untyped_storage().resize_(800)
        assert ledger.current_bytes["activation"] == 800
        ledger.assign_class("optimizer", parts)
        assert (ledger.current_bytes["activation"], ledger.current_bytes["optimizer"]) == (0, 800)
        del whole, parts
        assert ledger.total == 0


def test_numbers_stay_and_nothing_else_does():
    def gradients(watched: bool) -> list[torch.Tensor]:
        model = blocks()
        with MemoryTracker(model) if watched else nullcontext(), CommCounter({}) if watched else nullcontext():
            model(torch.ones(4, WIDTH)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, gradients(True), gradients(False)))
    before = torch.UntypedStorage.resize_
    model, state = blocks(), torch.ones(5)
    ledger = MemoryTracker(model, [state])
    with suppress(KeyError), ledger:
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
    assert ledger.peak["gradient"] == WHOLE


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
    def synchronised(last):
        model.set_requires_gradient_sync(last or each)
        yield

    return measured(model, synchronised, micro, lambda: fsdp_tensors(model))


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
    """Optimizer state has no padding: the last rank has what rows are left."""
    return LAYERS * ((HIDDEN // 2 + (rank == 0)) * (WIDTH + 1) + WIDTH // 2 * (HIDDEN + 1)) * 4


def test_ddp_holds_everything_whole(pair):
    for (single, accumulated), *_ in pair:
        for peak, reduced, _ in (single, accumulated):
            assert (peak["parameter"], peak["optimizer"]) == (WHOLE, 2 * WHOLE)
            assert reduced["gradient"] == WHOLE  # the buckets are the gradients
            assert peak["communication"] == 0
        assert single[0]["gradient"] == WHOLE
        # Cleared gradients are new tensors beside the buckets until a synchronised backward moves them in.
        assert accumulated[0]["gradient"] == 2 * WHOLE


def test_fsdp_kept_gathered_and_synchronised_once(pair):
    for rank, (_, (kept, resharded), *_) in enumerate(pair):
        for (peak, reduced, _), parameters in ((kept, SHARD * (1 + RANKS)), (resharded, SHARD + PADDED)):
            assert peak["parameter"] == parameters
            assert peak["gradient"] == WHOLE  # unsharded until the last micro-batch
            assert reduced["gradient"] == SHARD
            assert peak["optimizer"] == 2 * local_shard(rank)


def test_fsdp_synchronised_every_time(pair):
    for rank, (_, _, (kept, resharded), single, _) in enumerate(pair):
        for (peak, reduced, _), parameters in ((kept, SHARD * (1 + RANKS)), (resharded, SHARD + PADDED)):
            assert peak["parameter"] == parameters
            assert peak["gradient"] == SHARD + UNIT  # the shards of the first micro-batch and one unit's in flight
            assert reduced["gradient"] == SHARD
            assert peak["optimizer"] == 2 * local_shard(rank)
        # With one micro-batch the unit in flight has no shard yet.
        assert single[0]["gradient"] == SHARD - PADDED // RANKS + UNIT
        # Forward: two gathered units' flat buffers. Backward, resharded: one, and a unit being scattered.
        assert kept[0]["communication"] == 2 * PADDED
        assert resharded[0]["communication"] == 2 * PADDED + PADDED // RANKS


def test_a_dtensor_counts_as_its_local_shard(pair):
    for *_, (peak, reduced, total) in pair:
        half = WIDTH * WIDTH * 4  # two matrices, half of each here
        assert (peak["parameter"], peak["gradient"], peak["optimizer"]) == (half, half, 2 * half)
        assert reduced["gradient"] == half
        assert total < 8 * half
