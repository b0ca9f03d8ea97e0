"""Looks up samples in the stream of a run: the samples of a step, and the steps that read a sample. Torch-free.

For a run folder no data is opened: the stream is a pure function of what identity.json records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from meshwright.base.config import Batch, BatchConfig, RunConfig, config_from_dict, derive_batch
from meshwright.base.io import read_json
from meshwright.base.models.initial_model import load_run_config
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.unsupported import validate
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.source import Source
from meshwright.core.data.stream import Stream
from meshwright.errors import ConfigError, MeshwrightError

MAX_EPOCHS = 1000
"""The largest number of epochs that `SampleLookup.find` accepts."""


@dataclass(frozen=True)
class SampleLookup:
    """The stream of a run together with the layout that distributes it over ranks."""

    stream: Stream
    batch: Batch
    layout: Layout
    sources: list[str]
    """The names of the sources."""

    def show(self, step: int, rank: int | None = None) -> dict[str, Any]:
        """The sample ids of a step in global order; with a rank, only those of the rank, with its micro-steps."""
        if step < 0:
            raise ConfigError(f"--step {step} is negative", "expected at least 0")
        if rank is None:
            return {"step": step, "samples": self.stream.step(step).tolist()}
        if not 0 <= rank < self.layout.ranks:
            raise ConfigError(
                f"--rank {rank}: the run has {self.layout.ranks} rank(s)", f"expected 0 to {self.layout.ranks - 1}"
            )
        ids = self.stream.local_samples(step, self.layout.data_coordinate(rank), self.batch.replicas)
        return {
            "step": step,
            "rank": rank,
            "samples": ids.tolist(),
            "micro_steps": ids.reshape(-1, self.batch.micro).tolist(),
        }

    def find(self, sample: int, epochs: int) -> dict[str, Any]:
        """The source of a sample, and where training reads it in the first `epochs` epochs."""
        if not 1 <= epochs <= MAX_EPOCHS:
            raise ConfigError(f"--epochs {epochs} is out of range", f"expected 1 to {MAX_EPOCHS}")
        source, source_index = self.stream.locate(sample)
        occurrences = []
        for occurrence in islice(self.stream.occurrences(sample), epochs):
            data_rank, local_index = divmod(occurrence.index, self.batch.local)
            rank = self.layout.reader_rank(data_rank)
            occurrences.append(asdict(occurrence) | {"rank": rank, "micro_step": local_index // self.batch.micro})
        return {
            "sample": sample,
            "source": self.sources[source],
            "source_index": source_index,
            "held_out": not occurrences,
            "occurrences": occurrences,
        }


def open_sample_lookup(run: Path) -> SampleLookup:
    """The lookup for a run folder, from its identity.json, or for a run file, from the data that it names."""
    if run.is_dir():
        RunFolder(run).require_own_folders()
        return lookup_from_identity(RunFolder(run).identity_file)
    if not run.exists():
        raise ConfigError(f"{run} does not exist", "expected a run folder or a run file")
    config = load_run_config(run)
    if config.rl.enabled:
        raise ConfigError(
            f"{run} sets rl.objective = {config.rl.objective}: its steps train on rollouts, which are known once they "
            "are generated",
            "expected the folder of the run",
        )
    sources = open_sources(config.data, config.model.vocab, config.model.separator)
    layout, batch = validate(config)
    return SampleLookup(build_stream(config, sources), batch, layout, [source.name for source in sources])


def lookup_from_identity(file: Path) -> SampleLookup:
    """The lookup from an identity record. The record is untrusted: every value is validated."""
    record = read_json(file)
    try:
        stream = Stream.from_json(record["stream"])
        micro, layout = record["placement"]["batch.micro"], layout_from_record(record["placement"])
        names = [str(source["name"]) for source in record["sources"]]
        if type(micro) not in (int, type(None)) or micro == 0:
            raise ValueError(f"batch.micro is {micro!r}")
        if len(names) != len(stream.sources):
            raise ValueError(f"{len(names)} source(s) and a stream over {len(stream.sources)}")
        batch = derive_batch(BatchConfig(stream.global_batch, micro), layout.data_degree)
        return SampleLookup(stream, batch, layout, names)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"{file} is not a valid identity record ({error!r})", "try another run folder") from None


def layout_from_record(placement: dict[str, Any]) -> Layout:
    """The layout in the placement of an identity record, with the same validation as a run file."""
    recorded = {key.removeprefix("layout."): value for key, value in placement.items() if key.startswith("layout.")}
    layout = {key: value for key, value in recorded.items() if value is not None}
    return Layout.from_config(config_from_dict({"layout": layout}).layout)


def build_stream(config: RunConfig, sources: Sequence[Source]) -> Stream:
    """The stream of a config over its opened sources."""
    weights = [source.weight for source in config.data.mixture] or [1.0]
    lengths = [len(source) for source in sources]
    return Stream.from_lengths(config.seed, config.batch.global_, lengths, weights, config.eval.holdout)


def samples_in_step(folder: RunFolder, step: int, rank: int) -> list[int]:
    """The sample ids of a rank in a step of a run: a function of its config, or the recorded prompts of its rollouts.
    Without readable records there are none.
    """
    try:
        if read_json(folder.identity_file)["identity"].get("rl.objective", "none") != "none":
            return prompts_in_step(folder, step)
        return [int(sample) for sample in open_sample_lookup(folder.root).show(step, rank)["samples"]]
    except (MeshwrightError, ValueError, KeyError, TypeError, AttributeError, OSError):
        return []


def prompts_in_step(folder: RunFolder, step: int) -> list[int]:
    """The sample ids of the prompts whose rollouts a step trains on, as its last attempt has recorded them."""
    steps = [
        event for event in read_events(folder.events(0)) if (event["kind"], event.get("step")) == ("rollouts", step)
    ]
    return [int(prompt) for _, _, prompt in steps[-1]["groups"]] if steps else []
