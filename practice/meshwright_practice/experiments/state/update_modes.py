"""Three ways to keep replicas equal: summing gradients, averaging parameters, and broadcasting parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.config import RunConfig
from meshwright.core.data.file_sources import open_sources
from meshwright.core.parallel.world import World
from meshwright.prover.oracle.training import train
from meshwright.testing import run_ranks
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.counted_training import RankTraining, small_config
from meshwright_practice.pictures import Bars

Numbers = dict[str, Tensor]
MODES = ("gradients", "parameters", "broadcast")
RULES = {"adamw": ("--optimizer.kind=adamw",), "sgd": ("--optimizer.kind=sgd", "--optimizer.momentum=0")}


class LocalTraining(RankTraining):
    """A rank that trains alone, as its own world, on the samples that it has as a data-parallel rank."""

    def __init__(self, world: World, config: RunConfig, shared: RankTraining) -> None:
        super().__init__(World(device=world.device), config)
        self.batches = shared.open_loader(world.rank).steps(0, config.steps)


def train_in_mode(world: World, config: RunConfig, alone: RunConfig, mode: str, steps: int) -> tuple[Numbers, Numbers]:
    """The parameters and the first moments of this rank after some steps."""
    shared = RankTraining(world, config)
    training = shared if mode == "gradients" else LocalTraining(world, alone, shared)
    for _ in range(steps):
        training.run()
        if mode != "gradients":
            synchronize(training, mode, world.size)
    moments = {name: shard.local.clone() for name, shard in training.optimizer.moments().items()}
    return {name: p.detach().clone() for name, p in training.model.parameters().items()}, moments


@torch.no_grad()
def synchronize(training: RankTraining, mode: str, ranks: int) -> None:
    """Makes the parameters of all ranks equal after a local update."""
    for parameter in training.model.parameters().values():
        if mode == "broadcast":
            dist.broadcast(parameter, src=0)
        else:
            dist.all_reduce(parameter)
            parameter.div_(ranks)


def train_modes(world: World, configs: list[tuple[RunConfig, RunConfig]], steps: int) -> list[tuple[Numbers, Numbers]]:
    return [
        train_in_mode(world, config, alone, mode, steps) for config, alone in configs for mode in MODES
    ]  # fmt: skip


def reference_run(config: RunConfig, steps: int) -> tuple[Numbers, Numbers]:
    """(initial parameters, parameters after the steps) of one process with the whole batch, by definition."""
    [source] = open_sources(config.data, config.model.vocab, None)

    def read(sample: int) -> tuple[Any, Any]:
        tokens, labels = source[sample]
        return tokens, labels

    trace = train(config, read, [len(source)], steps=range(steps))
    return trace.initial, trace.steps[-1].parameters


def distance(left: Numbers, right: Numbers) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in right if name in left)


def compare_modes(knobs: Knobs) -> Observation:
    """Trains some steps in each mode with AdamW and with plain SGD. `error_*` is the largest difference from one
    process with the whole batch, relative to how far that process has moved; `spread_*` is that between ranks.
    """
    ranks, steps = int(knobs["ranks"]), int(knobs["steps"])
    pairs = []
    for options in RULES.values():
        more = [*options, "--optimizer.clip=0", "--optimizer.weight_decay=0", "--model.layers=2", "--batch.micro=2"]
        pairs.append(
            (small_config(ranks, *more, f"--batch.global={2 * ranks}"), small_config(1, *more, "--batch.global=2"))
        )
    by_rank = run_ranks(train_modes, ranks, pairs, steps)
    values: dict[str, float] = {"ranks": ranks, "steps": steps}
    cases = [(rule, mode) for rule in RULES for mode in MODES]
    references = {rule: reference_run(config, steps) for rule, (config, _) in zip(RULES, pairs, strict=True)}
    for index, (rule, mode) in enumerate(cases):
        initial, expected = references[rule]
        results = [of_rank[index] for of_rank in by_rank]
        values[f"error_{mode}_{rule}"] = distance(results[0][0], expected) / distance(initial, expected)
        values[f"spread_{mode}_{rule}"] = max(distance(other, results[0][0]) for other, _ in results)
        values[f"moment_spread_{mode}_{rule}"] = max(
            (distance(other, results[0][1]) for _, other in results if other), default=0.0
        )
    parts: dict[str, tuple[float, ...]] = {
        rule: tuple(values[f"error_{mode}_{rule}"] for mode in MODES) for rule in RULES
    }
    title = "difference from one process with the whole batch"
    picture = Bars(title, "distance that the process moved", MODES, parts)
    note = "Replicas are equal after every step in all modes; with AdamW, only the sum of gradients gives the update."
    return Observation(values, picture, (note,))
