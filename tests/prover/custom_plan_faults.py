"""Faults in what users say about parallelism: sharded blocks, tensor-parallel plans, and reductions of their own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F

from meshwright.core.parallel.parallel_spec import ParallelSpec
from tests.prover.custom_cases import CustomCase
from tests.prover.custom_faults import SHARD, TENSOR, TENSOR_FORWARD, custom_fault, rank, ranks, tokens
from tests.prover.custom_models import WIDTH, Block, TokenModel, token_loss

# Sharded parameters


@custom_fault(SHARD, "shares a parameter")
def parameter_shared_by_two_blocks(layout):
    module = TokenModel()
    module.blocks[1].up.weight = module.blocks[0].up.weight
    return CustomCase(module, token_loss, layout)


@custom_fault(SHARD, "mixed torch.Tensor and DTensor")
def weight_read_outside_of_its_block(layout):
    class Reading(TokenModel):
        def forward(self, tokens):
            return super().forward(tokens) * (1 + 0.01 * self.blocks[0].up.weight.detach().norm())

    return tokens(layout, Reading)


# Tensor-parallel plans


def tensor_fault(layout, plan, module: type[TokenModel] = TokenModel, **fields) -> CustomCase:
    spec = ParallelSpec(
        blocks="blocks.*", tp_plan=lambda: {f"blocks.*.{name}": style for name, style in plan().items()}
    )
    return tokens(layout, module, spec=spec, **fields)


def with_block(block: type[Block]) -> type[TokenModel]:
    return type("TokenModel", (TokenModel,), {"block": block})


@custom_fault(TENSOR, "must have same reduction dim")
def plan_with_rows_and_columns_exchanged(layout):
    return tensor_fault(layout, lambda: {"up": RowwiseParallel(), "down": ColwiseParallel()})


@custom_fault(TENSOR, "shapes cannot be multiplied")
def plan_without_the_second_matrix(layout):
    return tensor_fault(layout, lambda: {"up": ColwiseParallel()})


class WithoutReduction(ParallelStyle):
    """A row-parallel linear layer whose partial sums are never added."""

    def _apply(self, module: nn.Module, device_mesh) -> nn.Module:
        mine, parts = device_mesh.get_local_rank(), device_mesh.size()
        weight = module.weight.detach().chunk(parts, dim=1)[mine]

        def forward(x):
            full = module.weight.chunk(parts, dim=1)[mine]
            return F.linear(x, full, module.bias)

        assert weight is not None
        module.forward = forward
        return module


@custom_fault(TENSOR, TENSOR_FORWARD, "differs between the ranks of the tensor axis")
def plan_without_the_sum_over_rows(layout):
    return tensor_fault(layout, lambda: {"up": ColwiseParallel(), "down": WithoutReduction()})


class SummedTwice(RowwiseParallel):
    """A row-parallel linear layer whose result is summed once more."""

    def _apply(self, module: nn.Module, device_mesh) -> nn.Module:
        module = super()._apply(module, device_mesh)

        def hook(_module, _inputs, output):
            total = output.clone()
            dist.all_reduce(total, group=device_mesh.get_group())
            return output + (total - output).detach()

        module.register_forward_hook(hook)
        return module


@custom_fault(TENSOR, TENSOR_FORWARD)
def plan_with_a_sum_too_many(layout):
    return tensor_fault(layout, lambda: {"up": ColwiseParallel(), "down": SummedTwice()})


class Scaled(Block):
    """A block with a scale, equal on all ranks, inside of the sharded region."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def inner(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden) * self.scale


@custom_fault(TENSOR, "partial gradient of model.blocks.0.scale, a replicated parameter, over the tensor axis")
def scale_inside_of_the_sharded_region(layout):
    return tensor_fault(layout, lambda: {"up": ColwiseParallel(), "down": RowwiseParallel()}, with_block(Scaled))


class CopyWithoutSum(torch.autograd.Function):
    """Copies to the tensor-parallel region; its backward does not add the gradients of the ranks."""

    @staticmethod
    def forward(_context, x):
        return x.view_as(x)

    @staticmethod
    def backward(_context, gradient):
        return gradient


class SumOfRows(torch.autograd.Function):
    @staticmethod
    def forward(_context, x):
        x = x.clone()
        if dist.is_initialized():
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_context, gradient):
        return gradient


class OwnParallel(Block):
    """A block that divides its own matrices among the ranks, with a backward of its own."""

    copy = CopyWithoutSum

    def forward(self, x: Tensor) -> Tensor:
        mine = slice(rank() * 2 * WIDTH // ranks(), (rank() + 1) * 2 * WIDTH // ranks())
        hidden = F.gelu(F.linear(self.copy.apply(self.norm(x)), self.up.weight[mine], self.up.bias[mine]))
        return x + SumOfRows.apply(F.linear(hidden, self.down.weight[:, mine]))


@custom_fault(
    TENSOR, "gradient of model.embedding.weight, a replicated parameter, differs between the ranks of the tensor axis"
)
def autograd_function_without_a_sum_in_backward(layout):
    plan = ParallelSpec(blocks="blocks.*", tp_plan=lambda: {"head": ColwiseParallel(output_layouts=Replicate())})
    return tokens(layout, with_block(OwnParallel), spec=plan)


@custom_fault(TENSOR, TENSOR_FORWARD)
def dropout_inside_of_the_sharded_region_by_rank(layout):
    class Dropping(Block):
        def inner(self, hidden):
            generator = torch.Generator().manual_seed(rank() + 1)
            return F.gelu(hidden) * (torch.rand(hidden.shape[-1], generator=generator) < 0.7)

    return tensor_fault(layout, lambda: {"up": ColwiseParallel(), "down": RowwiseParallel()}, with_block(Dropping))
