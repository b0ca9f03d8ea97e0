"""infer_parallel_spec: blocks, ends, tied weights, experts and positions are found in models of many families."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

from meshwright.core.parallel.infer_spec import called_in_order, describe_spec, infer_parallel_spec
from meshwright.core.parallel.parallel_spec import ParallelSpec, find_blocks, fsdp_units, parameter_ids

transformers.logging.set_verbosity_error()

DECODER = ("model.layers.*", ("model.embed_tokens",), ("model.norm", "lm_head"))
FAMILIES: dict[str, tuple[str, dict[str, int], str | tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "Llama": ("LlamaForCausalLM", {}, *DECODER),
    "Qwen2": ("Qwen2ForCausalLM", {}, *DECODER),
    "Qwen3": ("Qwen3ForCausalLM", {}, *DECODER),
    "Mistral": ("MistralForCausalLM", {}, *DECODER),
    "Gemma2": ("Gemma2ForCausalLM", {}, *DECODER),
    "Mixtral": ("MixtralForCausalLM", {}, *DECODER),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", {"num_experts": 4}, *DECODER),
    "DeepseekV3": ("DeepseekV3ForCausalLM", {"first_k_dense_replace": 1, "n_routed_experts": 8}, *DECODER),
    "one layer": ("LlamaForCausalLM", {"num_hidden_layers": 1}, *DECODER),
    "GPT2": (
        "GPT2LMHeadModel",
        {},
        "transformer.h.*",
        ("transformer.wte", "transformer.wpe"),
        ("transformer.ln_f", "lm_head"),
    ),
    "Bert": (
        "BertForSequenceClassification",
        {},
        "bert.encoder.layer.*",
        ("bert.embeddings",),
        ("bert.pooler", "classifier"),
    ),
    "ViT": (
        "ViTForImageClassification",
        {},
        "vit.layers.*",
        ("vit.embeddings",),
        ("vit.layernorm", "classifier"),
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {},
        ("encoder.block.*", "decoder.block.*"),
        ("shared", "encoder.embed_tokens"),
        ("decoder.final_layer_norm", "lm_head"),
    ),
    "ResNet": ("ResNetForImageClassification", {}, "resnet.encoder.stages.*", ("resnet.embedder",), ("classifier",)),
    "Albert shares one layer": ("AlbertForMaskedLM", {}, "", (), ()),
    "Mamba": (
        "MambaForCausalLM",
        {},
        "backbone.layers.*",
        ("backbone.embeddings",),
        ("backbone.norm_f", "lm_head"),
    ),
}


def build(name: str, **settings: int) -> nn.Module:
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        return model_class(model_class.config_class(**({"num_hidden_layers": 2} | settings)))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_and_ends_of_transformers_families(family):
    name, settings, blocks, before, after = FAMILIES[family]
    spec = infer_parallel_spec(build(name, **settings))
    assert (spec.blocks, spec.before, spec.after) == (blocks, before, after)


def test_tied_weights_positions_and_experts_are_seen():
    assert infer_parallel_spec(build("Gemma2ForCausalLM")).tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert infer_parallel_spec(build("LlamaForCausalLM")).positions == "position_ids"
    assert infer_parallel_spec(build("ViTForImageClassification")).positions == ""
    assert infer_parallel_spec(build("MixtralForCausalLM")).experts == "model.layers.*.mlp.experts"
    deepseek = build("DeepseekV3ForCausalLM", first_k_dense_replace=1, n_routed_experts=8)
    assert infer_parallel_spec(deepseek).experts == "model.layers.*.mlp.experts"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x)).relu()  # type: ignore[no-any-return]


class StagedCNN(nn.Module):
    """Stages of different widths, a head that is registered first, and a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 2)
        self.stem = nn.Conv1d(3, 4, 1)
        self.stage1 = nn.Sequential(*[Block(4) for _ in range(2)])
        self.wider = nn.Conv1d(4, 32, 1)
        self.stage2 = nn.Sequential(*[Block(32) for _ in range(2)])
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stage2(self.wider(self.stage1(self.stem(x)))).mean(-1))  # type: ignore[no-any-return]


def test_stages_of_one_class_are_all_blocks():
    spec = infer_parallel_spec(StagedCNN())
    assert spec.blocks == ("stage1.*", "stage2.*")
    assert len(find_blocks(StagedCNN(), spec)) == 4


def test_a_forward_orders_the_ends_by_their_calls():
    model = StagedCNN()
    assert infer_parallel_spec(model).before == ("head", "stem")
    spec = infer_parallel_spec(model, run=lambda: model(torch.zeros(2, 3, 8)))
    assert (spec.before, spec.after) == (("stem",), ("head",))


class WithHeads(nn.Module):
    """Blocks, one of several equal heads, and an embedding; `skip` is a block that the forward does not call."""

    def __init__(self, skip: int | None = None) -> None:
        super().__init__()
        self.skip, self.embed = skip, nn.Linear(3, 4)
        self.blocks = nn.ModuleList([Block(4) for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(4, 40) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).mT
        for index, block in enumerate(self.blocks):
            x = x if index == self.skip else block(x)
        return self.heads[0](x.mT)  # type: ignore[no-any-return]


def test_modules_that_a_forward_does_not_call_once_each_in_order_are_no_fsdp_units():
    def spec_of(model: nn.Module) -> ParallelSpec:
        return infer_parallel_spec(model, run=lambda: model(torch.zeros(2, 8, 3)))

    routed = spec_of(WithHeads())
    assert infer_parallel_spec(WithHeads()).blocks == ("blocks.*", "heads.*")
    assert (routed.blocks, routed.before, routed.after) == ("blocks.*", ("embed",), ())
    dropped = spec_of(WithHeads(skip=1))
    assert (dropped.blocks, dropped.before, dropped.after) == ("", (), ())
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    assert called_in_order([first, second], [first, second])
    assert not called_in_order([first, second], [second, first])


def test_a_sequential_of_equal_modules_is_a_list_of_blocks_at_the_root():
    spec = infer_parallel_spec(nn.Sequential(Block(4), Block(4)))
    assert (spec.blocks, spec.before, spec.after) == ("*", (), ())


def test_a_model_without_repeated_modules_is_one_fsdp_unit_inside_its_objective():
    objective = nn.Module()
    objective.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))
    spec = infer_parallel_spec(objective.model)
    assert spec.blocks == ""
    units, _ = fsdp_units(objective, spec.under_objective())
    assert units == [[objective.model]]
    assert "the whole model is one FSDP unit" in describe_spec(spec)[0]


def test_every_parameter_is_in_a_unit_or_left_to_the_root():
    model = StagedCNN()
    units, _ = fsdp_units(model, infer_parallel_spec(model))
    in_units = set().union(*(parameter_ids(unit) for unit in units))
    assert parameter_ids([model]) - in_units == parameter_ids([model.wider])


def test_given_fields_win_and_others_are_inferred():
    model = StagedCNN()
    inferred = infer_parallel_spec(model)
    spec = infer_parallel_spec(model, ParallelSpec(after=("unused",)))
    assert (spec.blocks, spec.before, spec.after) == (inferred.blocks, inferred.before, ("unused",))
    around_last_stage = infer_parallel_spec(model, ParallelSpec(blocks="stage2.*"))
    assert around_last_stage.before == ("head", "stem", "stage1", "wider")


def test_description_names_only_inferred_fields():
    spec = infer_parallel_spec(build("Gemma2ForCausalLM"))
    lines = describe_spec(spec, given=ParallelSpec(before=("model.embed_tokens",)))
    assert "ParallelSpec.blocks: model.layers.*" in lines
    assert "ParallelSpec.tied: model.embed_tokens.weight = lm_head.weight" in lines
    assert not any(line.startswith("ParallelSpec.before") for line in lines)
