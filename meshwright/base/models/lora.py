"""Low-rank adaptation in the spec of a model: which projections have factors, and what is frozen. Torch-free.

A projection `MODULE` with the weight W (out, in) has the factors `MODULE.lora_a` (rank, in) and `MODULE.lora_b`
(out, rank). B is zero at the start, so the first step begins at the base model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from meshwright.base.config import LoraConfig
from meshwright.base.models.huggingface import StoredParameter
from meshwright.base.models.spec import BlockSpec, Cost, Initialization, ModelSpec, ParameterSpec
from meshwright.errors import ConfigError

FACTORS = ("lora_a", "lora_b")
WEIGHT = ".weight"
ROUTER = ".router"


def with_lora(spec: ModelSpec, config: LoraConfig, stored: Iterable[StoredParameter] = ()) -> ModelSpec:
    """The spec of a model with factors beside the target projections, and all other parameters frozen. `stored` are the
    names of its parameters in Hugging Face folders, by which targets may be named, too.
    """
    targets = find_targets(spec, config, stored)
    last_parameter = {
        module: max(i for i, p in enumerate(spec.parameters) if in_module(p, module)) for module in targets
    }
    modules = {index: module for module, index in last_parameter.items()}
    parameters: list[ParameterSpec] = []
    for index, parameter in enumerate(spec.parameters):
        parameters.append(replace(parameter, trainable=False))
        if index in modules:
            parameters += factors(targets[modules[index]], config.rank)
    return replace(spec, parameters=tuple(parameters), blocks=tuple(with_factor_costs(spec, targets, config.rank)))


def in_module(parameter: ParameterSpec, module: str) -> bool:
    return parameter.name.rpartition(".")[0] == module


def factors(weight: ParameterSpec, rank: int) -> Iterator[ParameterSpec]:
    """The factors of a weight. Tensor parallelism shards one of them like the weight: B if it shards the rows of the
    weight, A if it shards the columns. The other factor is replicated, and its gradient is a sum over tensor-parallel
    ranks.
    """
    module, (rows, columns) = weight.name.removesuffix(WEIGHT), weight.shape
    # The variance of PEFT's default, a uniform distribution between -1 / sqrt(in) and 1 / sqrt(in).
    values = {"lora_a": Initialization("normal", 1 / math.sqrt(3 * columns)), "lora_b": Initialization("constant", 0.0)}
    shapes = {"lora_a": (rank, columns), "lora_b": (rows, rank)}
    tp_dims = {"lora_a": 1 if weight.tp_dim == 1 else None, "lora_b": 0 if weight.tp_dim == 0 else None}
    for name in FACTORS:
        yield replace(
            weight,
            name=f"{module}.{name}",
            shape=shapes[name],
            tp_dim=tp_dims[name],
            initialization=values[name],
            trainable=True,
        )


def find_targets(spec: ModelSpec, config: LoraConfig, stored: Iterable[StoredParameter]) -> dict[str, ParameterSpec]:
    """Module -> weight of every target. Raises ConfigError for a pattern without a projection, and for experts."""
    linear = {p.name.removesuffix(WEIGHT): p for p in spec.parameters if is_projection(p)}
    aliases = {s.name.removesuffix(WEIGHT): s.stored.split(".")[-2] for s in stored if s.name.endswith(WEIGHT)}
    frozen = {p.name.rpartition(".")[0] for p in spec.parameters if p.is_expert_weight or is_router(p)}
    targets: dict[str, ParameterSpec] = {}
    for pattern in config.targets:
        if refused := next((name for name in sorted(frozen) if fnmatchcase(name, pattern)), None):
            raise ConfigError(
                f"lora.targets: {pattern} matches {refused}, and experts and routers stay frozen",
                f"expected patterns of projections, such as {', '.join(suggestions(linear))}",
            )
        found = [name for name in linear if fnmatchcase(name, pattern) or aliases.get(name) == pattern]
        if not found:
            raise ConfigError(
                f"lora.targets: {pattern} matches no projection of the family {spec.family}",
                f"expected patterns such as {', '.join(suggestions(linear))}",
            )
        targets |= {name: linear[name] for name in found}
    return {name: linear[name] for name in linear if name in targets}


def is_projection(parameter: ParameterSpec) -> bool:
    """Whether a parameter is the matrix of a linear projection inside of a block."""
    in_block = parameter.name.startswith(f"{parameter.unit}.")
    matrix = parameter.name.endswith(WEIGHT) and len(parameter.shape) == 2
    return in_block and matrix and not parameter.is_expert_weight and not is_router(parameter)


def is_router(parameter: ParameterSpec) -> bool:
    return parameter.name.rpartition(".")[0].endswith(ROUTER)


def suggestions(linear: Iterable[str]) -> list[str]:
    """Patterns that select each kind of projection in all blocks."""
    return sorted({f"*.{'.'.join(name.split('.')[3:])}" for name in linear})


def with_factor_costs(spec: ModelSpec, targets: dict[str, ParameterSpec], rank: int) -> Iterator[BlockSpec]:
    """The blocks with the FLOPs of the factors."""
    for block in spec.blocks:
        sizes = sum(sum(weight.shape) for weight in targets.values() if weight.unit == block.name)
        flops = block.cost.flops + Cost(per_token=2.0 * rank * sizes)
        yield replace(block, cost=replace(block.cost, flops=flops))
