"""A model of the user's own on every axis: the trained weights are those of one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright import ParallelSpec, train
from meshwright.config import config_from_dict
from meshwright.errors import ConfigError
from meshwright.parallel.parallel_spec import fsdp_units

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_parallel_spec.py"
spec = importlib.util.spec_from_file_location("custom_parallel_spec", EXAMPLE)
assert spec is not None
example = importlib.util.module_from_spec(spec)
assert spec.loader is not None
spec.loader.exec_module(example)

SETTINGS = {
    "steps": 3,
    "batch": {"global": 8, "micro": 2},
    "precision": {"compute": "fp64"},
    "optimizer": {"lr": 0.01},
    "eval": {"holdout": 0.1, "every": 3, "samples": 5},
    "launch": {"device": "cpu", "collective_timeout": 60.0},
}
LAYOUTS = {
    "DDP": {"replicate": 2},
    "sharded": {"replicate": 2, "shard": "parameters"},
    "cut": {"replicate": 1, "tensor": 2},
    "sharded and cut": {"replicate": 2, "shard": "gradients", "tensor": 2},
}


def trained(folder, layout: dict, parts: ParallelSpec | None = example.PARALLEL_SPEC, **more) -> nn.Module:
    torch.manual_seed(0)
    model = example.Residual(width=8, depth=2).double()
    config = config_from_dict(SETTINGS | {"layout": layout} | more)
    train(
        config, model=model, loss=example.squares, source=example.Waves(), parallel_spec=parts, run=folder, quiet=True
    )
    return model


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, torch.Tensor]:
    return trained(tmp_path_factory.mktemp("alone") / "run", {"replicate": 1}).state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_trained_weights_are_those_of_one_process(layout, alone, tmp_path):
    found = trained(tmp_path / "run", LAYOUTS[layout]).state_dict()
    for name, right in alone.items():
        assert torch.allclose(found[name], right, rtol=1e-10, atol=1e-12), name


def test_recomputation_gives_the_same_bits(alone, tmp_path):
    found = trained(tmp_path / "run", {"replicate": 1}, activation_checkpoint={"mode": "full"}).state_dict()
    assert all(torch.equal(found[name], right) for name, right in alone.items())


@pytest.mark.parametrize(
    ("layout", "more", "parallel_spec", "message"),
    [
        ({"replicate": 2, "shard": "parameters"}, {}, None, "nothing says which the blocks of your model are"),
        ({"replicate": 1, "tensor": 2}, {}, None, "layout.tensor = 2 works block by block"),
        (
            {"replicate": 1},
            {"activation_checkpoint": {"mode": "full"}},
            None,
            "activation_checkpoint.mode = full works block by block",
        ),
        ({"replicate": 1}, {"compile": {"enabled": True}}, None, "compile.enabled = true works block by block"),
        ({"replicate": 1, "tensor": 2}, {}, ParallelSpec(blocks="blocks.*"), "ParallelSpec.cuts says nothing"),
        (
            {"replicate": 2, "shard": "parameters"},
            {},
            ParallelSpec(blocks="layers.*"),
            "no module of the model is called",
        ),
        (
            {"replicate": 1},
            {"activation_checkpoint": {"mode": "full", "segment": 2}},
            example.PARALLEL_SPEC,
            "needs a model with a BlockStack",
        ),
    ],
)
def test_what_is_not_known_is_not_guessed(layout, more, parts, said, tmp_path):
    with pytest.raises(Exception, match=said):
        trained(tmp_path / "run", layout, parts, **more)


def test_blocks_that_share_a_parameter_are_refused(tmp_path):
    torch.manual_seed(0)
    model = example.Residual(width=8, depth=2)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    config = config_from_dict(SETTINGS | {"layout": {"replicate": 2, "shard": "parameters"}})
    with pytest.raises(Exception, match="shares a parameter"):
        train(
            config, model=model, loss=example.squares, source=example.Waves(), parallel_spec=example.PARALLEL_SPEC,
            run=tmp_path / "run", quiet=True,
        )  # fmt: skip


def test_the_decoders_own_rules_do_not_hold_for_a_users_model(tmp_path):
    """The preset's heads do not divide by 3 and need not."""
    trained(tmp_path / "run", {"replicate": 3, "shard": "parameters"}, batch={"global": 6})
    with pytest.raises(ConfigError, match="does not divide"):
        trained(tmp_path / "other", {"replicate": 3, "shard": "parameters"}, batch={"global": 8})


class Branching(example.Residual):
    """Which of two matrices a sample goes through depends on the sample, so ranks may use different ones."""

    def __init__(self) -> None:
        super().__init__(width=8, depth=1)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        x = self.one(x) if float(x.detach().sum()) > 0 else self.other(x)
        return self.leave(self.blocks[0](x)).squeeze(-1)


def branched(folder, layout: dict, unused: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Branching().double()
    settings = SETTINGS | {
        "batch": {"global": 8, "micro": 1},
        "layout": layout,
        "ddp": {"find_unused_parameters": unused},
    }
    parts = ParallelSpec(blocks="blocks.*")
    train(
        config_from_dict(settings), model=model, loss=example.squares, source=example.Waves(), parallel_spec=parts,
        run=folder, quiet=True,
    )  # fmt: skip
    return model.state_dict()


def test_ranks_that_use_different_parameters_are_right_where_that_is_said(tmp_path):
    right = branched(tmp_path / "alone", {"replicate": 1}, False)
    found = branched(tmp_path / "sharded", {"replicate": 4, "shard": "parameters"}, True)
    for name, value in right.items():
        assert torch.allclose(found[name], value, rtol=1e-10, atol=1e-12), name


def test_ranks_that_use_different_parameters_are_stopped_where_it_is_not_said(tmp_path):
    with pytest.raises(Exception, match=r"did not use the same parameters.*set ddp.find_unused_parameters = true"):
        branched(tmp_path / "sharded", {"replicate": 4, "shard": "parameters"}, False)
    assert not list((tmp_path / "sharded").glob("checkpoints/*/manifest.json"))


class Normalised(example.Residual):
    def __init__(self) -> None:
        super().__init__(width=8, depth=1)
        self.batch_norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.blocks[0](self.batch_norm(self.enter(x)))).squeeze(-1)


def test_buffers_are_the_first_ranks_on_every_rank_as_under_ddp(tmp_path):
    found = {}
    for name, layout in (("copies", {"replicate": 2}), ("shards", {"replicate": 2, "shard": "parameters"})):
        torch.manual_seed(0)
        model = Normalised().double()
        settings = config_from_dict(SETTINGS | {"layout": layout, "eval": {"holdout": 0.1, "every": 3, "samples": 6}})
        result = train(
            settings, model=model, loss=example.squares, source=example.Waves(), parallel_spec=example.PARALLEL_SPEC,
            run=tmp_path / name, quiet=True,
        )  # fmt: skip
        found[name] = (model.batch_norm.running_mean, result.evaluations)
    assert torch.allclose(found["copies"][0], found["shards"][0], rtol=1e-10)
    assert found["copies"][1][0][1] == pytest.approx(found["shards"][1][0][1], rel=1e-10)


@pytest.mark.parametrize(
    ("parallel_spec", "message"),
    [
        (ParallelSpec(blocks="blocks.*", outer_modules=(("entry",),)), "no module of the model is called entry"),
        (
            ParallelSpec(blocks="blocks.*", tp_plan=lambda: {"blocks.*.upp": example.ColwiseParallel()}),
            "called blocks.*.upp",
        ),
    ],
)
def test_a_name_that_is_not_there_is_refused(parts, said, tmp_path):
    layout = {"replicate": 2, "shard": "parameters"} if parts.outer_modules else {"replicate": 1, "tensor": 2}
    with pytest.raises(Exception, match=said.replace("*", r"\*")):
        trained(tmp_path / "run", layout, parts)


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        (lambda model: setattr(model.blocks[1], "up", model.blocks[0].up), "shares a parameter"),
        (lambda model: setattr(model, "leave_norm", model.blocks[0].norm), "shares a parameter"),
        (lambda model: model.blocks.append(model.blocks[0]), ""),
    ],
)
def test_a_module_in_several_places_is_seen_in_all_of_them(shared, said):
    model = example.Residual(width=8, depth=2)
    shared(model)
    if not said:
        assert len(fsdp_units(model, example.PARALLEL_SPEC)[0]) == 2
        return
    with pytest.raises(ConfigError, match=said):
        fsdp_units(model, example.PARALLEL_SPEC)


def test_an_end_is_no_block():
    with pytest.raises(ConfigError, match="names a block"):
        fsdp_units(
            example.Residual(width=8, depth=2), ParallelSpec(blocks="blocks.*", outer_modules=(("enter", "blocks.0"),))
        )
