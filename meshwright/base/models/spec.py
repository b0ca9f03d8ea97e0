"""ModelSpec: one declaration of a model, which the runtime, the planner, the simulator and initialization read.

A family declares it (`models/llama/spec.py`); `models/trace.py` makes one of any module. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from meshwright.base.models.architecture import Architecture
from meshwright.base.topology.parameter_shapes import ParameterShape

BEFORE, AFTER, ROOT = "before", "after", "root"
"""FSDP units outside of the blocks: the modules before them, those after them, and the parameters of neither."""
AROUND_BLOCKS = (BEFORE, AFTER, ROOT)


@dataclass(frozen=True)
class Initialization:
    """The initial values of a parameter or buffer."""

    kind: Literal["normal", "constant"]
    value: float
    """the standard deviation of a normal distribution with mean 0, or the constant"""


@dataclass(frozen=True)
class ParameterSpec(ParameterShape):
    """One parameter of the full model. A tied weight is one parameter, under the name of its owner."""

    dtype: str = "float32"
    """the name of its torch dtype; a family's parameters take the dtype of the run's weights instead"""
    initialization: Initialization | None = None
    """None: the module brings its values"""
    decay: bool = True
    """whether the optimizer applies weight decay"""


@dataclass(frozen=True)
class BufferSpec:
    """One buffer of the full model, equal on all ranks."""

    name: str
    shape: tuple[int, ...]
    initialization: Initialization | None = None


@dataclass(frozen=True)
class Cost:
    """FLOPs or bytes of one forward pass as a function of the micro-batch: constant + batch (per_sample +
    per_token sequence + per_pair sequence^2). A model without a sequence has only the first two terms.
    """

    constant: float = 0.0
    per_sample: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0

    def of(self, batch: int, sequence: int = 1) -> float:
        return self.constant + batch * (self.per_sample + sequence * (self.per_token + sequence * self.per_pair))

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.constant + other.constant,
            self.per_sample + other.per_sample,
            self.per_token + other.per_token,
            self.per_pair + other.per_pair,
        )


@dataclass(frozen=True)
class ModuleCost:
    """What a block, or the modules around the blocks, cost in one forward pass of one rank that has all of it."""

    flops: Cost = Cost()
    """as torch.utils.flop_counter counts them: a multiply-add is two, and attention has all pairs of tokens"""
    activations: Cost = Cost()
    """bytes that autograd saves for backward, without parameters, in the dtype of the parameters"""
    backward_flops: Cost = Cost()
    matmul_outputs: Cost = Cost()
    """bytes of the outputs of matrix products and attention"""
    output: Cost = Cost()
    """bytes of the hidden states that it returns"""
    forward_peak: Cost = Cost()
    """bytes in addition to `activations`, at the peak of forward"""
    backward_peak: Cost = Cost()
    """bytes in addition to `activations`, at the peak of backward, without gradients of earlier parameters"""
    gradients_at_peak: Cost = Cost()
    """bytes by which the peak of backward is larger if the gradients of its parameters stay in memory"""
    traffic: Cost = Cost()
    backward_traffic: Cost = Cost()
    """bytes that operators other than matrix products and attention read and write"""
    operators: int = 0
    """operators of forward"""


@dataclass(frozen=True)
class BlockSpec:
    """One block: an FSDP unit, and the smallest part of a pipeline stage."""

    name: str
    """its name in `named_modules()`"""
    cost: ModuleCost = ModuleCost()


@dataclass(frozen=True)
class AttentionSeam:
    """Where attention is switched to that of sequence chunks for context parallelism."""

    modules: str = ""
    """the modules that attend after projection and rotation, (query, key, value, documents) -> output; empty: the calls
    of torch's scaled_dot_product_attention
    """
    is_plain: bool = True
    """whether they compute softmax(q k / sqrt(head size)) v with a causal mask, which ring attention computes in parts;
    all-to-all attention runs any attention on full sequences
    """


@dataclass(frozen=True)
class ModelSpec:
    """A model, declared once."""

    family: str
    """the name of the family, or the class of a traced module"""
    parameters: tuple[ParameterSpec, ...]
    """in the order of `named_parameters()`"""
    blocks: tuple[BlockSpec, ...]
    before: tuple[str, ...] = ()
    """modules with parameters that run before the blocks"""
    after: tuple[str, ...] = ()
    """modules with parameters that run after the blocks"""
    before_cost: ModuleCost = ModuleCost()
    after_cost: ModuleCost = ModuleCost()
    """head and loss included"""
    buffers: tuple[BufferSpec, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    """tied weights: the name of the copy -> the name of its owner, which is in `parameters`"""
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    """module -> the name of its tensor-parallel style (see parallel/tensor_parallel.py); `*` matches one level"""
    attention: AttentionSeam = AttentionSeam()
    architecture: Architecture | None = None
    """the sizes that the planner's formulas read; None: the planner reads the costs of the blocks"""

    @cached_property
    def parameter_count(self) -> int:
        return sum(parameter.local_numel() for parameter in self.parameters)

    @cached_property
    def by_name(self) -> dict[str, ParameterSpec]:
        """The parameters by name; a tied copy has the spec of its owner."""
        owners = {parameter.name: parameter for parameter in self.parameters}
        return owners | {copy: owners[owner] for copy, owner in self.tied.items()}

    @cached_property
    def buffer_initializations(self) -> dict[str, Initialization | None]:
        return {buffer.name: buffer.initialization for buffer in self.buffers}

    @property
    def block_pattern(self) -> str:
        """The names of the blocks with `*` for their numbers."""
        return f"{self.blocks[0].name.rpartition('.')[0]}.*"

    @cached_property
    def untied_parameters(self) -> tuple[ParameterSpec, ...]:
        """The parameters of a pipeline: the copy of a tied weight is a parameter of its own, and the modules around the
        blocks are FSDP units whether or not they share a weight.
        """
        copies = (replace(self.by_name[copy], name=copy) for copy in self.tied)
        parameters = (*self.parameters, *copies)
        return tuple(replace(parameter, unit=self._unit_in_pipeline(parameter)) for parameter in parameters)

    def _unit_in_pipeline(self, parameter: ParameterSpec) -> str:
        if parameter.unit != ROOT:
            return parameter.unit
        groups = {BEFORE: self.before, AFTER: self.after}
        return next(
            (unit for unit, names in groups.items() if parameter.name.startswith(tuple(f"{name}." for name in names))),
            AFTER if parameter.name.startswith("loss.") else ROOT,  # a loss beside the model is in the last stage
        )

    @property
    def block_names(self) -> tuple[str, ...]:
        return tuple(block.name for block in self.blocks)

    def block_costs(self, sequence: int) -> tuple[float, ...]:
        """FLOPs per sample of every block; the first and the last block include those of the modules around them.
        Causal attention computes half of the pairs of tokens.
        """
        flops = [block.cost.flops for block in self.blocks]
        costs = [cost.of(1, sequence) - sequence**2 * cost.per_pair / 2 for cost in flops]
        if not costs:  # a model without blocks
            return ()
        costs[0] += max(1.0, self.before_cost.flops.of(1, sequence))  # a lookup has no FLOPs, and is not free
        costs[-1] += self.after_cost.flops.of(1, sequence)
        return tuple(costs)
