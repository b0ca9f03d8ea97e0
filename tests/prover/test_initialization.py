"""The check of initial weights passes at the sizes of large models and finds faults that appear only there."""

from __future__ import annotations

import pytest

from meshwright.base.config import config_from_dict
from meshwright.core.models import init
from meshwright.prover.initialization import check_initialization, weight_ranges

LLAMA = config_from_dict({"preset": "llama-8b", "layout": {"shard": "parameters", "replicate": 6, "tensor": 2}})
EXPERTS = config_from_dict({"preset": "deepseek-moe-16b", "layout": {"replicate": 4, "expert": 4}})


@pytest.mark.parametrize("config", [LLAMA, EXPERTS, config_from_dict({})], ids=["llama", "experts", "tiny"])
def test_initial_weights_follow_their_definition(config):
    (claim,) = check_initialization(config)
    assert claim.passed, claim.measured
    assert f"{max(config.model.vocab, config.model.ffn):,} rows" in claim.claim


def test_checked_ranges_cross_generators_and_shards():
    ranges = list(weight_ranges(LLAMA))
    crosses = [r for r in ranges if r.offset[0] // 1024 != (r.offset[0] + r.sizes[0] - 1) // 1024]
    assert len(crosses) > 20
    assert {r.name.split(".")[2] for r in ranges if "blocks" in r.name} > {"0", "31"}
    assert 14336 in {r.shape[0] for r in ranges}


def fault_row_block(monkeypatch):
    initial_rows = init.initial_rows

    def clamped(seed, name, shape, start, stop, std):
        """Every row block from the third on repeats the second."""
        return (
            initial_rows(seed, name, shape, 1024, 1024 + stop - start, std)
            if start > 1024
            else initial_rows(seed, name, shape, start, stop, std)
        )

    monkeypatch.setattr(init, "initial_rows", clamped)


def fault_name_of_late_blocks(monkeypatch):
    initial_rows = init.initial_rows

    def cut(seed, name, *rest):
        return initial_rows(seed, name.replace("blocks.31.", "blocks.3."), *rest)

    monkeypatch.setattr(init, "initial_rows", cut)


def fault_std(monkeypatch):
    """The projections into the residual stream do not shrink with depth."""
    init_matrix_shard = init.init_matrix_shard
    monkeypatch.setattr(init, "init_matrix_shard", lambda *args: init_matrix_shard(*args[:4], 0.02, args[5]))


def fault_local_start(monkeypatch):
    """A shard is initialized as if it started at the first row of its row block."""
    init_matrix_shard = init.init_matrix_shard

    def aligned(local, name, shape, offset, std, seed):
        first = min(offset[0] // 1024 * 1024, shape[0] - local.shape[0])
        init_matrix_shard(local, name, shape, (first, *offset[1:]), std, seed)

    monkeypatch.setattr(init, "init_matrix_shard", aligned)


@pytest.mark.parametrize("fault", [fault_row_block, fault_name_of_late_blocks, fault_std, fault_local_start])
def test_fault_is_found(monkeypatch, fault):
    fault(monkeypatch)
    (claim,) = check_initialization(LLAMA)
    assert not claim.passed
    assert "the first wrong one is" in claim.measured
