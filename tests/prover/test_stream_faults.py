"""The stream check of `prove` finds every seeded fault of the order, the loader, the sources and evaluation."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random

import pytest

from meshwright.base.config import RunConfig, config_from_dict
from meshwright.core.data import sample_lookup
from meshwright.core.data.prepare.command import prepare_folder
from meshwright.prover.stream import check_stream, checked_stream, epochs, loading, order, sources
from tests.kit.small_run import load_cpu_config
from tests.prover.stream_faults import (
    FAULTS,
    FILES,
    MIXTURE,
    QUICK,
    SMALL,
    ordinals_of_a_mixture_are_off_after_the_first_cycle,
)

QUICK_SEEDS = (19, 27)
"""Seeds of cheap random configs: a mixture and a source of 2^62 samples."""


@pytest.fixture(autouse=True)
def data_files(tmp_path, monkeypatch):
    """Two text files and a JSONL file in the current folder, and an empty tokenization cache."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    random = Random(1)
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("".join(random.choices("abcdefgh \n", k=3000)))
    records = [{"text": f"text {random.random()}", "title": f"title {i}"} for i in range(200)]
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))


def failed_claims(config: RunConfig) -> list[str]:
    return [f"{claim}: {measured}" for claim, passed, measured, *_ in check_stream(config) if not passed]


def first_failure(config: RunConfig) -> str:
    return next((f"{claim}: {measured}" for claim, passed, measured, *_ in check_stream(config) if not passed), "")


@pytest.mark.parametrize("fault", [f if f in QUICK else pytest.param(f, marks=pytest.mark.long) for f in FAULTS])
def test_seeded_stream_fault_is_found(fault, monkeypatch):
    options, make = FAULTS[fault]
    owner, name, wrong = make()
    monkeypatch.setattr(owner, name, wrong)
    if owner is sample_lookup:
        monkeypatch.setattr(checked_stream, name, wrong)
    assert first_failure(load_cpu_config(overrides=options))


def test_finding_names_source_position_step_and_samples(monkeypatch):
    monkeypatch.setattr(*ordinals_of_a_mixture_are_off_after_the_first_cycle())
    found = first_failure(load_cpu_config(overrides=MIXTURE))
    assert "step 625, index 0 (position 10,000, source synthetic(" in found
    assert "expected sample " in found
    assert ", found " in found


@pytest.mark.parametrize(
    "options",
    [
        MIXTURE,
        FILES,
        [*SMALL, "--eval.holdout=0", "--batch.global=60", "--data.samples=61"],
        pytest.param([], marks=pytest.mark.long),
        pytest.param(SMALL, marks=pytest.mark.long),
    ],
)
def test_stream_contract_holds(options):
    assert failed_claims(load_cpu_config(overrides=options)) == []


def test_stream_contract_holds_for_shards_and_compressed_files(tmp_path):
    (tmp_path / "records.jsonl.gz").write_bytes(gzip.compress(Path("records.jsonl").read_bytes()))
    prepare_folder(["records.jsonl"], tmp_path / "shards", "", "auto", "text", "", "auto", 1, 500, 0)
    for kind, name in (("shards", "shards"), ("jsonl", "records.jsonl.gz")):
        options = [f"--data.kind={kind}", f"--data.path={tmp_path / name}", "--data.sequence=16"]
        assert failed_claims(load_cpu_config(overrides=options)) == []


def random_config(random: Random) -> RunConfig:
    """A config with a small or a huge source, or a mixture, and any batch, seed and holdout."""
    lengths = [2, 3, 7, 20, 97, 1000, 12_345, 10**9, 2**62]
    number = random.choice([1, 1, 2, 3, 12])
    kinds = [{"kind": "synthetic", "samples": random.choice(lengths[: 9 if number == 1 else 8])} for _ in range(number)]
    sequence = random.choice([2, 5, 16])
    if number == 1:
        files = [{"kind": "text", "path": "."}, {"kind": "jsonl", "path": "records.jsonl"}]
        data = {"sequence": sequence, **random.choice([kinds[0], kinds[0], *files])}
    else:
        data = {
            "sequence": sequence,
            "mixture": [kind | {"weight": random.choice([0.1, 1, 1, 2.5, 30])} for kind in kinds],
        }
    data |= {"workers": random.choice([0, 0, 2]), "prefetch": random.randint(1, 5)}
    replicate = random.choice([1, 2, 3])
    batch = {"global": replicate * random.choice([1, 2, 6, 16, 35, 1000])}
    return config_from_dict(
        {
            "seed": random.choice([0, 1, 2**32, 2**63 - 1]),
            "steps": random.choice([0, 1, 40, 10**6]),
            "data": data,
            "batch": batch,
            "layout": {"replicate": replicate},
            "eval": {"holdout": random.choice([0, 0.01, 0.3]), "samples": random.choice([1, 64, 5000])},
        }
    )


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in QUICK_SEEDS else pytest.mark.long) for seed in range(40)]
)
def test_random_config_raises_no_false_alarm(seed, monkeypatch):
    """With fewer positions than `prove` compares, and one of the loader's cases."""
    monkeypatch.setattr(checked_stream, "MAX_CYCLES", 2)
    monkeypatch.setattr(checked_stream, "MAX_OWN_POSITIONS", 400)
    monkeypatch.setattr(checked_stream, "FAR_POSITIONS", 20)
    monkeypatch.setattr(epochs, "MAX_POSITIONS", 20_000)
    monkeypatch.setattr(epochs, "MAX_EVALUATED", 300)
    monkeypatch.setattr(loading, "MAX_EVALUATED", 100)
    monkeypatch.setattr(order, "LOOKUPS", 20)
    monkeypatch.setattr(sources, "MAX_READ_SAMPLES", 20)
    right, random = loading.loader_cases, Random(seed)
    monkeypatch.setattr(loading, "loader_cases", lambda checked: [random.choice(list(right(checked))[1:])])
    config = random_config(random)
    assert failed_claims(config) == [], config


@pytest.mark.long
def test_tiny_source_in_a_mixture_passes():
    tiny = ['--data.mixture=[{kind="synthetic", samples=100_000_000}, {kind="synthetic", samples=3}]']
    assert failed_claims(load_cpu_config(overrides=[*tiny, "--data.sequence=16"])) == []
