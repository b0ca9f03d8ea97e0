"""The pipeline stages of one rank, and the weight that the first and the last stage share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.config import RunConfig, derive_batch
from meshwright.config.parallelism import ScheduleName
from meshwright.models.llama.model import LanguageModel
from meshwright.models.registry import block_costs
from meshwright.parallel.local_shard import local_tensor
from meshwright.parallel.parallel_spec import ParallelSpec
from meshwright.topology.layout import Layout
from meshwright.topology.parameter_shards import PipelinePlacement, pipeline_placement
from meshwright.topology.schedules import rank_of_stage

TIED_COPIES = {"head.weight": "decoder.embedding.weight"}
"""Copy -> owner: in a pipeline, a tied head has a copy of the embedding."""

STAGE_SPEC = ParallelSpec(blocks="blocks.*", before=("embedding",), after=("norm", "head"), experts="blocks.*.ffn.bank")


@dataclass(frozen=True)
class StagePlan:
    """The schedule of a pipeline, the stages of this rank, and the activations between stages."""

    schedule: ScheduleName
    ranks: int
    rank: int
    placement: PipelinePlacement
    """the stages of this rank and their blocks"""
    micro_batches: int
    hidden_shape: tuple[int, ...]
    """the shape of a micro-batch's activations between stages"""
    dtype: torch.dtype

    @property
    def last_stage(self) -> int:
        return self.placement.stage_count - 1

    def rank_of_stage(self, stage: int) -> int:
        """The pipeline rank that has a stage."""
        return rank_of_stage(self.schedule, self.ranks, stage)


def stage_plan(config: RunConfig, layout: Layout, rank: int) -> StagePlan:
    batch = derive_batch(config.batch, layout.data_degree)
    local_sequence = config.data.sequence // (layout.context * layout.tensor)
    return StagePlan(
        config.pipeline.schedule,
        layout.pipeline,
        layout.coordinates(rank)["pipeline"],
        pipeline_placement(config, layout, rank, block_costs(config)),
        batch.accumulation,
        (batch.micro, local_sequence, config.model.width),
        torch.float64 if config.precision.compute == "fp64" else torch.float32,
    )


class Stage(nn.Module):
    """Consecutive blocks, with the embedding in the first stage and the head in the last. The modules stay in the model
    too, where they keep their parameter names.
    """

    def __init__(self, model: LanguageModel, blocks: range, first: bool, last: bool) -> None:
        super().__init__()
        decoder = model.decoder
        self.blocks = nn.ModuleDict({str(index): decoder.blocks[str(index)] for index in blocks})  # type: ignore[call-overload]
        self.stack, self.rotary = decoder.stack, decoder.rotary
        self.embedding = decoder.embedding if first else None
        self.norm = decoder.norm if last else None
        self.head = model.head if last else None
        self.autocast: Callable[[], AbstractContextManager[None]] = nullcontext
        """the context of forward only: a schedule runs backward in the same call"""

    def forward(self, x: Tensor, labels: Tensor, documents: Tensor | None = None) -> Tensor:
        """Tokens or hidden states -> hidden states, or the sum of token losses in the last stage."""
        with self.autocast():
            if self.embedding is not None:
                x = self.embedding(x)
            rotary = self.rotary(labels.shape[1], x.dtype, x.device, documents)
            x = self.stack(self.blocks.values(), x, rotary)
            if self.norm is None or self.head is None:
                return x
            total, _ = self.head(self.norm(x), labels)
            return total.reshape(1)  # type: ignore[no-any-return]


def stage_parallel_spec(stage: Stage) -> ParallelSpec:
    """The spec of one stage, which has an embedding, or a norm and a head, or neither."""
    return STAGE_SPEC.restricted_to(stage)


def prune_to_stages(model: nn.Module, plan: StagePlan) -> None:
    """Removes the modules of other ranks' stages from the model. A tied head gets a weight of its own."""
    assert isinstance(model, LanguageModel)
    decoder = model.decoder
    blocks = {str(index): decoder.blocks[index] for span in plan.placement.stages.values() for index in span}
    decoder.blocks = nn.ModuleDict(blocks)  # type: ignore[assignment]
    if plan.placement.has_last_stage and model.head.weight is decoder.embedding.weight:
        model.head.weight = nn.Parameter(torch.empty_like(model.head.weight))
    if not plan.placement.has_first_stage:
        decoder.embedding = None  # type: ignore[assignment]
    if not plan.placement.has_last_stage:
        decoder.norm = model.head = None  # type: ignore[assignment]


def build_stages(model: nn.Module, plan: StagePlan) -> dict[int, Stage]:
    """The stages of this rank, from a pruned model."""
    assert isinstance(model, LanguageModel)
    return {
        index: Stage(model, blocks, first=index == 0, last=index == plan.last_stage)
        for index, blocks in plan.placement.stages.items()
    }


class TiedWeight:
    """A tied weight in the first and the last stage. The first stage owns it: it receives the gradient of the head, and
    sends the new value back after each update.
    """

    def __init__(self, model: nn.Module, plan: StagePlan, group: dist.ProcessGroup) -> None:
        assert isinstance(model, LanguageModel)
        self.owned = model.decoder.embedding.weight if model.decoder.embedding is not None else None
        self.tied_copy = model.head.weight if model.head is not None else None
        self.owner, self.user, self.group = plan.rank_of_stage(0), plan.rank_of_stage(plan.last_stage), group

    @torch.no_grad()
    def sum_gradients(self) -> None:
        if self.tied_copy is not None:
            assert self.tied_copy.grad is not None
            head_grad = local_tensor(self.tied_copy.grad)
            self.tied_copy.grad = None
            if self.owned is None:
                dist.send(head_grad.contiguous(), group=self.group, group_dst=self.owner)
                return
        if self.owned is not None:
            assert self.owned.grad is not None
            embedding_grad = local_tensor(self.owned.grad)
            if self.tied_copy is None:
                head_grad = torch.empty_like(embedding_grad)
                dist.recv(head_grad, group=self.group, group_src=self.user)
            embedding_grad += head_grad

    @torch.no_grad()
    def broadcast_value(self) -> None:
        if self.owned is not None and self.tied_copy is not None:
            local_tensor(self.tied_copy).copy_(local_tensor(self.owned))
        elif self.owned is not None:
            dist.send(local_tensor(self.owned).contiguous(), group=self.group, group_dst=self.user)
        elif self.tied_copy is not None:
            dist.recv(local_tensor(self.tied_copy), group=self.group, group_src=self.owner)
