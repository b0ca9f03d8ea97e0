"""Translates the tensor-parallel plan that a model of transformers ships, exactly.

The shipped plan maps names of modules, or of parameters, to styles. Routed experts are not sharded by the tensor axis:
every tensor-parallel rank computes all of them, and the expert axis divides them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from meshwright.core.parallel.parallel_spec import tied_parameters
from meshwright.core.parallel.tensor_plans.local_styles import (
    Colwise,
    LatentKeys,
    LocalStyle,
    PartialGradients,
    Rowwise,
    SumOutput,
    VocabEmbedding,
)
from meshwright.core.parallel.tensor_plans.sharded_region import parameters_in_sharded_region
from meshwright.errors import ConfigError

STYLES: dict[str, Callable[..., ParallelStyle]] = {
    "colwise": Colwise,
    "colwise_gather_output": partial(Colwise, gather=True),
    "colwise_rep": partial(Colwise, gather=True),
    "rowwise": Rowwise,
    "rowwise_split_input": partial(Rowwise, split=True),
    "rowwise_rep": partial(Rowwise, split=True),
    "embedding_rowwise": VocabEmbedding,
    "all_reduce": SumOutput,
}
"""The styles of transformers that need nothing but their name."""

SHARDS_HEADS = {
    "q_proj": "num_attention_heads",
    "q_b_proj": "num_attention_heads",
    "kv_b_proj": "num_attention_heads",
    **dict.fromkeys(("query", "key", "value"), "num_attention_heads"),
    "k_proj": "num_key_value_heads",
    "v_proj": "num_key_value_heads",
}
"""Projections that must be sharded by whole heads, and the setting with their number."""


OWN_PLANS = {
    "bert": {
        **{f"encoder.layer.*.attention.self.{name}": "colwise" for name in ("query", "key", "value")},
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    },
    "vit": {
        **{f"layers.*.attention.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
    },
    "gpt2": {
        "h.*.attn.c_attn": "colwise_gather_output",
        "h.*.attn.c_proj": "rowwise_split_input",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
}
"""Plans of families for which transformers ships none, with names inside of the base model."""


WRONG_PLANS = {"doge": "its attention mask has all heads, and the plan gives each rank some of them"}
"""Families whose shipped plan does not run, and why."""


def find_plan(module: nn.Module) -> dict[str, str]:
    """The plan that transformers ships for a model, or ours; empty for other modules."""
    plan = getattr(module, "tp_plan", None)
    if not isinstance(plan, dict) or plan:
        return plan if isinstance(plan, dict) else {}
    own = OWN_PLANS.get(getattr(getattr(module, "config", None), "model_type", ""), {})
    prefix = getattr(module, "base_model_prefix", "")
    return {f"{prefix}.{name}" if hasattr(module, prefix) else name: style for name, style in own.items()}


def shipped_plans(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, str]]]:
    """(name, module, plan) of the outermost modules with a plan of transformers."""
    found: list[str] = []
    for name, module in model.named_modules():
        plan = find_plan(module)
        if plan and not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found.append(name)
            yield name, module, plan


def transformers_tp_plan(model: nn.Module) -> Mapping[str, ParallelStyle]:
    """The plan of a model that is one of transformers, or has one as a submodule."""
    result: dict[str, ParallelStyle] = {}
    for prefix, module, plan in shipped_plans(model):
        translated = translate(module, plan)
        result |= {f"{prefix}.{name}" if prefix else name: style for name, style in translated.items()}
    return result


def translate(model: nn.Module, plan: Mapping[str, str]) -> dict[str, ParallelStyle]:
    modules, parameters = wildcard_names(model)
    config: Any = model.config
    config = config.get_text_config()
    if reason := WRONG_PLANS.get(config.model_type):
        raise ConfigError(
            f"the tensor-parallel plan that transformers ships for {config.model_type} cannot run: {reason}",
            "try layout.tensor = 1, or ParallelSpec(tp_plan=...)",
        )
    experts = [name for name, style in plan.items() if style == "moe_tp_experts"]
    result: dict[str, ParallelStyle] = {}
    shards: dict[str, dict[str, Shard]] = {}
    for name, style in plan.items():
        if name in experts or any(name.startswith(f"{expert}.") for expert in experts) or style == "replicate":
            continue
        if name in modules:
            result[name] = module_style(name, style, modules[name], config)
        elif name in parameters:
            owner, _, parameter = name.rpartition(".")
            if style != "colwise" or parameters[name].ndim != 1:
                raise unknown_style(name, style)
            shards.setdefault(owner, {})[parameter] = Shard(0)
    for owner, placements in shards.items():
        result[owner] = LocalStyle(placements)
    drop_tied_rows(model, result)
    return result | undeclared_styles(model, result, experts)


def drop_tied_rows(model: nn.Module, plan: dict[str, ParallelStyle]) -> None:
    """A tied weight stays replicated unless the plan shards all of its modules, as those of embedding and head."""
    for names in tied_parameters(model):
        owners = [with_wildcards(name.rpartition(".")[0]) for name in names]
        if not all(isinstance(plan.get(owner), (VocabEmbedding, Colwise)) for owner in owners):
            for owner in owners:
                plan.pop(owner, None)


def undeclared_styles(
    model: nn.Module, plan: Mapping[str, ParallelStyle], experts: list[str]
) -> dict[str, ParallelStyle]:
    """The styles of replicated parameters that work on shards and that the shipped plan does not name."""
    modules = dict(model.named_modules())
    style_of = {name: plan[with_wildcards(name)] for name in modules if with_wildcards(name) in plan}
    sharded = [name for name, style in style_of.items() if isinstance(style, Colwise) and not style.gather]
    parents = {name.rpartition(".")[0] for name in sharded}
    undeclared = {
        (name, parameter)
        for parent in parents
        for name, module in modules.items()
        if (name == parent or name.startswith(f"{parent}.")) and name not in style_of
        for parameter, _ in module.named_parameters(recurse=False)
    }
    if not undeclared:
        return {}
    used = parameters_in_sharded_region(
        model,
        sharded=sharded,
        summed=[name for name, style in style_of.items() if isinstance(style, (Rowwise, SumOutput))],
        passed=[name for name in modules if with_wildcards(name) in experts],
        inputs={"input_ids": torch.zeros(1, 4, dtype=torch.int64, device="meta"), "use_cache": False},
    )
    found = [(with_wildcards(name), parameter) for name, parameter in undeclared if f"{name}.{parameter}" in used]
    names = {name for name, _ in found}
    return {name: PartialGradients(*{parameter for owner, parameter in found if owner == name}) for name in names}


def module_style(name: str, style: str, module: nn.Module, config: Any) -> ParallelStyle:
    if style == "replicated_with_grad_allreduce":
        return PartialGradients(*(parameter for parameter, _ in module.named_parameters(recurse=False)))
    if style == "mla_kv_a_proj":
        return LatentKeys(config.qk_rope_head_dim)
    if style not in STYLES:
        raise unknown_style(name, style)
    options: dict[str, Any] = {"transposed": True} if type(module).__name__ == "Conv1D" else {}
    last = name.rpartition(".")[2]
    if style == "colwise" and last in SHARDS_HEADS:
        heads = getattr(config, SHARDS_HEADS[last], None) or config.num_attention_heads
        options["heads"] = heads if isinstance(heads, int) else 0
    return STYLES[style](**options)


def unknown_style(name: str, style: str) -> ConfigError:
    return ConfigError(
        f"the tensor-parallel plan of transformers gives {name} the style {style}, which has no exact translation",
        "try layout.tensor = 1, or ParallelSpec(tp_plan=...)",
    )


def wildcard_names(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Parameter]]:
    """The modules and parameters by their names in a plan, with `*` for every number."""
    modules = {with_wildcards(name): module for name, module in model.named_modules()}
    parameters = {with_wildcards(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    return modules, parameters


def with_wildcards(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
