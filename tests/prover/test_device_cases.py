"""The runs that prove every axis on CUDA, and how the ranks of one launch train them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.base.topology.layout import Layout
from meshwright.errors import ConfigError
from meshwright.prover import prove
from meshwright.prover.claims import fault_environment
from meshwright.prover.device import check
from meshwright.prover.device.cases import LAYOUTS, RANKS, device_runs, unsupported_axes
from meshwright.prover.device.check import DEVICE_AXES, check_ranks, require_device
from tests.kit.small_run import load_cpu_config

CONFIG = load_cpu_config(overrides=["--data.kind=synthetic", "--data.samples=400"])


def test_every_axis_is_proven_in_both_precisions_compiled_and_not():
    for ranks in RANKS:
        runs = [run.config for run in device_runs(CONFIG, ranks)]
        assert len(runs) == len(LAYOUTS) * 4
        assert {Layout.from_config(run.layout).ranks for run in runs} == {ranks}
        assert {(run.precision.compute, run.compile.enabled) for run in runs} == {
            (compute, compiled) for compute in ("fp32", "bf16") for compiled in (False, True)
        }
        assert {run.precision.weights for run in runs if run.precision.compute == "bf16"} == {"bf16"}
        assert {run.precision.weights for run in runs if run.precision.compute == "fp32"} == {"fp32"}
        assert not any(run.precision.tf32 for run in runs)
    assert list(unsupported_axes(CONFIG)) == []


def on_cpu(run, steps=4):
    config = run.config
    return replace(run, config=replace(config, steps=steps, launch=replace(config.launch, device="cpu")))


def test_a_run_that_fails_does_not_end_the_other_runs_of_its_launch(monkeypatch):
    chosen = [run for run in device_runs(CONFIG, 2) if run.name.endswith("fp32")][:3]
    runs = [on_cpu(run, steps) for run, steps in zip(chosen, (4, 3, 4), strict=True)]
    monkeypatch.setattr(check, "device_runs", lambda _config, _ranks: runs)
    with fault_environment("end:rank1:raise@step3"):
        claims = list(check_ranks(CONFIG, 2))
    assert [claim.passed for claim in claims] == [True, False, True]
    assert claims[0].claim.startswith("DDP on CUDA, 2 ranks, fp32: replicate 2")
    assert "rank 1" in claims[1].measured


def test_a_machine_without_device_is_refused():
    with pytest.raises(ConfigError, match="--device cuda, but torch finds no CUDA device"):
        require_device(CONFIG)


class NoProof:
    """A proof of a custom model whose only check claims nothing."""

    def __init__(self, *_arguments):
        self.not_proven, self.describe = list, dict

    def checks(self):
        return {"nothing": lambda _config, _full: iter(())}


def test_axes_on_cuda_are_listed_as_not_proven_for_a_family_without_reference(monkeypatch):
    monkeypatch.setattr(prove, "require_device", lambda _config: None)
    monkeypatch.setattr(prove, "CustomProof", NoProof)
    config = load_cpu_config(overrides=["--model.family=gpt2", "--model.kv_heads=4", "--data.kind=synthetic"])
    assert DEVICE_AXES in prove.certify(config, on_device=True)["not_proven"]
    assert DEVICE_AXES not in prove.certify(config)["not_proven"]
