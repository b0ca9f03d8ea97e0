"""What the stream's contract says of a run, without opening its data: who reads what at a step, and where a sample is
met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from meshwright.config import Batch, BatchConfig, RunConfig, config_from_dict, derive_batch, load_config
from meshwright.data.file_sources import open_sources
from meshwright.data.source import Source
from meshwright.data.stream import Stream
from meshwright.errors import ConfigError
from meshwright.io import read_json
from meshwright.telemetry.run_folder import RunFolder
from meshwright.topology.layout import Layout
from meshwright.topology.unsupported import validate

MAX_EPOCHS = 1000


@dataclass(frozen=True)
class SampleLookup:
    stream: Stream
    batch: Batch
    layout: Layout
    sources: list[str]

    def show(self, step: int, rank: int | None = None) -> dict[str, Any]:
        """The sample ids of a step in global order; with a rank, that rank's alone and its micro-steps."""
        if step < 0:
            raise ConfigError(f"--step {step} is before the first", "allowed: at least 0")
        if rank is None:
            return {"step": step, "samples": self.stream.step(step).tolist()}
        if not 0 <= rank < self.layout.ranks:
            raise ConfigError(
                f"--rank {rank} is not one of the run's {self.layout.ranks}",
                f"allowed: from 0 to {self.layout.ranks - 1}",
            )
        ids = self.stream.local_samples(step, self.layout.data_coordinate(rank), self.batch.replicas)
        return {
            "step": step,
            "rank": rank,
            "samples": ids.tolist(),
            "micro_steps": ids.reshape(-1, self.batch.micro).tolist(),
        }

    def find(self, sample: int, epochs: int) -> dict[str, Any]:
        """Where training meets a sample, for its first so many epochs."""
        if not 1 <= epochs <= MAX_EPOCHS:
            raise ConfigError(f"--epochs {epochs} is out of range", f"allowed: from 1 to {MAX_EPOCHS}")
        source, index = self.stream.locate(sample)
        places = []
        for place in islice(self.stream.occurrences(sample), epochs):
            coordinate, within = divmod(place.index, self.batch.local)
            rank = self.layout.reader_rank(coordinate)
            places.append(asdict(place) | {"rank": rank, "micro_step": within // self.batch.micro})
        return {
            "sample": sample,
            "source": self.sources[source],
            "source_index": index,
            "held_out": not places,
            "occurrences": places,
        }


def open_sample_lookup(run: Path) -> SampleLookup:
    """The contract of a run folder, read from its identity; of a run file, read from the data it names."""
    if run.is_dir():
        record = read_json(RunFolder(run).identity_file)
        try:
            stream = Stream.from_json(record["stream"])
            micro, layout = record["placement"]["batch.micro"], layout_from_record(record["placement"])
            names = [str(source["name"]) for source in record["sources"]]
            if type(micro) not in (int, type(None)) or micro == 0:
                raise ValueError("impossible batch")
            if len(names) != len(stream.sources):
                raise ValueError("sources and stream differ")
            return SampleLookup(
                stream, derive_batch(BatchConfig(stream.global_batch, micro), layout.data_degree), layout, names
            )
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise ConfigError(
                f"{RunFolder(run).identity_file} is not an identity record ({error!r})", "give a run folder"
            ) from None
    if not run.exists():
        raise ConfigError(f"{run} is neither a run folder nor a run file", "give one of the two")
    config = load_config(run)
    sources = open_sources(config.data, config.model.vocab)
    layout, batch = validate(config)
    return SampleLookup(build_stream(config, sources), batch, layout, [s.name for s in sources])


def layout_from_record(placement: dict[str, Any]) -> Layout:
    """The layout that a run's record speaks of; one that a stranger made up is refused as a run file's would be."""
    said = {key.removeprefix("layout."): value for key, value in placement.items() if key.startswith("layout.")}
    return Layout.from_config(
        config_from_dict({"layout": {key: value for key, value in said.items() if value is not None}}).layout
    )


def build_stream(config: RunConfig, sources: Sequence[Source]) -> Stream:
    """The stream that a config makes of its sources."""
    weights = [source.weight for source in config.data.mixture] or [1.0]
    return Stream.from_lengths(
        config.seed, config.batch.global_, [len(s) for s in sources], weights, config.eval.holdout
    )
