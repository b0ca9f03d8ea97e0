"""ParallelSpec: a user's model on every axis that it supports gives the weights of one process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright import ParallelSpec, train
from meshwright.base.config import config_from_dict
from meshwright.base.topology.layout import Layout
from meshwright.core.parallel.parallel_spec import fsdp_units
from meshwright.core.parallel.parallelize import require_spec
from meshwright.errors import ConfigError, NumericsError

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_parallel_spec.py"
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
    "FSDP2": {"replicate": 2, "shard": "parameters"},
    "tensor parallel": {"replicate": 1, "tensor": 2},
    "FSDP2 and tensor parallel": {"replicate": 2, "shard": "gradients", "tensor": 2},
    "pipeline": {"replicate": 1, "pipeline": 2},
    "pipeline, FSDP2": {"replicate": 2, "shard": "parameters", "pipeline": 2},
}


def train_example(
    folder,
    layout: dict,
    parallel_spec: ParallelSpec | None = example.PARALLEL_SPEC,
    dtype: torch.dtype = torch.float64,
    **overrides,
) -> nn.Module:
    torch.manual_seed(0)
    model = example.ResidualMLP(width=8, depth=2).to(dtype)
    config = config_from_dict(SETTINGS | {"layout": layout} | overrides)
    train(
        config,
        model=model,
        loss=example.summed_squared_error,
        source=example.SineDataset(),
        parallel_spec=parallel_spec,
        run=folder,
        quiet=True,
    )
    return model


@pytest.fixture(scope="module")
def single_process(tmp_path_factory) -> dict[str, torch.Tensor]:
    return train_example(tmp_path_factory.mktemp("single_process") / "run", {"replicate": 1}).state_dict()


def test_stages_return_their_weights_in_the_dtype_of_the_users_module(tmp_path):
    layout = {"replicate": 1, "pipeline": 2}
    model = train_example(tmp_path / "run", layout, dtype=torch.float32, steps=1)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("mode", ["none", "full"])
def test_fsdp_without_a_parallel_spec_gives_the_weights_of_one_process(mode, single_process, tmp_path):
    layout = {"replicate": 2, "shard": "parameters"}
    state = train_example(tmp_path / "run", layout, None, activation_checkpoint={"mode": mode}).state_dict()
    for name, expected in single_process.items():
        assert torch.allclose(state[name], expected, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parallel_training_of_own_model_gives_the_weights_of_one_process(layout, single_process, tmp_path):
    state = train_example(tmp_path / "run", LAYOUTS[layout]).state_dict()
    for name, expected in single_process.items():
        assert torch.allclose(state[name], expected, rtol=1e-10, atol=1e-12), name


def test_activation_checkpointing_of_own_model_is_bitwise_equal(single_process, tmp_path):
    state = train_example(tmp_path / "run", {"replicate": 1}, activation_checkpoint={"mode": "full"}).state_dict()
    assert all(torch.equal(state[name], expected) for name, expected in single_process.items())


@pytest.mark.parametrize(
    ("layout", "overrides", "parallel_spec", "message"),
    [
        ({"replicate": 1, "tensor": 2}, {}, None, "ParallelSpec.tp_plan is empty"),
        ({"replicate": 1, "tensor": 2}, {}, ParallelSpec(blocks="blocks.*"), "ParallelSpec.tp_plan is empty"),
        (
            {"replicate": 2, "shard": "parameters"},
            {},
            ParallelSpec(blocks="layers.*"),
            "ParallelSpec.blocks = layers.\\* matches no module",
        ),
        (
            {"replicate": 1},
            {"activation_checkpoint": {"mode": "full", "segment": 2}},
            example.PARALLEL_SPEC,
            "needs a model with a BlockStack",
        ),
    ],
)
def test_settings_that_need_a_parallel_spec_raise_without_one(layout, overrides, parallel_spec, message, tmp_path):
    with pytest.raises(Exception, match=message):
        train_example(tmp_path / "run", layout, parallel_spec, **overrides)


def test_fsdp_blocks_that_share_a_parameter_raise(tmp_path):
    torch.manual_seed(0)
    model = example.ResidualMLP(width=8, depth=2)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    config = config_from_dict(SETTINGS | {"layout": {"replicate": 2, "shard": "parameters"}})
    with pytest.raises(Exception, match="shares a parameter"):
        train(
            config, model=model, loss=example.summed_squared_error, source=example.SineDataset(),
            parallel_spec=example.PARALLEL_SPEC, run=tmp_path / "run", quiet=True,
        )  # fmt: skip


def test_decoder_only_rules_do_not_apply_to_own_model(tmp_path):
    """The heads of the preset are not divisible by 3, which does not matter here."""
    train_example(tmp_path / "run", {"replicate": 3, "shard": "parameters"}, batch={"global": 6})
    with pytest.raises(ConfigError, match="is not divisible by the data-parallel degree 3"):
        train_example(tmp_path / "other", {"replicate": 3, "shard": "parameters"}, batch={"global": 8})


class Branching(example.ResidualMLP):
    """Which of two matrices a sample uses depends on the sample, so ranks may use different ones."""

    def __init__(self) -> None:
        super().__init__(width=8, depth=1)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = self.one(x) if float(x.detach().sum()) > 0 else self.other(x)
        return self.head(self.blocks[0](x)).squeeze(-1)


def train_branching(folder, layout: dict, unused: bool, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = (model or Branching()).double()
    settings = SETTINGS | {
        "batch": {"global": 8, "micro": 1},
        "layout": layout,
        "ddp": {"find_unused_parameters": unused},
    }
    train(
        config_from_dict(settings),
        model=model,
        loss=example.summed_squared_error,
        source=example.SineDataset(),
        parallel_spec=ParallelSpec(blocks="blocks.*"),
        run=folder,
        quiet=True,
    )
    return model.state_dict()


def test_find_unused_parameters_allows_ranks_to_use_different_parameters(tmp_path):
    expected = train_branching(tmp_path / "single_process", {"replicate": 1}, False)
    state = train_branching(tmp_path / "sharded", {"replicate": 4, "shard": "parameters"}, True)
    for name, value in expected.items():
        assert torch.allclose(state[name], value, rtol=1e-10, atol=1e-12), name


def test_ranks_that_use_different_parameters_fail_without_find_unused_parameters(tmp_path):
    with pytest.raises(Exception, match=r"ranks used different parameters.*try ddp.find_unused_parameters = true"):
        train_branching(tmp_path / "sharded", {"replicate": 4, "shard": "parameters"}, False)
    assert not list((tmp_path / "sharded").glob("checkpoints/*/manifest.json"))


class Reordering(example.ResidualMLP):
    """The ranks call their blocks in different orders, as they do if the order is drawn at random."""

    def __init__(self) -> None:
        super().__init__(width=8, depth=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        first = dist.get_rank() if dist.is_initialized() else 0
        return self.head(self.blocks[1 - first](self.blocks[first](x))).squeeze(-1)


def test_ranks_that_call_blocks_in_different_orders_fail_before_anything_is_saved(tmp_path):
    message = r"rank 1 step \d+: blocks of the model were called in another order than on rank 0.*layout.shard = none"
    with pytest.raises(NumericsError, match=message):
        train_branching(tmp_path / "run", {"replicate": 2, "shard": "parameters"}, True, Reordering())
    assert not list((tmp_path / "run").glob("checkpoints/*/manifest.json"))


class WithBatchNorm(example.ResidualMLP):
    def __init__(self) -> None:
        super().__init__(width=8, depth=1)
        self.batch_norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](self.batch_norm(self.embed(x)))).squeeze(-1)


def test_fsdp_broadcasts_buffers_as_ddp_does(tmp_path):
    state = {}
    for name, layout in (("ddp", {"replicate": 2}), ("fsdp", {"replicate": 2, "shard": "parameters"})):
        torch.manual_seed(0)
        model = WithBatchNorm().double()
        settings = config_from_dict(SETTINGS | {"layout": layout, "eval": {"holdout": 0.1, "every": 3, "samples": 6}})
        result = train(
            settings, model=model, loss=example.summed_squared_error, source=example.SineDataset(),
            parallel_spec=example.PARALLEL_SPEC, run=tmp_path / name, quiet=True,
        )  # fmt: skip
        state[name] = (model.batch_norm.running_mean, result.evaluations)
    assert torch.allclose(state["ddp"][0], state["fsdp"][0], rtol=1e-10)
    assert state["ddp"][1][0][1] == pytest.approx(state["fsdp"][1][0][1], rel=1e-10)


@pytest.mark.parametrize(
    ("parallel_spec", "message"),
    [
        (ParallelSpec(blocks="blocks.*", before=("entry",)), "names entry, and the model has no such module"),
        (
            ParallelSpec(blocks="blocks.*", tp_plan=lambda: {"blocks.*.upp": example.ColwiseParallel()}),
            "names blocks.*.upp, and the model",
        ),
    ],
)
def test_parallel_spec_with_an_unknown_module_name_raises(parallel_spec, message, tmp_path):
    layout = {"replicate": 2, "shard": "parameters"} if parallel_spec.before else {"replicate": 1, "tensor": 2}
    with pytest.raises(Exception, match=message.replace("*", r"\*")):
        train_example(tmp_path / "run", layout, parallel_spec)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (lambda model: setattr(model.blocks[1], "up", model.blocks[0].up), "shares a parameter"),
        (lambda model: setattr(model, "head_norm", model.blocks[0].norm), "shares a parameter"),
        (lambda model: model.blocks.append(model.blocks[0]), ""),
    ],
)
def test_fsdp_units_find_modules_with_several_names(share, message):
    model = example.ResidualMLP(width=8, depth=2)
    share(model)
    if not message:
        assert len(fsdp_units(model, example.PARALLEL_SPEC)[0]) == 2
        return
    with pytest.raises(ConfigError, match=message):
        fsdp_units(model, example.PARALLEL_SPEC)


def test_modules_around_the_blocks_must_not_contain_a_block():
    with pytest.raises(ConfigError, match="before or after contains a block"):
        fsdp_units(
            example.ResidualMLP(width=8, depth=2),
            ParallelSpec(blocks="blocks.*", before=("embed", "blocks.0")),
        )


class ScaledBlock(example.ResidualBlock):
    """A block with a scalar, which FSDP2 cannot shard."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class HeadFirst(nn.Module):
    """The head is registered first, and one module is never called: both are seen in a forward on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.unused = nn.Linear(8, 8)
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(ScaledBlock(8) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) / self.temperature
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


def test_fsdp_with_an_inferred_spec_scalars_and_an_unused_module_gives_the_weights_of_one_process(tmp_path):
    state = {}
    for name, layout in (("single_process", {"replicate": 1}), ("fsdp", {"replicate": 2, "shard": "parameters"})):
        torch.manual_seed(0)
        model = HeadFirst().double()
        config = config_from_dict(SETTINGS | {"layout": layout})
        train(
            config, model=model, loss=example.summed_squared_error, source=example.SineDataset(),
            run=tmp_path / name, quiet=True,
        )  # fmt: skip
        state[name] = model.state_dict()
    for name, expected in state["single_process"].items():
        assert torch.allclose(state["fsdp"][name], expected, rtol=1e-10, atol=1e-12), name
    start = json.loads((tmp_path / "fsdp" / "events" / "rank-00000.jsonl").read_text().split("\n")[0])
    assert start["inferred"] == [
        "ParallelSpec.blocks: blocks.*", "ParallelSpec.before: embed", "ParallelSpec.after: head"
    ]  # fmt: skip


def test_empty_parameter_is_refused_where_gradients_are_sharded():
    model = nn.ModuleDict({"model": nn.Linear(2, 2)})
    model["model"].extra = nn.Parameter(torch.empty(0, 2))
    spec = ParallelSpec().under_objective()
    require_spec(model, spec, Layout(replicate=2))
    with pytest.raises(ConfigError, match=r"FSDP2 cannot shard extra, an empty parameter of shape \(0, 2\)"):
        require_spec(model, spec, Layout(shard=2))
    model["model"].extra.requires_grad_(False)
    require_spec(model, spec, Layout(shard=2))
