"""Records what the trainer's own loop does: every rank writes its local shards, and the launcher assembles them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import EllipsisType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.base.topology.layout import Layout
from meshwright.core.data.loader import MicroBatch
from meshwright.core.parallel.local_shard import LocalShard, local_shard, local_tensor
from meshwright.core.parallel.parallel_model import persistent_buffers, router_biases
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.job import TrainingObserver
from meshwright.core.trainer.loop import Training
from meshwright.core.trainer.step import StepOutcome
from meshwright.prover.trace import INPUTS, StepTrace, Trace, input_name, join_rows

Index = tuple[slice | EllipsisType, ...]


@dataclass(frozen=True)
class Region:
    """The values that one rank has of a tensor."""

    shape: tuple[int, ...]
    """The shape of the full tensor."""
    offset: tuple[int, ...]
    values: NDArray[np.generic]

    @property
    def where(self) -> Index:
        """The index of the region in the full tensor; the ellipsis makes it a view for scalars, too."""
        return (*(slice(o, o + s) for o, s in zip(self.offset, self.values.shape, strict=True)), ...)


Regions = dict[str, Region]


@dataclass
class RankStep:
    """One step as one rank saw it."""

    step: int
    seed: int
    """The seed of torch's generator in this step."""
    inputs: list[list[NDArray[np.generic]]]
    """The entries of the batch, each by micro-batch."""
    gradients: Regions
    loss_scale: float = 1.0
    loss: float = float("nan")
    grad_norm: float = float("nan")
    lr: float = float("nan")
    tokens: int = 0
    parameters: Regions = field(default_factory=dict)
    moments: Regions = field(default_factory=dict)
    buffers: dict[str, NDArray[np.generic]] = field(default_factory=dict)


@dataclass
class RankTrace:
    """A whole attempt as one rank saw it."""

    rank: int
    input_names: tuple[str, ...] = INPUTS
    """the entries of a batch"""
    initial: Regions = field(default_factory=dict)
    initial_moments: Regions = field(default_factory=dict)
    initial_buffers: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    steps: list[RankStep] = field(default_factory=list)
    evaluations: list[tuple[int, float, int]] = field(default_factory=list)


class Tracer(TrainingObserver):
    """Records a run on one rank and writes every step to `folder`, so that the steps of a failed run are known, too.
    It communicates nothing and allocates no tensor, so that it changes neither the results nor the counters of a step.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_start(self, training: Training) -> None:
        self.training = training
        names = input_names(training.job.custom)
        self.trace = RankTrace(training.world.rank, names, self._parameters(), self._moments(), self._buffers())
        trace_path(self.folder, self.trace.rank).unlink(missing_ok=True)
        self._append(self.trace)

    def on_gradient(self, step: int, batches: list[MicroBatch]) -> None:
        scale = float(self.training.precision.scale)
        gradients = {}
        for name, gradient in self.training.parallel_model.gradients().items():
            # The local shard as the optimizer reads it: a gradient that still is a partial sum must be visible.
            shard = local_shard(self.training.parameters[name]).with_local(local_tensor(gradient))
            gradients[name] = region(shard, 1.0 / scale)
        columns = zip(*(batch.tensors for batch in batches), strict=True)
        inputs = [[tensor.numpy().copy() for tensor in column] for column in columns]
        self.trace.steps.append(RankStep(step, torch.initial_seed(), inputs, gradients, scale))

    def on_step(self, outcome: StepOutcome) -> None:
        outcome.clock.wait()
        record = self.trace.steps[-1]
        record.loss, record.grad_norm, *_ = outcome.numbers.tolist()
        record.lr, record.tokens = outcome.lr, outcome.control.tokens
        record.parameters, record.moments, record.buffers = self._parameters(), self._moments(), self._buffers()
        self._append(record)

    def on_evaluation(self, step: int, loss: float, tokens: int) -> None:
        self.trace.evaluations.append((step, loss, tokens))
        self._append(self.trace.evaluations[-1])

    def _append(self, record: RankTrace | RankStep | tuple[int, float, int]) -> None:
        with trace_path(self.folder, self.trace.rank).open("ab") as file:
            pickle.dump(record, file)

    def _parameters(self) -> Regions:
        tensors = chain(self.training.parameters.items(), router_biases(self.training.module))
        return {name: region(local_shard(tensor)) for name, tensor in tensors}

    def _moments(self) -> Regions:
        return {name: region(shard) for name, shard in self.training.optimizer.moments().items()}

    def _buffers(self) -> dict[str, NDArray[np.generic]]:
        """The buffers that a checkpoint has."""
        named = persistent_buffers(self.training.module)
        return {n: (b.float() if b.dtype == torch.bfloat16 else b).detach().cpu().numpy().copy() for n, b in named}


def region(shard: LocalShard, factor: float = 1.0) -> Region:
    """A copy of a local shard in host memory."""
    local = shard.local.float() if shard.local.dtype == torch.bfloat16 else shard.local
    values = local.cpu().numpy()
    return Region(shard.shape, shard.offset, values * factor if factor != 1.0 else values.copy())


def trace_path(folder: Path, rank: int) -> Path:
    return folder / f"trace-{rank:05d}.pickle"


def read_traces(folder: Path, layout: Layout) -> list[RankTrace]:
    """The traces that the ranks of a run wrote, as far as all of them have come; the folder belongs to this process.
    Empty if a rank did not start.
    """
    paths = [trace_path(folder, rank) for rank in range(layout.ranks)]
    traces = [trace for path in paths if path.exists() and (trace := read_trace(path)) is not None]
    return common_steps(traces) if len(traces) == layout.ranks else []


def common_steps(traces: list[RankTrace]) -> list[RankTrace]:
    """The steps that every rank completed; a rank that ended in the middle of a step has no parameters of it."""
    completed = min(sum(bool(step.parameters) for step in trace.steps) for trace in traces)
    return [replace(trace, steps=trace.steps[:completed]) for trace in traces]


def read_trace(path: Path) -> RankTrace | None:
    """The records that a rank completed; None if it ended in its first record, as on a full disk."""
    with path.open("rb") as file:
        try:
            trace: RankTrace = pickle.load(file)
        except (EOFError, pickle.UnpicklingError):
            return None
        while True:
            try:
                record = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # the rank ended here
                return trace
            if isinstance(record, RankStep):
                trace.steps.append(record)
            else:
                trace.evaluations.append(record)


class Contradiction(NamedTuple):
    """Values that must be equal on all ranks that have them, and are not."""

    kind: str
    """the kind of quantity, as in `compare.discrepancy.PHASES`"""
    step: int
    """-1 before the first step"""
    text: str
    name: str = ""
    """the parameter, if there is one"""


@dataclass
class AssembledTrace:
    """The trace of a run, assembled from those of its ranks, and where the ranks contradict each other."""

    trace: Trace
    moments: list[dict[str, Tensor]]
    """The optimizer state before the first step, and after every step."""
    seeds: list[dict[int, set[int]]]
    """For every step, the seeds that the ranks of each data coordinate used."""
    contradictions: list[Contradiction]
    """In the order of the steps."""
    owners: dict[str, list[tuple[Index, int]]]
    """For every tensor, its regions and the rank that has each."""
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    """Those of the first rank that has each, before the first step, and after every step."""
    conflicts: dict[tuple[str, int, str], dict[int, Region]] = field(default_factory=dict)
    """(kind, step, parameter) of a contradiction -> the values of every rank"""

    def owner(self, name: str, element: tuple[int, ...]) -> int:
        """The first rank that has an element of a tensor; 0 if there is none."""
        name = name.split("/")[0]
        for where, rank in self.owners.get(name, ()):
            if all(isinstance(s, slice) and s.start <= i < s.stop for s, i in zip(where, element, strict=False)):
                return rank
        return 0


def assemble(ranks: list[RankTrace], layout: Layout) -> AssembledTrace:
    """Combines the local shards of all ranks into full tensors."""
    contradictions: list[Contradiction] = []
    conflicts: dict[tuple[str, int, str], dict[int, Region]] = {}

    def combine(kind: str, step: int, regions: Mapping[int, Regions]) -> dict[str, Tensor]:
        known = len(contradictions)
        combined = combine_regions(kind, step, regions, contradictions)
        for name in {contradiction.name for contradiction in contradictions[known:]}:
            conflicts[kind, step, name] = {rank: parts[name] for rank, parts in regions.items() if name in parts}
        return combined

    initial = combine("initial", -1, {trace.rank: trace.initial for trace in ranks})
    moments = [combine("initial", -1, {trace.rank: trace.initial_moments for trace in ranks})]
    steps, seeds = [], []
    for index, first in enumerate(ranks[0].steps):
        records = {trace.rank: trace.steps[index] for trace in ranks}
        for rank, record in records.items():
            reported = [
                ("loss", "loss", record.loss, first.loss),
                ("norm", "gradient norm", record.grad_norm, first.grad_norm),
                ("lr", "learning rate", record.lr, first.lr),
                ("tokens", "token count", record.tokens, first.tokens),
            ]
            contradictions += [
                Contradiction(
                    kind,
                    first.step,
                    f"rank {rank} step {first.step}: the {name} is {value!r}, on rank 0 it is {right!r}",
                )
                for kind, name, value, right in reported
                if value != right and not (value != value and right != right)
            ]
        inputs = combine_inputs(records, layout, ranks[0].input_names, contradictions)
        of_coordinate: dict[int, set[int]] = {}
        for rank, record in records.items():
            of_coordinate.setdefault(layout.data_coordinate(rank), set()).add(record.seed)
        seeds.append(of_coordinate)
        moments.append(combine("moments", first.step, {r: step.moments for r, step in records.items()}))
        steps.append(
            StepTrace(
                first.step,
                first.loss,
                first.grad_norm,
                first.lr,
                first.tokens,
                inputs,
                combine("gradient", first.step, {r: record.gradients for r, record in records.items()}),
                combine("update", first.step, {r: record.parameters for r, record in records.items()}),
                moments[-1],
                first.loss_scale,
            )
        )
    contradictions += [
        Contradiction(
            "evaluation",
            ranks[0].steps[-1].step,
            f"rank {of_rank.rank}: the evaluations are {of_rank.evaluations}, on rank 0 they are "
            f"{ranks[0].evaluations}",
        )
        for of_rank in ranks[1:]
        if of_rank.evaluations != ranks[0].evaluations
    ]
    owners: dict[str, list[tuple[Index, int]]] = {}
    for of_rank in ranks:
        for name, part in of_rank.initial.items():
            owners.setdefault(name, []).append((part.where, of_rank.rank))
    trace = Trace(initial, steps, ranks[0].evaluations, moments[-1])
    buffers = [first_of_each([of_rank.initial_buffers for of_rank in ranks])]
    buffers += [first_of_each([step.buffers for step in same]) for same in zip(*(r.steps for r in ranks), strict=True)]
    return AssembledTrace(trace, moments, seeds, contradictions, owners, buffers, conflicts)


def first_of_each(ranks: list[dict[str, NDArray[np.generic]]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for of_rank in reversed(ranks) for name, values in of_rank.items()}


def combine_regions(
    kind: str, step: int, ranks: Mapping[int, Regions], contradictions: list[Contradiction]
) -> dict[str, Tensor]:
    """Full tensors; elements that no rank has are NaN."""
    combined: dict[str, NDArray[np.generic]] = {}
    filled: dict[str, NDArray[np.bool_]] = {}
    for rank, regions in ranks.items():
        for name, part in regions.items():
            if name not in combined:
                combined[name] = np.full(part.shape, np.nan, part.values.dtype)
                filled[name] = np.zeros(part.shape, bool)
            known, present = combined[name][part.where], filled[name][part.where]
            if present.any() and not np.array_equal(known[present], part.values[present], equal_nan=True):
                when = f"rank {rank} step {step}" if step >= 0 else f"rank {rank}"
                what = "gradient" if kind == "gradient" else "value"
                text = f"{when}: the {what} of {name} differs from that of another rank with the shard"
                contradictions.append(Contradiction(kind, step, text, name))
                continue
            combined[name][part.where], filled[name][part.where] = part.values, True
    return {name: torch.from_numpy(values) for name, values in combined.items()}


def combine_inputs(
    records: Mapping[int, RankStep], layout: Layout, names: tuple[str, ...], contradictions: list[Contradiction]
) -> dict[str, Tensor]:
    """The inputs of the global batch in global order: those of one rank per data coordinate."""
    by_coordinate: dict[int, list[list[NDArray[np.generic]]]] = {}
    for rank, record in records.items():
        known = by_coordinate.setdefault(layout.data_coordinate(rank), record.inputs)
        pairs = zip(chain(*known), chain(*record.inputs), strict=False)
        if list(map(len, known)) != list(map(len, record.inputs)) or not all(np.array_equal(*pair) for pair in pairs):
            text = f"rank {rank} step {record.step}: reads other samples than the ranks of its slice"
            contradictions.append(Contradiction("inputs", record.step, text))
    columns = zip(*(by_coordinate[c] for c in sorted(by_coordinate)), strict=True)
    return {
        name: join_rows([torch.from_numpy(part) for part in chain(*column)])
        for name, column in zip(names, columns, strict=False)
    }


def input_names(custom: CustomModel | None) -> tuple[str, ...]:
    """The names of the entries of a batch."""
    if custom is None:
        return INPUTS
    names = custom.batch.names
    return tuple(input_name(i, len(names)) for i in range(len(names))) if custom.batch.is_tuple else names
