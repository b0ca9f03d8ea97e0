"""Every collective is counted once, on its axis, with its bytes, whether DDP, FSDP or DTensor issues it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from meshwright.base.topology.collectives import wire_bytes
from meshwright.core.telemetry.comm_counter import CollectiveTotal, CommCounter
from meshwright.core.telemetry.memory_tracker import MemoryTracker
from meshwright.testing import run_ranks

WIDTH, HIDDEN, LAYERS = 8, 10, 3
BATCH, TOKENS = 2, 4
ACTIVATION = BATCH * TOKENS * WIDTH * 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(LAYERS)])


def bytes_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def padded(module: nn.Module, ranks: int) -> int:
    """FSDP shards rows; each parameter is padded to a multiple of the ranks."""
    return sum(-(-p.shape[0] // ranks) * ranks * p[0].numel() * 4 for p in module.parameters())


def apply_tensor_parallelism(model: nn.Module, mesh) -> nn.Module:
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model:
        parallelize_module(block, mesh, plan)
    return model


def counted(axes, step) -> list[CollectiveTotal]:
    """Returns the rows of a step, which are equal with and without a memory tracker."""
    with CommCounter(axes) as alone:
        step()
    with MemoryTracker(nn.Module()) as memory, CommCounter(axes) as above:
        memory.phase = "backward"
        step()
    with CommCounter(axes) as below, MemoryTracker(nn.Module()):
        step()
    assert alone.rows() == above.rows() == below.rows()
    return alone.rows()


def row(axis: str, collective: str, calls: int, each: int, ranks: int) -> CollectiveTotal:
    return CollectiveTotal(axis, collective, calls, calls * each, calls * wire_bytes(collective, each, ranks), ranks)


def test_wire_bytes_by_the_ring_algorithm():
    assert wire_bytes("all_reduce", 4000, 4) == 6000
    assert [wire_bytes(c, 4000, 4) for c in ("all_gather", "reduce_scatter", "all_to_all")] == [3000] * 3
    assert [wire_bytes(c, 4000, 4) for c in ("broadcast", "send", "barrier")] == [4000, 4000, 0]
    assert wire_bytes("all_reduce", 10, 3) == 13  # rounded down once, not twice
    assert {wire_bytes(c, 4000, 1) for c in ("all_reduce", "all_gather", "broadcast", "send")} == {0}
    with pytest.raises(ValueError, match="unknown collective 'allreduce'"):
        wire_bytes("allreduce", 1, 2)


def plain_collectives(world):
    pair = dist.new_group([0, 1])
    single = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    axes = {dist.group.WORLD.group_name: "world", single.group_name: "alone"}
    a, b = torch.ones(4), torch.ones(8)

    def step():
        dist.all_reduce(a)
        dist.all_reduce(a, group=pair)
        dist.all_reduce(a, group=single)
        dist.all_reduce_coalesced([a, b])
        dist.all_gather([torch.empty(4), torch.empty(4)], a)
        dist.all_gather_into_tensor(torch.empty(8), a)
        dist.reduce_scatter_tensor(torch.empty(4), b)
        dist.all_to_all_single(torch.empty(8), b)
        dist.all_to_all([torch.empty(4), torch.empty(4)], [a, a])
        dist.broadcast(a, 0)
        dist.barrier()
        dist.reduce(a, 0)
        other = 1 - world.rank  # each rank sends one message and receives one at the same time
        both = [dist.P2POp(dist.isend, a, other), dist.P2POp(dist.irecv, torch.empty(4), other)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        if world.rank == 0:
            dist.send(b, 1)
        else:
            dist.recv(b, 0)

    return counted(axes, step)


def uneven_exchange(world):
    """Rank 0 sends three numbers and receives one."""
    rows, splits = ([1, 2], [1, 0]) if world.rank == 0 else ([0, 1], [2, 1])
    sent, received = torch.ones(sum(rows)), torch.empty(sum(splits))
    return counted({}, lambda: dist.all_to_all_single(received, sent, splits, rows))


def test_all_to_all_message_bytes_are_those_that_a_rank_sends():
    first, second = run_ranks(uneven_exchange, 2)
    assert [rows[0].message_bytes for rows in (first, second)] == [3 * 4, 1 * 4]


def ddp(world):
    model = nn.parallel.DistributedDataParallel(blocks(), bucket_cap_mb=0.0005, gradient_as_bucket_view=True)
    model.register_comm_hook(None, summed)

    def step():
        with model.no_sync():
            model(torch.ones(BATCH, TOKENS, WIDTH)).sum().backward()
        model(torch.ones(BATCH, TOKENS, WIDTH)).sum().backward()

    step()
    step()  # DDP has rebuilt its buckets by now
    return counted({dist.group.WORLD.group_name: "replicate"}, step)


def summed(_state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def fsdp(world, reshard: bool, sync_each: bool, micro: int = 2):
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("shard",))
    model = blocks()
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    def step():
        for index in range(micro):
            model.set_requires_gradient_sync(sync_each or index == micro - 1)
            model(torch.ones(BATCH, TOKENS, WIDTH)).sum().backward()

    return counted({mesh.get_group().group_name: "shard"}, step)


def tensor(world):
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tensor",))
    model = apply_tensor_parallelism(blocks(), mesh)

    def step():
        model(torch.ones(BATCH, TOKENS // world.size, WIDTH)).sum().backward()

    def reshard():
        rows = DTensor.from_local(torch.ones(4, WIDTH), mesh, [Shard(0)])
        rows.redistribute(mesh, [Replicate()]).to_local()

    def norm():  # the operator itself reduces the partial sum
        torch.relu(model[0].norm.weight.grad)

    axes = {mesh.get_group().group_name: "tensor"}
    return counted(axes, step), counted(axes, norm), counted(axes, reshard)


def two_ranks(world):
    """Runs many checks in one launch."""
    sharded = [fsdp(world, reshard, each) for reshard in (True, False) for each in (True, False)]
    return plain_collectives(world), ddp(world), sharded, tensor(world)


@pytest.fixture(scope="module")
def pair():
    return run_ranks(two_ranks, 2)


def test_every_collective_is_counted_on_its_axis(pair):
    common = [
        row("alone", "all_reduce", 1, 16, 1),
        row("other", "all_reduce", 1, 16, 2),
        row("world", "all_gather", 2, 32, 2),
        CollectiveTotal("world", "all_reduce", 2, 16 + 48, 16 + 48, 2),
        row("world", "all_to_all", 2, 32, 2),
        CollectiveTotal("world", "barrier", 1, 0, 0, 2),
        row("world", "broadcast", 1, 16, 2),
        row("world", "other", 1, 16, 2),
        row("world", "reduce_scatter", 1, 32, 2),
    ]
    assert pair[0][0] == [*common, CollectiveTotal("world", "send", 2, 16 + 32, 16 + 32, 2)]
    assert pair[1][0] == [*common, row("world", "send", 1, 16, 2)]
    assert common[0].wire_bytes == 0


def test_ddp_sends_the_gradient_once_per_step_in_buckets(pair):
    for _, rows, _, _ in pair:
        (all_reduce,) = rows
        assert (all_reduce.axis, all_reduce.collective) == ("replicate", "all_reduce")
        assert all_reduce.calls > 1
        assert all_reduce.message_bytes == bytes_of(blocks()) == all_reduce.wire_bytes


def test_fsdp_all_gathers_and_reduce_scatters_by_its_settings(pair):
    unit = padded(blocks()[0], 2)
    for _, _, sharded, _ in pair:
        for rows, gathers, scatters in zip(sharded, (4, 4, 2, 2), (2, 1, 2, 1), strict=True):
            assert rows == [
                row("shard", "all_gather", gathers * LAYERS, unit, 2),
                row("shard", "reduce_scatter", scatters * LAYERS, unit, 2),
            ]


def test_collectives_inside_dtensor_operators_are_counted(pair):
    """With sequence parallelism every block all-gathers and reduce-scatters once in forward and once in backward. The
    gradient of the norm's weight stays a partial sum, which the operator that reads it reduces.
    """
    for _, _, _, (rows, read, resharded) in pair:
        assert rows == [
            row("tensor", "all_gather", 2 * LAYERS, ACTIVATION, 2),
            row("tensor", "reduce_scatter", 2 * LAYERS, ACTIVATION, 2),
        ]
        assert read == [row("tensor", "all_reduce", 1, WIDTH * 4, 2)]
        assert resharded == [row("tensor", "all_gather", 1, 8 * WIDTH * 4, 2)]


def four_ranks(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    axes = {mesh.get_group(name).group_name: name for name in ("outer", "inner")}
    hybrid, both = blocks(), apply_tensor_parallelism(blocks(), mesh["inner"])
    for model, part in ((hybrid, mesh), (both, mesh["outer"])):
        for block in model:
            fully_shard(block, mesh=part)
        fully_shard(model, mesh=part, reshard_after_forward=True)
    return (
        counted(axes, lambda: hybrid(torch.ones(BATCH, TOKENS, WIDTH)).sum().backward()),
        counted(axes, lambda: both(torch.ones(BATCH, TOKENS // 2, WIDTH)).sum().backward()),
    )


def test_two_mesh_axes_are_counted_separately():
    unit = padded(blocks()[0], 2)
    # Tensor parallelism leaves half the rows of `up`, half the columns of `down`, and the full norm.
    up, down = -(-(HIDDEN // 2) // 2) * 2 * WIDTH * 4, WIDTH * HIDDEN // 2 * 4
    local = up + down + WIDTH * 4
    for hybrid, both in run_ranks(four_ranks, 4):
        assert hybrid == [
            row("inner", "all_gather", 2 * LAYERS, unit, 2),
            row("inner", "reduce_scatter", LAYERS, unit, 2),
            row("outer", "all_reduce", LAYERS, unit // 2, 2),
        ]
        assert both == [
            row("inner", "all_gather", 2 * LAYERS, ACTIVATION, 2),
            row("inner", "all_reduce", LAYERS, WIDTH * 4, 2),
            row("inner", "reduce_scatter", 2 * LAYERS, ACTIVATION, 2),
            row("outer", "all_gather", 2 * LAYERS, local, 2),
            row("outer", "reduce_scatter", LAYERS, local, 2),
        ]
