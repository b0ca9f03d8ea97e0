"""Tests of the settings whose defaults depend on the device."""

from __future__ import annotations

import pytest

from meshwright.base.config import identity, load_config
from meshwright.base.config.device_defaults import (
    is_resolved,
    require_bf16,
    with_device_defaults,
    without_device_defaults,
)
from meshwright.base.config.parallelism import SPLIT_BACKWARD_SCHEDULES
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.errors import ConfigError

KEYS = (
    "precision.compute",
    "precision.weights",
    "precision.residual",
    "compile.enabled",
    "kernels.loss",
)


def values(config):
    return [getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in KEYS]


def test_device_decides_what_is_unset():
    config = load_config()
    assert not is_resolved(config)
    assert values(with_device_defaults(config, "cpu")) == ["fp32", "fp32", "fp32", False, "torch"]
    assert values(with_device_defaults(config, "cuda")) == ["bf16", "bf16", "bf16", True, "fused"]
    assert is_resolved(with_device_defaults(config, "cpu"))


def test_device_defaults_keep_what_is_set():
    own = load_config(
        overrides=["precision.compute=bf16", "precision.weights=fp32", "compile.enabled=false", "kernels.loss=torch"]
    )
    assert values(with_device_defaults(own, "cuda")) == ["bf16", "fp32", "fp32", False, "torch"]
    assert with_device_defaults(with_device_defaults(own, "cuda"), "cpu") == with_device_defaults(own, "cuda")


@pytest.mark.parametrize("compute", ["fp32", "fp16", "fp64"])
def test_weights_are_bf16_with_bf16_alone(compute):
    config = load_config(overrides=[f"precision.compute={compute}", "precision.weights=bf16"])
    assert values(with_device_defaults(config, "cuda"))[:3] == [compute, "fp32", "fp32"]


def test_compile_is_off_by_default_where_it_is_unsupported():
    assert tuple(name for name, schedule in SCHEDULES.items() if schedule.splits_backward) == SPLIT_BACKWARD_SCHEDULES
    split = load_config(overrides=["layout.pipeline=2", "pipeline.schedule=zero-bubble"])
    context = load_config(overrides=["layout.context=2"])
    assert with_device_defaults(split, "cuda").compile.enabled is False
    assert with_device_defaults(context, "cuda").compile.enabled is True
    assert with_device_defaults(context, "cuda", own_model=True).compile.enabled is False


def test_run_file_keeps_what_was_unset_except_for_the_identity():
    given = load_config()
    written = without_device_defaults(with_device_defaults(given, "cuda"), given)
    assert values(written) == ["bf16", None, None, None, None]
    assert identity(written) == identity(with_device_defaults(given, "cuda"))


def test_bf16_weights_without_bf16_compute_are_refused():
    given = load_config(overrides=["--precision.weights=bf16"])
    require_bf16(given, with_device_defaults(given, "cuda"))
    with pytest.raises(ConfigError, match="and the run computes in fp32"):
        require_bf16(given, with_device_defaults(given, "cpu"))


def test_offloaded_update_keeps_float32_weights_by_default():
    given = load_config(overrides=["--optimizer.cpu_offload=true"])
    assert with_device_defaults(given, "cuda").precision.weights == "fp32"
