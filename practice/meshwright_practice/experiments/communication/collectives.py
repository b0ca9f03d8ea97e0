"""Bytes, rounds and results of collectives: our own ring, tree and server beside those of the backend."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.topology.collectives import wire_fraction
from meshwright.core.parallel.world import World
from meshwright.core.telemetry.comm_counter import CommCounter
from meshwright.testing import run_ranks
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.communication.own_collectives import (
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    server_all_reduce,
    tree_all_reduce,
)
from meshwright_practice.experiments.communication.socket_bytes import received_bytes
from meshwright_practice.experiments.counted_training import RankTraining, small_config
from meshwright_practice.pictures import Bars, HeatMap

Collective = Callable[[Tensor], tuple[Tensor, int]]
OWN: dict[str, Collective] = {
    "ring_all_reduce": ring_all_reduce,
    "ring_reduce_scatter": ring_reduce_scatter,
    "ring_all_gather": lambda vector: ring_all_gather(vector.chunk(dist.get_world_size())[dist.get_rank()]),
    "tree_all_reduce": tree_all_reduce,
    "server_all_reduce": server_all_reduce,
}


GLOO_ALGORITHMS = {
    "gloo_all_reduce": "all_reduce",
    "gloo_reduce_scatter": "all_reduce",
    "gloo_all_gather": "all_gather",
}
"""What Gloo's collectives are built from, in torch 2.11 to 2.13."""


@dataclass(frozen=True)
class Traffic:
    """One collective on one rank. Bytes are multiples of those of the vector."""

    sent: float
    """what the communication counter saw this rank send"""
    received: float
    """what the sockets of this rank received"""
    rounds: int
    output: float
    """bytes of the result"""
    error: float
    """the largest difference from the exact result"""


def backend_collectives(ranks: int) -> dict[str, Collective]:
    """The same collectives of the backend, which is Gloo on CPU."""

    def all_reduce(vector: Tensor) -> tuple[Tensor, int]:
        total = vector.clone()
        dist.all_reduce(total)
        return total, 0

    def reduce_scatter(vector: Tensor) -> tuple[Tensor, int]:
        chunk = vector.new_empty(len(vector) // ranks)
        dist.reduce_scatter_tensor(chunk, vector.clone())
        return chunk, 0

    def all_gather(vector: Tensor) -> tuple[Tensor, int]:
        gathered = torch.empty_like(vector)
        dist.all_gather_into_tensor(gathered, vector.chunk(ranks)[dist.get_rank()].contiguous())
        return gathered, 0

    return {"gloo_all_reduce": all_reduce, "gloo_reduce_scatter": reduce_scatter, "gloo_all_gather": all_gather}


def measure_collectives(world: World, kibibytes: int) -> dict[str, Traffic]:
    # torch 2.13 deprecates names of collectives whose successors do not exist in 2.11.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    ranks = world.size
    length = kibibytes * 1024 // 8 // ranks * ranks
    vectors = [
        torch.randn(length, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(ranks)
    ]
    total, mine = torch.stack(vectors).sum(dim=0), vectors[world.rank]
    gathered = torch.cat([vector.chunk(ranks)[rank] for rank, vector in enumerate(vectors)])
    chosen = {n: c for n, c in OWN.items() if n != "tree_all_reduce" or ranks & (ranks - 1) == 0}
    results = {}
    for name, collective in (chosen | backend_collectives(ranks)).items():
        expected = gathered if "gather" in name else total.chunk(ranks)[world.rank] if "scatter" in name else total
        results[name] = measure(collective, mine, expected)
    return results


def measure(collective: Collective, vector: Tensor, expected: Tensor) -> Traffic:
    """Runs a collective once to open its connections, and once to count it."""
    collective(vector)
    dist.barrier()
    before = received_bytes()
    dist.barrier()  # no rank begins before every rank has read its counters
    with CommCounter({}) as counter:
        result, rounds = collective(vector)
    received = received_bytes() - before
    dist.barrier()
    sent = sum(row.message_bytes for row in counter.rows() if row.collective == "send")
    error = float((result - expected).abs().max())
    return Traffic(sent / vector.nbytes, received / vector.nbytes, rounds, result.nbytes / vector.nbytes, error)


def with_known_bytes(name: str, row: Traffic, ranks: int) -> Traffic:
    """The bytes of the algorithm, where the sockets count nothing."""
    if name not in GLOO_ALGORITHMS:
        return replace(row, received=row.sent)
    numerator, denominator = wire_fraction(GLOO_ALGORITHMS[name], ranks)
    return replace(row, received=numerator / denominator)


def volumes(knobs: Knobs) -> Observation:
    """Every collective on the same vector of D bytes; values are multiples of D."""
    ranks = int(knobs["ranks"])
    by_rank: list[dict[str, Traffic]] = run_ranks(measure_collectives, ranks, int(knobs["kibibytes"]))
    counted = any(row.received for of_rank in by_rank for row in of_rank.values())
    if not counted:
        by_rank = [{name: with_known_bytes(name, row, ranks) for name, row in rows.items()} for rows in by_rank]
    values: dict[str, float] = {"ranks": ranks, "ring_formula": 2 * (ranks - 1) / ranks}
    for name in by_rank[0]:
        rows = [of_rank[name] for of_rank in by_rank]
        values[f"{name}_sent"] = max(row.sent for row in rows)
        values[f"{name}_received"] = max(row.received for row in rows)
        values[f"{name}_received_total"] = sum(row.received for row in rows)
        values[f"{name}_rounds"] = rows[0].rounds
        values[f"{name}_output"] = rows[0].output
        values[f"{name}_error"] = max(row.error for row in rows)
    values["ring_scatter_and_gather_sent"] = values["ring_reduce_scatter_sent"] + values["ring_all_gather_sent"]
    values["largest_error"] = max(value for name, value in values.items() if name.endswith("_error"))
    shown = [name for name in by_rank[0] if name not in ("tree_all_reduce", "server_all_reduce")]
    if knobs.get("picture") == "algorithms":
        shown = [name for name in by_rank[0] if name.endswith("all_reduce")]
    parts: dict[str, tuple[float, ...]] = {
        "received by the busiest rank": tuple(values[f"{name}_received"] for name in shown)
    }
    labels = tuple(name.replace("_", " ") for name in shown)
    note = (
        "Received bytes are those of the sockets of each rank. Gloo builds its reduce-scatter from an all-reduce, and "
        "moves as much; a ring sends half of that."
    )
    if not counted:
        note = (
            "This system does not count the bytes of single connections. Received bytes are not measured, but "
            "those of the algorithms, and Gloo builds its reduce-scatter from an all-reduce."
        )
    return Observation(values, Bars(f"bytes on {ranks} ranks", "D", labels, parts), (note,))


def placements(knobs: Knobs) -> Observation:
    """What every rank has before and after each collective, for one number per chunk."""
    ranks = int(knobs["ranks"])
    by_rank = run_ranks(show_placements, ranks)
    values: dict[str, float] = {"ranks": ranks, "sum_of_first_chunk": sum(10.0 * r for r in range(1, ranks + 1))}
    rows, table = [], []
    width = ranks
    for name in by_rank[0]:
        for rank, of_rank in enumerate(by_rank):
            rows.append(f"{name}, rank {rank}")
            numbers = of_rank[name]
            table.append(tuple(numbers) + (0.0,) * (width - len(numbers)))
        values[f"{name}_numbers"] = len(by_rank[0][name])
        values[f"{name}_equal_on_all_ranks"] = int(all(of_rank[name] == by_rank[0][name] for of_rank in by_rank))
        values[f"{name}_first"] = by_rank[0][name][0]
    columns = tuple(f"chunk {index}" for index in range(width))
    picture = HeatMap("numbers on every rank; 0 where it has none", "value", tuple(rows), columns, tuple(table))
    return Observation(values, picture, ("Rank r starts with the numbers 10 (r + 1), 10 (r + 1) + 1, and so on.",))


def show_placements(world: World) -> dict[str, list[float]]:
    ranks = world.size
    start = torch.arange(ranks, dtype=torch.float64) + 10 * (world.rank + 1)
    own = start.chunk(ranks)[world.rank]
    return {
        "start": start.tolist(),
        "all_reduce": ring_all_reduce(start)[0].tolist(),
        "reduce_scatter": ring_reduce_scatter(start)[0].tolist(),
        "all_gather": ring_all_gather(own)[0].tolist(),
    }


def transports(knobs: Knobs) -> Observation:
    """One update of the trainer with gradients that are summed by the backend, by our ring, and by our tree."""
    ranks = int(knobs["ranks"])
    by_rank = run_ranks(update_over_transports, ranks, ranks)
    [first, *_] = by_rank
    values: dict[str, float] = {
        "gradient_difference": max(row["gradient_difference"] for row in by_rank),
        "update_difference": max(row["update_difference"] for row in by_rank),
        "ring_sent": max(row["ring_sent"] for row in by_rank),
        "tree_sent": max(row["tree_sent"] for row in by_rank),
        "ring_rounds": first["ring_rounds"],
        "tree_rounds": first["tree_rounds"],
        "nccl_available": int(dist.is_nccl_available()),
        "local_update_difference": max(row["local_update_difference"] for row in by_rank),
    }
    parts: dict[str, tuple[float, ...]] = {"sent by the busiest rank": (values["ring_sent"], values["tree_sent"])}
    picture = Bars("bytes of the gradient sum", "D", ("ring", "tree"), parts)
    note = "The backend, the ring and the tree differ in bytes and rounds, and the update is the same."
    return Observation(values, picture, (note,))


def update_over_transports(world: World, ranks: int) -> dict[str, float]:
    """The trainer's own update over the backend, and updates whose local gradients our collectives sum."""
    options = ["--optimizer.clip=0", "--batch.micro=2"]
    shared = RankTraining(world, small_config(ranks, *options, f"--batch.global={2 * ranks}"))
    alone = RankTraining(World(device=world.device), small_config(1, *options, "--batch.global=2"))
    [batch] = next(shared.open_loader(world.rank).steps(0, 1))
    (alone.model.forward_loss(*batch.tensors) / (batch.valid_targets * ranks)).backward()
    parameters = list(alone.model.parameters().values())
    local = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    padded = torch.nn.functional.pad(local, (0, -len(local) % ranks))
    shared.run()
    expected = torch.cat([p.detach().flatten() for p in shared.model.parameters().values()])
    results: dict[str, float] = {"gradient_difference": 0.0, "update_difference": 0.0}
    sums = {}
    for name, collective in (("ring", ring_all_reduce), ("tree", tree_all_reduce)):
        with CommCounter({}) as counter:
            total, rounds = collective(padded)
        sums[name] = total[: len(local)]
        results[f"{name}_rounds"] = rounds
        results[f"{name}_sent"] = sum(row.message_bytes for row in counter.rows()) / padded.nbytes
    results["gradient_difference"] = float((sums["ring"] - sums["tree"]).abs().max())
    initial = [p.detach().clone() for p in parameters]
    for name, gradient in (("local_update_difference", local * ranks), ("update_difference", sums["ring"])):
        training = RankTraining(World(device=world.device), small_config(1, *options, "--batch.global=2"))
        own = list(training.model.parameters().values())
        assert all(torch.equal(p, start) for p, start in zip(own, initial, strict=True))
        for p, part in zip(own, gradient.split([p.numel() for p in own]), strict=True):
            p.grad = part.view_as(p).clone()
        one = torch.ones((), dtype=torch.float64)
        norm = training.optimizer.gradient_norm()
        training.optimizer.update(training.config.optimizer.lr, norm, one, torch.tensor(True))
        results[name] = float((torch.cat([p.detach().flatten() for p in own]) - expected).abs().max())
    return results
