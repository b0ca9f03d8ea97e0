"""Checks the real loader and the real evaluation: which samples they read, in which order, with which content."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.base.block_sizes import BLOCK_SIZES, BlockSizes
from meshwright.base.config import Batch, BatchConfig, DataConfig, derive_batch
from meshwright.core.data.loader import Loader, MicroBatch
from meshwright.core.data.permutation import MAX_LENGTH
from meshwright.core.data.source import ConcatenatedSource, IndexableSource
from meshwright.core.parallel.world import World
from meshwright.core.trainer.evaluate import Evaluation
from meshwright.core.trainer.precision import Precision
from meshwright.prover.oracle.sampler import CYCLE
from meshwright.prover.stream.checked_stream import CheckedStream, WrongStream
from meshwright.prover.stream.order import degrees

MAX_LOADED_BATCH = 64
"""A larger global batch is replaced by one of this many samples; the positions of the stream stay the same."""
MAX_LOADED_TOKENS = 1 << 20
"""Tokens of real samples that one case of the loader reads."""
MAX_EVALUATED = 2000
"""Held-out samples whose evaluation is checked."""
SLOW_SAMPLES = 7
"""One sample in so many takes longer, so that workers finish out of order."""
HASH_MODULUS = 1009


class SampleIds:
    """A dataset whose items tell their source and their index."""

    def __init__(self, source: int, samples: int, slow: bool) -> None:
        self.source, self.samples, self.slow = source, samples, slow

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], ...]:
        if self.slow and index % SLOW_SAMPLES == 3:
            time.sleep(0.001)
        return np.array([self.source, index]), np.array([index % HASH_MODULUS])


def id_source(checked: CheckedStream, slow: bool = False) -> ConcatenatedSource:
    """Sources of the same lengths whose samples tell their source and their index."""
    lengths = enumerate(checked.sampler.lengths)
    return ConcatenatedSource([IndexableSource(SampleIds(i, n, slow), checked.sources[i].name) for i, n in lengths])


@dataclass(frozen=True)
class LoaderCase:
    """One way to load some steps."""

    first: int
    steps: int
    batch: Batch
    workers: int = 0
    worker_kind: str = "thread"
    prefetch: int = 4
    block_sizes: BlockSizes = BLOCK_SIZES

    def __str__(self) -> str:
        workers = (
            f"{self.workers} {self.worker_kind} workers, prefetch {self.prefetch}" if self.workers else "no worker"
        )
        return f"from step {self.first:,} with {workers}, blocks of {self.block_sizes.loader_positions:,} positions"

    def data(self, config: DataConfig) -> DataConfig:
        kind = cast(Any, self.worker_kind)
        options = {"workers": self.workers, "worker_kind": kind, "prefetch": self.prefetch}
        return replace(config, on_bad_sample="quarantine", **options)


def make_batch(size: int, degree: int) -> Batch:
    """A batch with gradient accumulation, if the local batch can be divided."""
    divisors = degrees(size // degree)
    return derive_batch(BatchConfig(size, divisors[len(divisors) // 2 - 1]), degree)


def check_loader_order(checked: CheckedStream) -> str:
    """Loads with every kind of worker, across the borders of blocks, epochs and cycles, and from far steps."""
    cases = list(loader_cases(checked))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores
        loaded = sum(compare_ids(checked, case, range(case.batch.replicas)) for case in cases)
    size = checked.sampler.global_batch
    many = next((degree for degree in degrees(size) if size // degree <= MAX_LOADED_BATCH), 0)
    if size > MAX_LOADED_BATCH and many:
        [far] = checked.far_steps(size, 1)
        case = LoaderCase(far, 4, make_batch(size, many), block_sizes=BlockSizes(loader_positions=2 * size // many))
        loaded += compare_ids(checked, case, sorted({0, many - 1, checked.random.randrange(many)}))
    return f"{len(cases)} resumes with 0, 1 and 3 workers read the {loaded:,} samples of the reference"


def loader_cases(checked: CheckedStream) -> Iterator[LoaderCase]:
    size = min(checked.sampler.global_batch, MAX_LOADED_BATCH)
    available = degrees(size)
    few = make_batch(size, available[len(available) // 2])
    single, most = make_batch(size, 1), make_batch(size, available[-1])
    border = checked.trained(0) if len(checked.sources) == 1 else CYCLE
    before_border = max(0, border // size - 3)
    far = [0, 0, *checked.far_steps(size, 4)][-4:]
    over_a_block = BLOCK_SIZES.loader_positions // size + 2
    three_steps = BlockSizes(loader_positions=3 * few.local)
    one_position = BlockSizes(loader_positions=1)
    yield LoaderCase(0, over_a_block, derive_batch(BatchConfig(size, None), 1))
    yield LoaderCase(far[0], 10, few, block_sizes=three_steps)
    yield LoaderCase(before_border, 8, most, block_sizes=one_position)
    yield LoaderCase(before_border, 8, single, 1, "thread", 1, three_steps)
    yield LoaderCase(far[1], 8, few, 3, "thread", 2, one_position)
    yield LoaderCase(far[2], 9, single, 3, "thread", 7, three_steps)
    yield LoaderCase(before_border, 8, single, 3, "process", 5, three_steps)
    yield LoaderCase(far[3], 4, single, 1, "process", 2, one_position)


def compare_ids(checked: CheckedStream, case: LoaderCase, ranks: Iterable[int]) -> int:
    """Compares the samples of every rank with the reference; returns their number."""
    stream, source = replace(checked.stream, global_batch=case.batch.global_), id_source(checked, case.workers > 1)
    compared = 0
    for rank in ranks:
        loader = Loader(source, stream, case.batch, rank, case.data(checked.config.data), case.block_sizes)
        for where, positions, micro_batch in loaded_micro_batches(loader, case, rank):
            found = micro_batch.tensors[0].tolist()
            for position, pair in zip(positions, found, strict=False):
                expected = checked.locate(checked.sampler.sample(position))
                if tuple(pair) != expected:
                    raise WrongStream(
                        f"{where}, position {position:,}, {case}: expected sample {expected[1]} of source "
                        f"{checked.sources[expected[0]].name}, found sample {pair[1]} of "
                        f"{checked.sources[pair[0]].name}"
                    )
            if len(found) != len(positions):
                raise WrongStream(f"{where}, {case}: expected {len(positions)} samples, found {len(found)}")
            compared += len(found)
    return compared


def loaded_micro_batches(loader: Loader, case: LoaderCase, rank: int) -> Iterator[tuple[str, range, MicroBatch]]:
    """(where, the positions, the micro-batch) of all micro-batches; raises if there are too few or too many."""
    batch, steps = case.batch, list(loader.steps(case.first, case.first + case.steps))
    if [len(step) for step in steps] != [batch.accumulation] * case.steps:
        counts = [len(step) for step in steps]
        raise WrongStream(
            f"rank {rank} of {batch.replicas}, {case}: expected {batch.accumulation} micro-batches in each of "
            f"{case.steps} steps, found {counts}"
        )
    for number, step in enumerate(steps, case.first):
        for index, micro_batch in enumerate(step):
            start = number * batch.global_ + rank * batch.local + index * batch.micro
            where = f"step {number:,}, rank {rank} of {batch.replicas}, micro-step {index}"
            yield where, range(start, start + batch.micro), micro_batch


def check_loader_tensors(checked: CheckedStream) -> str:
    """Loads real samples in this process, in threads, in processes, and as the config does."""
    data, sequence = checked.config.data, checked.config.data.sequence
    size = max(1, min(checked.sampler.global_batch, MAX_LOADED_BATCH, MAX_LOADED_TOKENS // (2 * sequence)))
    batch = make_batch(size, degrees(size)[len(degrees(size)) // 2])
    own = batch if size < checked.sampler.global_batch else checked.batch
    last = min(max(0, checked.config.steps - 2), MAX_LENGTH // size - 2)
    [far] = checked.far_steps(size, 1)
    cases = [
        LoaderCase(0, 2, own, min(data.workers, 3), data.worker_kind, data.prefetch),
        LoaderCase(last, 2, batch),
        LoaderCase(far, 2, batch, 3, "thread", 2, BlockSizes(loader_positions=1)),
        LoaderCase(far, 2, replace(batch, replicas=1, accumulation=size // batch.micro), 2, "process", 3),
    ]
    compared = sum(compare_tensors(checked, case) for case in cases)
    return f"{compared:,} samples are bitwise what the files contain, in threads and in processes"


def compare_tensors(checked: CheckedStream, case: LoaderCase) -> int:
    stream, source = replace(checked.stream, global_batch=case.batch.global_), ConcatenatedSource(checked.sources)
    compared = 0
    for rank in range(case.batch.replicas):
        loader = Loader(source, stream, case.batch, rank, case.data(checked.config.data), case.block_sizes)
        for where, positions, micro_batch in loaded_micro_batches(loader, case, rank):
            valid = 0
            for index, position in enumerate(positions):
                sample = checked.sampler.sample(position)
                if not checked.known(sample):
                    valid += int((micro_batch.tensors[1][index] >= 0).sum())
                    continue
                found = [tensor[index].numpy() for tensor in micro_batch.tensors]
                compare_sample(checked, sample, found, f"{where}, {case}")
                valid += int((checked.read(sample)[1] >= 0).sum())
                compared += 1
            if micro_batch.valid_targets != valid:
                raise WrongStream(f"{where}, {case}: expected {valid} valid targets, found {micro_batch.valid_targets}")
    return compared


def compare_sample(checked: CheckedStream, sample: int, found: list[Any], where: str) -> None:
    """Compares the arrays of a sample with what the reference reads."""
    number, index = checked.locate(sample)
    prefix = f"{where}: sample {sample} (source {checked.sources[number].name}, index {index})"
    expected = checked.read(sample)
    if [(array.dtype, array.shape) for array in found] != [(array.dtype, array.shape) for array in expected]:
        raise WrongStream(f"{prefix} has the shapes {[a.shape for a in found]}, expected {[a.shape for a in expected]}")
    for column, left, right in zip(("token", "label", "document"), expected, found, strict=False):
        if wrong := np.flatnonzero(left != right).tolist():
            raise WrongStream(
                f"{prefix}, {column} {wrong[0]}: expected {int(left[wrong[0]])}, found {int(right[wrong[0]])}"
            )


class RecordingModel:
    """Stands for a parallelized model in an evaluation: it sums the targets of the samples that it is given."""

    def __init__(self) -> None:
        self.module = nn.Module()

    def broadcast_buffers(self) -> None:
        """There is no buffer."""

    def reshard(self) -> None:
        """Nothing is sharded."""

    def shard_inputs(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tensors

    def micro_step(self, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def forward_loss(self, _inputs: Tensor, targets: Tensor) -> Tensor:
        return targets.double().sum()


def check_evaluation(checked: CheckedStream) -> str:
    limit = min(checked.config.eval.samples, MAX_EVALUATED)
    expected = checked.sampler.evaluated(limit)
    if not expected:
        return "the config holds out no sample"
    own = [(checked.batch.replicas, min(checked.batch.micro, limit))] if checked.batch.replicas <= 16 else []
    splits = [(1, 1), (1, limit), (2, 3), (3, 2), (8, 5), *own]
    for replicas, micro in splits:
        batch = Batch(replicas * micro, micro, replicas, 1)
        evaluate_on_ranks(checked, batch, limit, expected)
    return f"{len(expected):,} held-out samples, on {', '.join(str(replicas) for replicas, _ in splits)} ranks"


def evaluate_on_ranks(checked: CheckedStream, batch: Batch, limit: int, expected: list[int]) -> None:
    source, read, loss_sum, passes = id_source(checked), [], 0.0, set()
    precision = Precision(checked.config.precision, torch.device("cpu"))
    where = f"an evaluation on {batch.replicas} ranks with micro-batches of {batch.micro}"
    for rank in range(batch.replicas):
        evaluation = Evaluation(source, checked.stream.held_out_samples(limit), batch, rank)
        read += [int(sample) for ids in evaluation.micro_batches for sample in ids]
        passes.add(evaluation.passes)
        loss, count, bad, _ = evaluation.run(cast(Any, RecordingModel()), precision, World(), True, True)
        loss_sum += loss * count
        share = len(range(rank, len(expected), batch.replicas))
        if count != share or bad:
            raise WrongStream(f"{where}: rank {rank} evaluates {count} samples, expected {share} {bad}")
    if sorted(read) != sorted(expected):
        missing, extra = sorted({*expected} - {*read}), sorted({*read} - {*expected})
        raise WrongStream(
            f"{where} reads {len(read)} samples, expected {len(expected)}: it lacks {missing[:3]} and adds {extra[:3]}"
        )
    total = sum(checked.locate(sample)[1] % HASH_MODULUS for sample in expected)
    if round(loss_sum) != total or len(passes) > 1:
        raise WrongStream(
            f"{where}: the losses sum to {loss_sum:g}, expected {total}; passes per rank: {sorted(passes)}"
        )
