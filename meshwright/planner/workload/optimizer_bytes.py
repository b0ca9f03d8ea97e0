"""Bytes of optimizer state and the trained part of a model, as optimizers and groups declare them; torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.base.config import LoraConfig, ModelConfig, OptimizerConfig, RunConfig
from meshwright.base.models.lora import FACTORS
from meshwright.base.models.registry import frozen_spec
from meshwright.base.models.spec import AFTER, BEFORE, ROOT, ModelSpec, ParameterSpec
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.topology.optimizer_state import OUTSIDE_BLOCKS, state_tensors, update_rule
from meshwright.planner.workload.trainer_profile import TrainerProfile

LowRankFactors = tuple[int, int, int, int | None, float]
"""Rank, inputs, outputs, the dimension of the weight that tensor parallelism shards, and how many a block has."""


@dataclass(frozen=True)
class TrainedShares:
    """Which part of a model is trained: shares of 1, of blocks in the mean. All of it, without low-rank adaptation and
    frozen groups.
    """

    parameters: float = 1.0
    """elements of the model, and those of factors relative to them"""
    frozen: float = 0.0
    """elements of the model that are frozen"""
    before: float = 1.0
    """elements before the blocks"""
    block: float = 1.0
    """elements of the blocks, without factors and experts"""
    experts: float = 1.0
    """elements of the experts"""
    after: float = 1.0
    """elements after the blocks"""
    head: bool = True
    """the output projection"""
    mixer: float = 1.0
    """matrices of mixers, by their elements"""
    ffn: float = 1.0
    """matrices of dense feed-forwards and shared experts"""
    routed: float = 1.0
    """matrices of routed experts and routers"""
    norms: float = 1.0
    """vectors of blocks"""
    mixer_inputs: float = 1.0
    """matmuls with the input of a mixer that save it: their weight is trained, or has factors"""
    ffn_inputs: float = 1.0
    """the same of feed-forwards"""
    mixer_products: float = 1.0
    """matmuls at the end of a mixer that save their input"""
    ffn_products: float = 1.0
    """matmuls at the end of a feed-forward that save their input"""
    reached: float = 1.0
    """blocks that backward runs through: it ends at the first trained parameter"""
    leading: float = 0.0
    """blocks where backward ends, whose input has no gradient"""
    factors: tuple[LowRankFactors, ...] = ()
    """low-rank factors of a block"""

    @property
    def least(self) -> float:
        """The smallest share of a unit."""
        return min(self.before, self.block, self.experts, self.after)

    def factor_elements(self, tensor: int = 1) -> float:
        """Elements of the factors of a block on one rank."""
        return sum(
            count * rank * ((inputs // tensor if dim == 1 else inputs) + (outputs // tensor if dim == 0 else outputs))
            for rank, inputs, outputs, dim, count in self.factors
        )


ALL_TRAINED = TrainedShares()


def trained_shares(config: RunConfig | None, model: object) -> TrainedShares:
    """The trained part of a traced model, or of that of the config."""
    if isinstance(model, TracedModel):
        return shares_of_spec(model.spec)
    if config is None or not (config.lora.enabled or any(group.frozen for group in config.optimizer.groups)):
        return ALL_TRAINED
    return shares_of_family(config.optimizer, config.model, config.lora)


@lru_cache(maxsize=64)
def shares_of_family(config: OptimizerConfig, model: ModelConfig, lora: LoraConfig) -> TrainedShares:
    return shares_of_spec(frozen_spec(model, lora, config))


def shares_of_spec(spec: ModelSpec, blocks: Iterable[str] | None = None) -> TrainedShares:
    """The shares of a model, or of these blocks of it."""
    if all(parameter.trainable for parameter in spec.parameters):
        return ALL_TRAINED
    names = spec.block_names if blocks is None else tuple(blocks)
    weights = [p for p in spec.parameters if not is_factor(spec, p)]
    members = [[p for p in weights if p.unit == name or p.unit.startswith(f"{name}.")] for name in names]
    members = [block for block in members if block]  # a block whose weights are all tied has none of its own
    inside = [parameter for block in members for parameter in block]
    adapted = {p.name.rpartition(".")[0] for p in spec.parameters if is_factor(spec, p)}
    dense = [p for p in inside if not p.is_expert_weight]
    matrices = [p for p in dense if len(p.shape) > 1]
    mixers, routers = [p for p in matrices if ".attention." in p.name], [p for p in matrices if ".router." in p.name]
    ffn = [p for p in matrices if p not in mixers and p not in routers]

    def saved(matmuls: Iterable[ParameterSpec]) -> float:
        needed = [p.trainable or p.name.rpartition(".")[0] in adapted for p in matmuls]
        return sum(needed) / len(needed) if needed else 1.0

    order = {parameter.name: index for index, parameter in enumerate(spec.parameters)}
    first = next((order[p.name] for p in spec.parameters if p.trainable), len(order))
    before, after = [p for p in weights if p.unit in (BEFORE, ROOT)], [p for p in weights if p.unit == AFTER]
    heads = [p for p in after if len(p.shape) > 1] or [p for p in before if len(p.shape) > 1]
    frozen = 1 - trained_part(weights)
    factors = sum(p.local_numel() for p in spec.parameters if is_factor(spec, p))
    return TrainedShares(
        1 - frozen + factors / sum(p.local_numel() for p in weights),
        frozen,
        trained_part(before),
        trained_part(dense),
        trained_part([p for p in inside if p.is_expert_weight]),
        trained_part(after or before),
        heads[-1 if after else 0].trainable if heads else True,
        trained_part(mixers),
        trained_part(ffn),
        trained_part([*routers, *(p for p in inside if p.is_expert_weight)]),
        trained_part([p for p in dense if len(p.shape) == 1]),
        saved(p for p in mixers if p.tp_dim != 1),
        saved(p for p in ffn if p.tp_dim != 1),
        saved(p for p in mixers if p.tp_dim == 1),
        saved(p for p in ffn if p.tp_dim == 1),
        sum(first <= order[block[-1].name] for block in members) / max(1, len(members)),
        sum(order[block[0].name] <= first <= order[block[-1].name] for block in members) / max(1, len(members)),
        tuple(low_rank_factors(spec, names)),
    )


def is_factor(spec: ModelSpec, parameter: ParameterSpec, names: tuple[str, ...] = FACTORS) -> bool:
    """Whether a parameter is a low-rank factor of `lora.rank`. A traced model has only parameters of its own, whatever
    their names.
    """
    return spec.architecture is not None and parameter.name.endswith(names)


def low_rank_factors(spec: ModelSpec, blocks: Sequence[str]) -> list[LowRankFactors]:
    """The factors of these blocks, equal ones together."""
    counts: dict[tuple[int, int, int, int | None], int] = {}
    for parameter in spec.parameters:
        if parameter.unit in blocks and is_factor(spec, parameter, FACTORS[:1]):
            weight = spec.by_name[f"{parameter.name.removesuffix(FACTORS[0])}weight"]
            key = parameter.shape[0], weight.shape[1], weight.shape[0], weight.tp_dim
            counts[key] = counts.get(key, 0) + 1
    return [(*key, count / len(blocks)) for key, count in counts.items()]


def trained_part(parameters: Sequence[ParameterSpec]) -> float:
    """The share of elements that are trained; 1 of none."""
    total = sum(parameter.local_numel() for parameter in parameters)
    trained = sum(parameter.local_numel() for parameter in parameters if parameter.trainable)
    return trained / total if total else 1.0


def optimizer_bytes(trainer: TrainerProfile, config: RunConfig | None, model: object) -> float:
    """Mean bytes of optimizer state and master weights per trained parameter of a Meshwright run in float32; another
    trainer's are in its profile. `model` is a traced model, or that of the config.
    """
    if config is None:
        return trainer.optimizer_bytes + trainer.master_bytes
    if isinstance(model, TracedModel):
        return mean_bytes(config.optimizer, model.spec.parameters) + trainer.master_bytes
    return mean_bytes_of_family(config.optimizer, config.model, config.lora) + trainer.master_bytes


@lru_cache(maxsize=64)
def mean_bytes_of_family(config: OptimizerConfig, model: ModelConfig, lora: LoraConfig) -> float:
    return mean_bytes(config, frozen_spec(model, lora, config).parameters)


def mean_bytes(config: OptimizerConfig, parameters: Sequence[ParameterSpec]) -> float:
    """Mean bytes per trained parameter, without the numbers that an optimizer keeps for each tensor."""
    total = elements = 0
    for parameter in parameters:
        if parameter.trainable:
            rule = update_rule(config, parameter.name, parameter.shape, parameter.unit not in OUTSIDE_BLOCKS)
            tensors = state_tensors(config, rule, parameter.shape)
            total += sum(tensor.nbytes(parameter.shape, 4) for tensor in tensors if tensor.dims)
            elements += parameter.local_numel()
    return total / max(1, elements)
