"""Describes a user's model to the planner: what `models/trace.py` counted on fake tensors; torch-free."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwright.base.models.spec import ROOT, ModelSpec


@dataclass(frozen=True, eq=False)
class TracedModel:
    """A model of one's own. Blocks may differ; the planner uses their mean where a stage has some of them."""

    name: str
    """name of the model"""
    spec: ModelSpec
    """parameters and costs, with the parameters of the blocks in the compute precision, as FSDP2 casts them"""
    autocast_spec: ModelSpec
    """the same with all parameters in the precision that they are stored in, as under DDP"""
    sequence: int
    """tokens per sample; 1 if samples are not sequences of tokens"""
    sample_bytes: int
    """bytes of the tensors of one sample"""
    buffer_bytes: int = 0
    """bytes of buffers that data-parallel ranks broadcast"""
    measured: int = 0
    """parts of the loss and metrics that are summed over ranks beside the loss"""
    heads: int = 0
    """query heads of an attention that context parallelism can switch; 0 if there is none"""
    kv_heads: int = 0
    """key and value heads"""
    head_dim: int = 0
    """dimension of one head"""
    experts_active: int = 1
    """routed experts per token"""
    axes: frozenset[str] = frozenset(("shard",))
    """axes of parallelism, besides replication, that can serve the model"""

    latent_attention = None
    shared_ffn = 0
    routing_groups = routing_groups_active = 0
    loss_in_head_unit = False

    @cached_property
    def tied_embeddings(self) -> bool:
        """Whether a unit stays unsharded throughout the step: that of tied weights, and of parameters in no block."""
        return self.unit_parameters()[ROOT] > 0

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return max(1, len(self.spec.blocks))

    @cached_property
    def parameters(self) -> int:
        """All parameters of the model."""
        return self.spec.parameter_count

    @property
    def active_parameters(self) -> int:
        """Parameters of the model; which of them a token uses is not traced."""
        return self.parameters

    @cached_property
    def experts(self) -> int:
        """Routed experts per layer; 0 if the experts are not declared."""
        return max((p.shape[0] for p in self.spec.parameters if p.is_expert_weight), default=0)

    @cached_property
    def width(self) -> int:
        """Elements of the hidden states per token."""
        output = max((block.cost.output.of(1) for block in self.spec.blocks), default=0.0)
        element_bytes = 8 if self.spec.parameters[0].dtype == "float64" else 4
        return max(1, round(output / element_bytes / self.sequence))

    def unit_parameters(self, tensor: int = 1, expert: int = 1) -> Counter[str]:
        """Parameters of every FSDP unit on one rank, without expert weights if these are divided over ranks."""
        numel: Counter[str] = Counter()
        for parameter in self.spec.parameters:
            if expert == 1 or not parameter.is_expert_weight:
                numel[parameter.unit] += parameter.local_numel(tensor)
        return numel

    @cached_property
    def all_expert_parameters(self) -> int:
        """Parameters of all experts of all layers, if they are declared."""
        return sum(parameter.local_numel() for parameter in self.spec.parameters if parameter.is_expert_weight)

    @cached_property
    def tensor_share(self) -> float:
        """The share of the weights of the blocks that the tensor-parallel plan shards."""
        weights = [p for p in self.spec.parameters if p.unit in self.spec.block_names and len(p.shape) > 1]
        sharded = sum(p.local_numel() for p in weights if p.tp_dim is not None)
        return sharded / max(1, sum(p.local_numel() for p in weights))

    def tensor_degree_divides(self, degree: int) -> bool:
        """Whether every parameter of the tensor-parallel plan, and every head, divides evenly."""
        if degree == 1:
            return True
        sharded = [p.shape[p.tp_dim] for p in self.spec.parameters if p.tp_dim is not None]
        return bool(sharded) and all(size % degree == 0 for size in (*sharded, self.heads, self.kv_heads))

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "layers": self.layers, "width": self.width, "sequence": self.sequence}
