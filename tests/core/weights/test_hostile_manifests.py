"""Manifests that contradict themselves are refused before anything is allocated by them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.base.checkpoint.manifest import MANIFEST_FILE
from meshwright.base.config import LoraConfig, RunConfig, identity
from meshwright.base.models.lora import FACTORS
from meshwright.base.models.registry import lora_spec
from meshwright.core.checkpoint.inspect import find_published
from meshwright.core.generate.load import load_model
from meshwright.core.weights.export import export_checkpoint
from meshwright.errors import CheckpointError
from tests.core.weights.weight_folders import MODEL
from tests.core.weights.written_checkpoints import write_checkpoint

LORA = LoraConfig(rank=2, targets=("*.attention.q",))
IDENTITY = identity(RunConfig(model=MODEL, lora=LORA))


def hostile_run(folder, changes):
    parameters = [p for p in lora_spec(MODEL, LORA).parameters if p.name.endswith(FACTORS)]
    known = {key: value for key, value in (IDENTITY | changes).items() if value is not None}
    write_checkpoint(folder, {f"model/{p.name}": np.zeros(p.shape, np.float32) for p in parameters}, known)
    entry = find_published(folder, None)[0]
    manifest = replace(entry.manifest, base={"digest": "0" * 16, "weights": "the initialization of seed 0"})
    (folder / entry.folder / MANIFEST_FILE).write_bytes(manifest.encode())
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": None}, "the identity of step-00000003.a0001 has no seed"),
        ({"seed": "a"}, "has no seed"),
        ({"lora.rank": 0}, "refers to frozen parameters, and its identity has no low-rank factors"),
        ({"lora.rank": 4}, "has shape .* of .*lora_a, and its identity"),
        ({"lora.targets": ["*.attention.k"]}, "has shape None of .*k.lora_a"),
        ({"model.width": 1 << 20, "model.vocab": 1 << 24}, "has shape .* of .*lora_a, and its identity"),
    ],
)
def test_identity_that_is_not_that_of_the_tensors_is_refused(changes, message, tmp_path):
    run = hostile_run(tmp_path / "run", changes)
    for read in (
        load_model,
        lambda run: export_checkpoint(run, tmp_path / "out", RunConfig()),
        lambda run: export_checkpoint(run, tmp_path / "out", RunConfig(), adapter=True),
    ):
        with pytest.raises(CheckpointError, match=message):
            read(run)
