"""A stream together with its independent reference, and the positions at which the two are compared."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, zip_longest
from random import Random

import numpy as np

from meshwright.base.config import Batch, RunConfig, derive_batch
from meshwright.base.topology.layout import Layout
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.permutation import MAX_LENGTH
from meshwright.core.data.sample_lookup import build_stream
from meshwright.core.data.source import Source, is_packed
from meshwright.core.data.stream import Stream
from meshwright.prover.oracle.sampler import CYCLE, Sampler
from meshwright.prover.oracle.source_files import Arrays, SourceReader, UnreadSource, open_readers, read_sample

MAX_CYCLES = 16
"""Cycles of a mixture that are compared: the reference computes a cycle position by position."""
MAX_SOURCES = 8
"""Sources whose epochs and samples are compared one by one."""
MAX_OWN_POSITIONS = 8192
"""A run with at most this many positions is compared completely."""
FAR_POSITIONS = 300
"""Random positions, uniform in the logarithm, up to the end of the stream; some positions after each are compared."""


class WrongStream(Exception):
    """What breaks a claim: where, what was expected and what was found."""


@dataclass(frozen=True)
class CheckedStream:
    """The stream and the sources of a config, and the reference that computes both independently."""

    config: RunConfig
    layout: Layout
    batch: Batch
    sources: list[Source]
    stream: Stream
    readers: list[SourceReader]
    sampler: Sampler
    random: Random = field(default_factory=lambda: Random(0))
    """Chooses positions; its seed is fixed, so that a failure can be repeated."""

    @classmethod
    def open(cls, config: RunConfig, own_sources: list[Source] | None = None) -> CheckedStream:
        """Opens the data of the config, or takes a user's own sources, which have no independent reader."""
        sources = own_sources or open_sources(config.data, config.model.vocab, config.model.separator)
        layout = Layout.from_config(config.layout)
        readers = open_readers(config) if own_sources is None else []
        lengths = [
            reader.samples if reader is not None and reader.complete else len(source)
            for source, reader in zip_longest(sources, readers)
        ]
        return cls(
            config,
            layout,
            derive_batch(config.batch, layout.data_degree),
            sources,
            build_stream(config, sources),
            readers,
            Sampler.from_config(config, lengths),
        )

    @cached_property
    def starts(self) -> list[int]:
        """The first sample id of every source, and the end of the last."""
        return [0, *accumulate(self.sampler.lengths)]

    @property
    def own_positions(self) -> int:
        """The number of positions that the run reads."""
        return min(MAX_LENGTH, max(1, self.config.steps) * self.sampler.global_batch)

    def trained(self, source: int) -> int:
        """The number of samples per epoch of a source."""
        return self.sampler.lengths[source] - self.sampler.held_out(source)

    def own_epochs(self, source: int) -> int:
        """The number of epochs of a source that the run begins."""
        ordinals = self.own_positions * self.sampler.shares[source] // CYCLE
        return ordinals // self.trained(source) + 1

    def locate(self, sample: int) -> tuple[int, int]:
        """(source number, index in the source) of a sample id."""
        source = bisect_right(self.starts, sample) - 1
        return source, sample - self.starts[source]

    def known(self, sample: int) -> bool:
        """Whether the reference can read the sample: of large files it reads the first documents only."""
        source, index = self.locate(sample)
        return index < self.readers[source].samples

    @property
    def unread(self) -> tuple[str, ...]:
        """The sources that are not read independently, and why."""
        pairs = zip(self.sources, self.readers, strict=False)
        return tuple(f"the content of {s.name}: {r.reason}" for s, r in pairs if isinstance(r, UnreadSource))

    def read(self, sample: int) -> Arrays:
        """(tokens, labels), and the documents beside packed chats, of a sample, read independently."""
        source, index = self.locate(sample)
        reader = self.readers[source]
        assert not isinstance(reader, UnreadSource)
        return read_sample(reader, index, self.config, any(is_packed(source) for source in self.sources))

    def some_sources(self) -> list[int]:
        """Every source, or for many the first, the last and random ones."""
        number = len(self.sources)
        if number <= MAX_SOURCES:
            return list(range(number))
        return sorted({0, number - 1, *self.random.sample(range(number), MAX_SOURCES - 2)})

    def far_position(self, end: int = MAX_LENGTH) -> int:
        """A random position up to `end`, uniform in the logarithm."""
        return min(end - 1, int(2 ** (self.random.random() * np.log2(end))))

    def far_steps(self, global_batch: int, number: int) -> list[int]:
        """Random steps over the whole stream; in a mixture, steps at the start of the cycles that are compared."""
        end = MAX_LENGTH // global_batch - MAX_CYCLES
        if len(self.sources) == 1:
            return [self.far_position(end) for _ in range(number)]
        cycles = self.random.sample(self.cycles, min(number, len(self.cycles)))
        return [min(end, -(-cycle * CYCLE // global_batch)) for cycle in cycles]

    def describe(self, position: int) -> str:
        """Where a position is, for messages."""
        source, ordinal = self.sampler.place(position)
        step, index = divmod(position, self.sampler.global_batch)
        epoch = ordinal // self.trained(source)
        name = self.sources[source].name
        return f"step {step:,}, index {index:,} (position {position:,}, source {name}, epoch {epoch:,})"

    def positions(self) -> list[int]:
        """The positions at which order is compared: the run's own, far ones, and both sides of every border."""
        return self.mixture_positions() if len(self.sources) > 1 else self.single_source_positions()

    def single_source_positions(self) -> list[int]:
        own, trained = self.own_positions, self.trained(0)
        chosen = range(own) if own <= MAX_OWN_POSITIONS else random_range(self.random, own, MAX_OWN_POSITIONS // 2)
        borders = {2**k for k in range(63)}
        borders |= {trained * epoch for epoch in epochs_with_borders(self.random, self.own_epochs(0), trained)}
        borders |= {CYCLE * self.random.randrange(1, 1 << 40) for _ in range(16)}
        borders |= {4096 * self.random.randrange(1, own // 4096 + 2) for _ in range(16)}
        near = {border + offset for border in borders for offset in range(-2, 3)}
        far = {p + offset for p in (self.far_position() for _ in range(FAR_POSITIONS)) for offset in range(5)}
        return sorted(p for p in {*chosen, *near, *far} if 0 <= p <= MAX_LENGTH)

    def mixture_positions(self) -> list[int]:
        """Positions of few cycles: near the ends of the cycle, near the ends of epochs of every source, and others."""
        chosen: set[int] = set()
        for cycle in self.cycles:
            first = cycle * CYCLE
            chosen |= {first, first + 1, first + CYCLE - 2, first + CYCLE - 1}
            chosen |= set(self.random.sample(range(first, first + CYCLE), 200))
            near_ends = []
            for position in range(first, first + CYCLE):
                source, ordinal = self.sampler.place(position)
                if (ordinal + 2) % self.trained(source) < 4:
                    near_ends.append(position)
            chosen |= set(self.random.sample(near_ends, min(200, len(near_ends))))
        return sorted(p for p in chosen if p <= MAX_LENGTH)

    @cached_property
    def cycles(self) -> list[int]:
        """At most MAX_CYCLES cycles: of the run, of the ends of epochs, and far away."""
        own = (self.own_positions - 1) // CYCLE
        sources = self.some_sources()
        first_ends = [self.trained(source) // self.sampler.shares[source] for source in sources]
        last_ends = [
            self.trained(source) * max(1, self.own_epochs(source) - 1) // self.sampler.shares[source]
            for source in sources
        ]
        far = [self.far_position() // CYCLE for _ in range(3)]
        borders = [(1 << 32) // CYCLE, (1 << 32) // self.sampler.shares[sources[0]]]
        chosen = dict.fromkeys([0, 1, own, *first_ends, *far, *borders, self.random.randint(0, own), *last_ends])
        return [cycle for cycle in chosen if cycle < MAX_LENGTH // CYCLE][:MAX_CYCLES]


def random_range(random: Random, end: int, number: int) -> list[int]:
    return [random.randrange(end) for _ in range(number)]


def epochs_with_borders(random: Random, own: int, trained: int) -> list[int]:
    """Epochs of the run, some far away, and those that are equal modulo a power of two."""
    end = MAX_LENGTH // trained
    chosen = {*range(1, max(24, min(own, 64)) + 1), own, *random_range(random, own + 1, 8)}
    for power in (8, 15, 16, 31, 32, 48):
        chosen |= {2**power, 2**power + 1}
    chosen |= {int(2 ** (random.random() * np.log2(end))) for _ in range(8)} if end > 1 else set()
    return sorted(epoch for epoch in chosen if 0 < epoch < end)


def shown(values: Sequence[int], index: int) -> str:
    """The value at an index for a message."""
    return str(values[index]) if index < len(values) else "none"


def first_difference(expected: Sequence[int], found: Iterable[int]) -> int | None:
    """The first index at which two lists differ."""
    found = list(found)
    for index, (left, right) in enumerate(zip(expected, found, strict=False)):
        if left != right:
            return index
    return None if len(expected) == len(found) else min(len(expected), len(found))
