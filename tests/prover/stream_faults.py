"""Seeded faults of the sample order, the loader, the sources, the tokenization cache and evaluation."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np
import torch

from meshwright.core.data import file_sources, sample_lookup, tokenization
from meshwright.core.data import stream as stream_module
from meshwright.core.data.loader import Loader
from meshwright.core.data.permutation import Permutation
from meshwright.core.data.prepare import cached_tokens
from meshwright.core.data.source import ConcatenatedSource, SyntheticSource
from meshwright.core.data.stream import CYCLE, SampleOccurrence, Stream
from meshwright.core.data.token_files import TokenSource
from meshwright.core.trainer.evaluate import Evaluation
from tests.kit.small_run import load_cpu_config

SMALL = ["--data.kind=synthetic", "--data.samples=700", "--data.sequence=16"]
LARGE = ["--data.kind=synthetic", "--data.samples=1_000_000_000_000", "--data.sequence=16"]
MIXTURE = [
    '--data.mixture=[{kind="synthetic", samples=300, weight=3}, {kind="synthetic", samples=90}]',
    "--data.sequence=16",
]
FILES = ["--data.kind=text", "--data.path=.", "--data.sequence=16"]
JSONL = ["--data.kind=jsonl", "--data.path=records.jsonl", "--data.sequence=16"]


def changes_ids(wrong):
    """A fault that changes the result of `Stream.sample_ids`: wrong(right, stream, positions)."""
    right = Stream.sample_ids
    return Stream, "sample_ids", lambda self, positions: wrong(functools.partial(right, self), self, positions)


def epochs_modulo(period):
    right = Stream._epoch_permutation
    return Stream, "_epoch_permutation", lambda self, index, epoch: right(self, index, epoch % period)


def last_training_sample_is_never_read():
    right = Stream._shuffle

    def shuffle(self, index, ordinals):
        ids = right(self, index, ordinals)
        return np.where(ids == self.sources[index].trained - 1, np.uint64(0), ids)

    return Stream, "_shuffle", shuffle


def evaluation_splits_with_another_seed():
    right = Stream.held_out_samples
    return (
        Stream,
        "held_out_samples",
        lambda self, limit: right(Stream(self.seed + 1, self.global_batch, self.sources), limit),
    )


def worker_processes_reseed():
    right = SyntheticSource.__getitem__

    def read(self, index):
        worker = torch.utils.data.get_worker_info()
        return right(self, index if worker is None else index + worker.id)

    return SyntheticSource, "__getitem__", read


def threads_return_batches_as_they_complete():
    def load(self, ids):
        with ThreadPoolExecutor(self.config.workers) as pool:
            for future in as_completed([pool.submit(self.dataset.__getitem__, i) for i in ids]):
                yield future.result()

    return Loader, "_load_by_threads", load


def last_prefetched_batches_are_swapped():
    right = Loader._load_by_threads

    def load(self, ids):
        batches = list(right(self, ids))
        yield from [*batches[:-2], *batches[-2:][::-1]]

    return Loader, "_load_by_threads", load


def ordinals_of_a_mixture_are_off_after_the_first_cycle():
    right = Stream._assign

    def assign(self, positions):
        source_at, ordinals = right(self, positions)
        return source_at, ordinals + np.where(positions >= CYCLE, np.uint64(1), np.uint64(0))

    return Stream, "_assign", assign


def cycle_cache_lacks_the_seed():
    right, cache = stream_module.cycle_sources.__wrapped__, {}
    return (
        stream_module,
        "cycle_sources",
        lambda seed, quotas, cycle: cache.setdefault((quotas, cycle), right(seed, quotas, cycle)),
    )


def cycle_cache_lacks_the_quotas():
    right, cache = stream_module.cycle_sources.__wrapped__, {}
    return (
        stream_module,
        "cycle_sources",
        lambda seed, quotas, cycle: cache.setdefault((seed, cycle), right(seed, quotas, cycle)),
    )


def first_sample_of_a_source_is_read_from_its_neighbour():
    right = ConcatenatedSource.locate
    return ConcatenatedSource, "locate", lambda self, index: right(self, index - (index in self.starts[1:-1]))


def index_is_rounded_to_float32():
    right = SyntheticSource.__getitem__
    return SyntheticSource, "__getitem__", lambda self, index: right(self, int(np.float32(index)))


def labels_are_not_shifted():
    right = TokenSource.__getitem__
    return TokenSource, "__getitem__", lambda self, index: (right(self, index)[0],) * 2


def second_read_of_a_sample_differs():
    right, seen = TokenSource.__getitem__, set()

    def read(self, index):
        tokens, labels = right(self, index)
        if index in seen:
            return tokens[::-1].copy(), labels
        seen.add(index)
        return tokens, labels

    return TokenSource, "__getitem__", read


def files_are_read_in_reverse_order():
    right = file_sources.find_files
    return file_sources, "find_files", lambda path: right(path)[::-1]


def last_sample_of_a_file_is_missing():
    return TokenSource, "__len__", lambda self: (len(self.ids) - 1) // self.sequence - 1


def micro_batch_ids(change):
    """A fault of the loader's blocks: change(steps per call, first, end) -> the steps of the blocks."""

    def ids(self, first, end):
        per_call = max(1, self.block_sizes.loader_positions // self.batch.local)
        for steps in change(per_call, first, end):
            local = np.arange(self.batch.local, dtype=np.uint64) + np.uint64(self.data_rank * self.batch.local)
            positions = (np.array(steps, np.uint64)[:, None] * np.uint64(self.batch.global_) + local).ravel()
            yield from self.stream.sample_ids(positions).reshape(-1, self.batch.micro)

    return Loader, "_micro_batch_ids", ids


def blocks(per_call, first, end):
    return [list(range(start, min(start + per_call, end))) for start in range(first, end, per_call)]


def weights_are_ignored():
    return stream_module, "mixture_quotas", lambda weights: [CYCLE // len(weights)] * len(weights)


def offset_counts_training_samples_only():
    return Stream, "_offset", lambda self, index: sum(share.trained for share in self.sources[:index])


def find_ignores_the_epoch():
    right = Stream.occurrence

    def occurrence(self, sample, epoch):
        found = right(self, sample, 0)
        return found and SampleOccurrence(epoch, found.position, found.step, found.index)

    return Stream, "occurrence", occurrence


def evaluation(change):
    """A fault that changes the micro-batches of `Evaluation`."""
    right = Evaluation.__init__

    def init(self, source, stream, samples, batch, coordinate):
        right(self, source, stream, samples, batch, coordinate)
        change(self, stream, samples, batch)

    return Evaluation, "__init__", init


def drop_incomplete(self, _stream, _samples, batch):
    self.micro_batches = [ids for ids in self.micro_batches if len(ids) == batch.micro]


def evaluate_training_samples(self, stream, _samples, _batch):
    self.micro_batches = [stream.step(0)[: len(ids)] for ids in self.micro_batches]


def count_padding(self, _stream, _samples, _batch):
    self.micro_batches += [self.padding] * (self.passes - len(self.micro_batches))


def stale_tokenization_cache():
    """The cache key lacks the field, and an earlier run has cached the other field."""
    right = cached_tokens.content_digest
    digest = lambda *values: right(*values[:2], *values[3:]) if values[1] == "jsonl" else right(*values)  # noqa: E731
    config = load_cpu_config(overrides=[*JSONL, "--data.field=title"])
    original, cached_tokens.content_digest = cached_tokens.content_digest, digest
    try:
        file_sources.open_sources(config.data, config.model.vocab, None)
    finally:
        cached_tokens.content_digest = original
    return cached_tokens, "content_digest", digest


def documents_have_no_end():
    return tokenization.Encoder, "end", lambda self, ids: []


FAULTS = {
    "rank slice is shifted by one": (
        SMALL,
        lambda: (
            Stream,
            "local_samples",
            lambda self, step, rank, degree: self.sample_ids(
                np.arange(self.global_batch // degree, dtype=np.uint64)
                + np.uint64(step * self.global_batch + rank * (self.global_batch // degree) + 1)
            ),
        ),
    ),
    "slices of the last of four ranks": (
        SMALL,
        lambda: (
            Stream,
            "local_samples",
            lambda self, step, rank, degree: np.array_split(self.step(step), degree)[rank % 3 if degree == 4 else rank],
        ),
    ),
    "every epoch has the same order": (SMALL, lambda: epochs_modulo(1)),
    "epochs 64 apart have the same order": (SMALL, lambda: epochs_modulo(64)),
    "epochs 2^16 apart have the same order": (SMALL, lambda: epochs_modulo(1 << 16)),
    "permutation repeats samples": (
        SMALL,
        lambda: (Permutation, "__call__", lambda self, x: x // np.uint64(2)),
    ),
    "held-out samples are trained on": (
        SMALL,
        lambda: (Stream, "held_out_samples", lambda self, most: self.step(0)),
    ),
    "inverse permutation is off by one": (
        SMALL,
        lambda: (Permutation, "inverse", lambda self, y: (y + np.uint64(1)) % np.uint64(self.n)),
    ),
    "positions wrap at 2^32": (SMALL, lambda: changes_ids(lambda right, _, p: right(p & np.uint64(0xFFFFFFFF)))),
    "positions are rounded to float64": (
        SMALL,
        lambda: changes_ids(lambda right, _, p: right(p.astype(np.float64).astype(np.uint64))),
    ),
    "ids wrap at 2^32": (LARGE, lambda: changes_ids(lambda right, _, p: right(p).astype(np.uint32).astype(np.uint64))),
    "far positions are read in reverse": (
        MIXTURE,
        lambda: changes_ids(lambda right, _, p: right(p) if p[0] < 1 << 20 else right(p[::-1])),
    ),
    "last training sample is never read": (SMALL, last_training_sample_is_never_read),
    "evaluation splits with another seed": (SMALL, evaluation_splits_with_another_seed),
    "worker processes reseed": (SMALL, worker_processes_reseed),
    "threads return batches as they complete": (SMALL, threads_return_batches_as_they_complete),
    "last prefetched batches are swapped": (SMALL, last_prefetched_batches_are_swapped),
    "ordinals of a mixture are off": (MIXTURE, ordinals_of_a_mixture_are_off_after_the_first_cycle),
    "cycle cache lacks the seed": (MIXTURE, cycle_cache_lacks_the_seed),
    "cycle cache lacks the quotas": (MIXTURE, cycle_cache_lacks_the_quotas),
    "mixture weights are ignored": (MIXTURE, weights_are_ignored),
    "offset counts training samples only": (MIXTURE, offset_counts_training_samples_only),
    "first sample of a source is its neighbour's": (MIXTURE, first_sample_of_a_source_is_read_from_its_neighbour),
    "index is rounded to float32": (LARGE, index_is_rounded_to_float32),
    "labels are not shifted": (FILES, labels_are_not_shifted),
    "second read of a sample differs": (FILES, second_read_of_a_sample_differs),
    "files are read in reverse order": (FILES, files_are_read_in_reverse_order),
    "last sample of a file is missing": (FILES, last_sample_of_a_file_is_missing),
    "tokenization cache is stale": (JSONL, stale_tokenization_cache),
    "documents have no end": (JSONL, documents_have_no_end),
    "loader resumes at step 0": (SMALL, lambda: micro_batch_ids(lambda n, first, end: blocks(n, 0, end - first))),
    "loader aligns its blocks": (
        SMALL,
        lambda: micro_batch_ids(lambda n, first, end: blocks(n, first - first % n, end)),
    ),
    "second block of the loader repeats the first": (
        SMALL,
        lambda: micro_batch_ids(lambda n, first, end: [blocks(n, first, end)[0]] * -(-(end - first) // n)),
    ),
    "steps of the loader wrap at 2^16": (
        SMALL,
        lambda: micro_batch_ids(lambda n, first, end: [[s & 0xFFFF for s in b] for b in blocks(n, first, end)]),
    ),
    "find ignores the epoch": (SMALL, find_ignores_the_epoch),
    "evaluation drops an incomplete micro-batch": (SMALL, lambda: evaluation(drop_incomplete)),
    "evaluation reads training samples": (SMALL, lambda: evaluation(evaluate_training_samples)),
    "evaluation counts its padding": (SMALL, lambda: evaluation(count_padding)),
    "stream is built with another holdout": (
        SMALL,
        lambda: (
            sample_lookup,
            "build_stream",
            lambda config, opened: Stream.from_lengths(config.seed, 16, [len(opened[0])], [1.0], 0.02),
        ),
    ),
}

QUICK = {
    "rank slice is shifted by one",
    "epochs 64 apart have the same order",
    "permutation repeats samples",
    "held-out samples are trained on",
    "inverse permutation is off by one",
    "positions wrap at 2^32",
    "worker processes reseed",
    "threads return batches as they complete",
    "cycle cache lacks the quotas",
    "mixture weights are ignored",
    "first sample of a source is its neighbour's",
    "labels are not shifted",
    "tokenization cache is stale",
    "loader resumes at step 0",
    "evaluation counts its padding",
    "stream is built with another holdout",
}
"""Faults that every run of the tests seeds: at least one per claim and per component of the data path."""
