"""Public bugs of tensor and sequence parallelism: gradients that are partial, doubled, or dropped."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional as F

from meshwright.core.parallel.parallel_spec import ParallelSpec
from tests.prover.custom_cases import CustomCase
from tests.prover.custom_faults import rank, ranks
from tests.prover.custom_models import WIDTH, Block, TokenModel, token_loss
from tests.prover.museum import (
    TENSOR,
    SumGradients,
    SumValues,
    case,
    local_slice,
    public_bug,
    scale_gradient,
    with_block,
)

HEAD_PLAN = ParallelSpec(
    blocks="blocks.*", tp_plan=lambda: {"head": ColwiseParallel(output_layouts=Replicate(), use_local_output=True)}
)
"""The head is sharded by the plan; the blocks of the cases divide their own matrices."""
MISSING = "over the tensor axis"
DIFFERS = "differs between the ranks of the tensor axis"


def blocks(layout, block: type[nn.Module], loss=token_loss) -> CustomCase:
    return case(layout, with_block(TokenModel, block), loss, spec=HEAD_PLAN)


class Divided(Block):
    """A correct block that divides its own matrices among the ranks. The cases replace one of its parts."""

    def forward(self, x: Tensor) -> Tensor:
        mine = local_slice(2 * WIDTH)
        up, bias, down = (SumGradients.apply(p) for p in (self.up.weight, self.up.bias, self.down.weight))
        hidden = self.inner(F.linear(self.enter(self.normalized(x)), up[mine], bias[mine]))
        return x + self.leave(F.linear(hidden, down[:, mine]))

    def normalized(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def enter(self, x: Tensor) -> Tensor:
        return SumGradients.apply(x)

    def leave(self, partial_sum: Tensor) -> Tensor:
        return SumValues.apply(partial_sum) + self.down.bias


class GatherSequence(torch.autograd.Function):
    """The chunks of all ranks, whose backward returns the gradient of the local chunk."""

    @staticmethod
    def forward(_context, chunk):
        if ranks() == 1:
            return chunk.clone()
        chunks = [torch.empty_like(chunk) for _ in range(ranks())]
        dist.all_gather(chunks, chunk.contiguous())
        return torch.cat(chunks, dim=1)

    @staticmethod
    def backward(_context, gradient):
        return gradient.chunk(ranks(), dim=1)[rank()]


class SequenceNorm(Divided):
    """Each rank normalizes its chunk of the sequence, so the gradient of the norm is a partial sum."""

    def normalized(self, x: Tensor) -> Tensor:
        chunk = SumGradients.apply(x)[:, local_slice(x.shape[1])]
        return GatherSequence.apply(F.layer_norm(chunk, (WIDTH,), *self.norm_parameters()))

    def norm_parameters(self) -> tuple[Tensor, Tensor]:
        return self.norm.weight, self.norm.bias


@public_bug("NVIDIA/Megatron-LM/1446", TENSOR, "blocks.0.norm.weight", MISSING)
def gradient_of_a_sequence_parallel_norm_is_not_summed(layout):
    return blocks(layout, SequenceNorm)


@public_bug("NVIDIA/TransformerEngine/435", TENSOR, "norm", MISSING)
def last_norm_expects_a_reduction_that_nobody_makes(layout):
    class Model(TokenModel):
        block = Divided

        def forward(self, tokens):
            hidden = self.hidden_states(tokens)
            chunk = SumGradients.apply(hidden)[:, local_slice(hidden.shape[1])]
            return self.head(GatherSequence.apply(self.norm(chunk)))

    return case(layout, Model, spec=HEAD_PLAN)


@public_bug("EleutherAI/gpt-neox/1257", TENSOR, "norm.bias", MISSING)
def only_the_weight_of_a_sequence_parallel_norm_is_summed(layout):
    class Half(SequenceNorm):
        def norm_parameters(self):
            return SumGradients.apply(self.norm.weight), self.norm.bias

    return blocks(layout, Half)


@public_bug("NVIDIA/Megatron-LM/1528", TENSOR, "norm", "2 times as large", "tensor axis")
def gradient_of_a_norm_is_summed_once_too_often(layout):
    class Twice(Divided):
        def normalized(self, x):
            weight, bias = SumGradients.apply(self.norm.weight), SumGradients.apply(self.norm.bias)
            return F.layer_norm(x, (WIDTH,), weight, bias)

    return blocks(layout, Twice)


class HeadNorm(Divided):
    """A norm of every head, whose weight all heads and so all ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.head_norm = nn.RMSNorm(4)

    def inner(self, hidden: Tensor) -> Tensor:
        return F.gelu(self.head_norm(hidden.unflatten(-1, (-1, 4))).flatten(-2))


@public_bug("NVIDIA/Megatron-LM/7452", TENSOR, "blocks.0.head_norm.weight", MISSING)
def shared_norm_inside_the_sharded_region(layout):
    return blocks(layout, HeadNorm)


@public_bug("NVIDIA-NeMo/RL/3716", TENSOR, "q_norm.weight", MISSING)
def query_norm_is_not_reduced_by_a_split_train_step(layout):
    class QueryNorm(Divided):
        def __init__(self):
            super().__init__()
            self.q_norm = nn.RMSNorm(WIDTH // 2)

        def inner(self, hidden):
            return F.gelu(self.q_norm(hidden.unflatten(-1, (-1, WIDTH // 2))).flatten(-2))

    return blocks(layout, QueryNorm)


@public_bug("huggingface/transformers/44668", TENSOR, "reduction over the tensor axis")
def norm_over_all_features_computes_on_a_shard(layout):
    class FullNorm(Divided):
        def inner(self, hidden):
            return F.gelu(F.rms_norm(hidden, hidden.shape[-1:]))

    return blocks(layout, FullNorm)


@public_bug("huggingface/transformers/42448", TENSOR, "blocks.0.scale", MISSING)
def plan_has_no_row_for_a_replicated_parameter(layout):
    class Scaled(Divided):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((1,), 1.5))

        def inner(self, hidden):
            return F.gelu(hidden) * self.scale

    return blocks(layout, Scaled)


@public_bug("huggingface/transformers/36132", TENSOR, "embedding.weight", DIFFERS)
def gradients_of_modules_without_a_plan_differ_between_ranks(layout):
    class NoSum(Divided):
        def enter(self, x):
            return x

    return blocks(layout, NoSum)


@public_bug("NovaSky-AI/SkyRL/1886", TENSOR, "embedding.weight", DIFFERS)
def all_reduce_of_a_copy_is_thrown_away(layout):
    class ReduceCopy(torch.autograd.Function):
        @staticmethod
        def forward(_context, x):
            return x.view_as(x)

        @staticmethod
        def backward(_context, gradient):
            if dist.is_initialized():
                dist.all_reduce(gradient.mT.contiguous())
            return gradient

    class Thrown(Divided):
        def enter(self, x):
            return ReduceCopy.apply(x)

    return blocks(layout, Thrown)


class WithMesh(Divided):
    """Has the mesh of the tensor axis, which in these cases is that of all ranks."""

    def mesh(self):
        return dist.device_mesh.init_device_mesh("cpu", (ranks(),))


@public_bug("pytorch/torchtitan/2532", TENSOR, "norm", MISSING)
def to_local_without_gradient_placements(layout):
    class Local(SequenceNorm):
        def norm_parameters(self):
            if ranks() == 1:
                return super().norm_parameters()
            mesh = dist.device_mesh.init_device_mesh("cpu", (ranks(),))
            replicated = (
                DTensor.from_local(p, mesh, [Replicate()], run_check=False).to_local()
                for p in (self.norm.weight, self.norm.bias)
            )
            weight, bias = replicated
            return weight, bias

    return blocks(layout, Local)


@public_bug("pytorch/torchtitan/1805", TENSOR, "embedding.weight", DIFFERS)
def input_of_a_sharded_module_loses_its_reduction_in_to_local(layout):
    class Local(WithMesh):
        def enter(self, x):
            if ranks() == 1:
                return x
            return DTensor.from_local(x, self.mesh(), [Replicate()], run_check=False).to_local()

    return blocks(layout, Local)


@public_bug("pytorch/torchtitan/2106", TENSOR, "reduction over the tensor axis")
def bias_is_added_by_every_rank_before_the_sum(layout):
    class BiasTwice(Divided):
        def leave(self, partial_sum):
            return SumValues.apply(partial_sum + self.down.bias)

    return blocks(layout, BiasTwice)


@public_bug("pytorch/torchtitan/3412", TENSOR, "embedding.weight", DIFFERS)
def partial_gradient_of_a_chunked_loss_is_labeled_replicated(layout):
    class Model(TokenModel):
        block = Divided

        def forward(self, tokens):
            hidden = self.hidden_states(tokens)
            hidden = self.norm(hidden)
            mine = local_slice(len(self.head.weight))
            logits = F.linear(hidden, self.head.weight)
            if ranks() > 1:  # forward is right; backward sees the local part of the vocabulary alone
                kept = torch.zeros_like(logits)
                kept[..., mine] = 1.0
                logits = logits.detach() + (logits - logits.detach()) * kept
            return logits

    return case(
        layout, Model, spec=ParallelSpec(blocks="blocks.*", tp_plan=lambda: {"blocks.0.norm": KeepReplicated()})
    )


class KeepReplicated(ColwiseParallel):
    """A row of a plan that shards nothing."""

    def _apply(self, module: nn.Module, device_mesh) -> nn.Module:
        return module


@public_bug("pytorch/torchtitan/2416", TENSOR, "correct down to model.blocks.1.up.weight", "tensor axis")
def from_local_adds_a_reduction_in_backward(layout):
    class Summed(Divided):
        def enter(self, x):
            return SumGradients.apply(scale_gradient(SumGradients.apply(x), 1.0) if ranks() > 1 else x)

    return blocks(layout, Summed)


@public_bug("pytorch/pytorch/172932", TENSOR, "blocks.1", "tensor axis")
def partial_sum_through_to_local_and_from_local(layout):
    class RoundTrip(WithMesh):
        def leave(self, partial_sum):
            if ranks() == 1:
                return partial_sum + self.down.bias
            total = DTensor.from_local(partial_sum, self.mesh(), [Partial()], run_check=False)
            total = total.redistribute(placements=[Replicate()]).to_local()
            return scale_gradient(total, 1 / ranks()) + self.down.bias

    return blocks(layout, RoundTrip)
