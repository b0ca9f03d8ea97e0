"""Torch's private names, all in this file: what FSDP2 holds, by class, and how stages of a pipeline first meet."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage


def fsdp_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's shard and gathered form, and the gradients that FSDP keeps out of `.grad`. A gathered parameter
    keeps its storage for ever and is freed by resizing it to nothing, so it may be named while it is empty.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        several = hasattr(state, "_fsdp_param_groups")  # older releases have at most one group a module
        for group in filter(None, state._fsdp_param_groups if several else [state._fsdp_param_group]):
            if group._partial_reduce_output is not None:
                yield "gradient", group._partial_reduce_output
            for held in group.fsdp_params:
                yield "parameter", held.sharded_param
                yield from (("parameter", tensor) for tensor in held.all_gather_outputs)
                for name in ("_sharded_post_forward_param_data", "_unsharded_param"):
                    if getattr(held, name, None) is not None:
                        yield "parameter", getattr(held, name)
                if held.unsharded_accumulated_grad is not None:
                    yield "gradient", held.unsharded_accumulated_grad


class MeetingStage(PipelineStage):
    """Before the first step torch sends a word to each neighbour, in older releases also to itself, where a V turns
    round: Gloo has no such pair.
    """

    def received(self) -> Iterator[Tensor]:
        """What messages of neighbours come into. Torch makes one for every micro-batch, once, and keeps all of them."""
        for infos in (self.args_recv_info, self.grad_recv_info):
            for info in (info for each in infos.values() for info in each):
                buffer = getattr(info, "buffer", None)
                if isinstance(buffer, Tensor):
                    yield buffer

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]
