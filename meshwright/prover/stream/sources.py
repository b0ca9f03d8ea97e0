"""Checks that the samples of every source are what its files contain."""

from __future__ import annotations

import numpy as np

from meshwright.core.data.source import ConcatenatedSource
from meshwright.prover.stream.checked_stream import CheckedStream, WrongStream
from meshwright.prover.stream.loading import compare_sample

MAX_READ_TOKENS = 2 << 20
"""Tokens that are read twice from all sources together."""
MAX_READ_SAMPLES = 400
"""Samples that are read from one source."""


def check_sources(checked: CheckedStream) -> str:
    together, sources = ConcatenatedSource(checked.sources), checked.some_sources()
    budget = MAX_READ_TOKENS // checked.config.data.sequence // len(sources)
    compared = 0
    for number in sources:
        source, reader = checked.sources[number], checked.readers[number]
        if (len(source) != reader.samples and reader.complete) or len(source) < reader.samples:
            raise WrongStream(f"source {source.name} has {len(source):,} samples, expected {reader.samples:,}")
        borders = [0, 1, reader.samples - 1, *reader.borders[:64]]
        near = {border + offset for border in borders for offset in (-1, 0)}
        count = min(MAX_READ_SAMPLES, max(8, budget))
        chosen = near | {checked.random.randrange(reader.samples) for _ in range(count if reader.samples else 0)}
        for index in sorted(index for index in chosen if 0 <= index < reader.samples):
            sample = checked.starts[number] + index
            try:
                found = list(together[sample])
            except ValueError as error:
                if checked.read(sample)[1].max() < 0:  # a token that is out of range: the loader masks the sample
                    continue
                raise WrongStream(f"source {source.name}, index {index}: {error}") from error
            compare_sample(checked, sample, found, "read from its source")
            again = list(source[index])
            if not all(np.array_equal(left, right) for left, right in zip(found, again, strict=True)):
                raise WrongStream(f"source {source.name}, index {index}: a second read returns other values")
            compared += 1
    return f"{compared:,} samples of {len(sources)} of {len(checked.sources)} source(s) equal an independent reading"
