"""AdamW with global-norm clipping folded into its update, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.config import OptimizerConfig, ScheduleConfig
from meshwright.parallel.local_shard import LocalShard, local_shard, local_tensor
from meshwright.parallel.world import World
from meshwright.topology.layout import Layout


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """The rate that step (0-based) of so many uses."""
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return peak
    start = max(schedule.warmup, steps - round(schedule.decay * steps)) if schedule.kind == "wsd" else schedule.warmup
    done = min(1.0, max(0.0, (step - start) / max(1, steps - 1 - start)))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if schedule.kind == "cosine" else 1 - done
    return peak * (schedule.floor + (1 - schedule.floor) * shape)


class AdamW:
    """AdamW over the blocks that this rank holds; it is elementwise, so no block needs another. `update` scales, clips
    and steps in one pass over the gradients; a gradient that is not finite changes nothing.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        layout: Layout | None = None,
        world: World | None = None,
        offload: bool = False,
    ) -> None:
        self.clip, self.offload = config.clip, offload
        self.fused = config.implementation == "fused"
        self.world = world or World()
        self.layout = layout or Layout(replicate=self.world.size)
        self.names = [name for name, p in named.items() if p.requires_grad]
        self.parameters = [named[name] for name in self.names]
        self.blocks = [local_shard(parameter) for parameter in self.parameters]
        self.owned = [self._own(p, block) for p, block in zip(self.parameters, self.blocks, strict=True)]
        """what AdamW works on: the parameters, the blocks of those that are cut, or copies in host memory"""
        self.used = 0
        """a word of which parameters had a gradient: ranks must agree on it"""
        self.cut = self.layout.pipeline > 1 or any(block.sharded_axes for block in self.blocks)
        """whether any rank holds what another does not"""
        leads = {
            cut: self.layout.replica_group(self.world.rank, cut)[0]
            for cut in {block.sharded_axes for block in self.blocks}
        }
        self.counted = [leads[block.sharded_axes] == self.world.rank for block in self.blocks]
        """whether this rank is the one of those holding the same block that counts it"""
        matrices = [p for p in self.owned if p.ndim >= 2]
        vectors = [p for p in self.owned if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            **({"fused": True} if self.fused else {"foreach": True}),
        )
        for parameter in self.owned:  # what AdamW makes at its first step: a checkpoint always has a place to go
            self.adamw.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if self.fused else "cpu"),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }

    def _own(self, parameter: nn.Parameter, block: LocalShard) -> nn.Parameter:
        if self.offload:
            host = torch.empty(block.local.shape, dtype=block.local.dtype, pin_memory=block.local.is_cuda)
            return nn.Parameter(host.copy_(block.local))
        return nn.Parameter(block.local) if isinstance(parameter, DTensor) else parameter

    def moments(self) -> dict[str, LocalShard]:
        """AdamW's state, cut as the parameters are, by parameter name and key."""
        return {
            f"{name}/{key}": block.with_local(value) if value.ndim or not block.shape else local_shard(value)
            for name, block, owned in zip(self.names, self.blocks, self.owned, strict=True)
            for key, value in self.adamw.state[owned].items()
        }

    def reload(self) -> None:
        """The parameters were changed from outside: copies in host memory follow."""
        if self.offload:
            with torch.no_grad():
                for owned, block in zip(self.owned, self.blocks, strict=True):
                    owned.copy_(block.local)

    def gradients(self) -> list[tuple[Tensor, bool]]:
        """This rank's blocks of the gradients, and whether it counts them."""
        pairs = zip(self.parameters, self.counted, strict=True)
        return [(local_tensor(p.grad), counted) for p, counted in pairs if p.grad is not None]

    def gradient_norm(self) -> Tensor:
        """The norm over all parameters, each counted once, of gradients that are already the sum over ranks."""
        gradients = self.gradients()
        have = bytes(p.grad is not None for p in self.parameters)
        self.used = 0 if all(have) else zlib.crc32(have)  # stages do not have as many
        if not self.cut:
            return torch.nn.utils.get_total_norm([gradient for gradient, _ in gradients], foreach=True)
        own = [gradient for gradient, counted in gradients if counted]
        square = torch.zeros((), dtype=torch.float64, device=self.world.device)
        if own:
            square += torch.stack(torch._foreach_norm(own)).double().square().sum()
        return self.world.all_reduce(square, "gradient norm").wait().sqrt().to(self.blocks[0].local.dtype)

    def update(self, lr: float, norm: Tensor, scale: Tensor, finite: Tensor) -> None:
        """One step. `norm` is that of the true gradient; the stored one is `scale` times it."""
        self._take_gradients()
        divisor = scale * torch.clamp(norm / self.clip, min=1.0) if self.clip else scale * torch.ones_like(norm)
        if self.offload:
            divisor, finite = divisor.cpu(), finite.cpu()  # the host waits for the gradients, too
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if self.fused:
            # The fused kernels take both as device scalars: no pass of its own for clipping, no wait for `finite`.
            self.adamw.grad_scale = divisor.float()  # type: ignore[attr-defined]
            self.adamw.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]
            if divisor.dtype == torch.float64:  # the kernels know it in float32 alone
                self._divide(divisor)
                self.adamw.grad_scale = None  # type: ignore[attr-defined]
            self.adamw.step()
        elif bool(finite):
            self._divide(divisor)
            self.adamw.step()
        if self.offload:
            with torch.no_grad():
                for owned, block in zip(self.owned, self.blocks, strict=True):
                    block.local.copy_(owned, non_blocking=True)

    def _divide(self, divisor: Tensor) -> None:
        if gradients := [p.grad for p in self.owned if p.grad is not None]:
            torch._foreach_mul_(gradients, 1.0 / divisor)

    def _take_gradients(self) -> None:
        for parameter, owned in zip(self.parameters, self.owned, strict=True):
            if parameter is not owned and parameter.grad is not None:
                gradient = local_tensor(parameter.grad)
                owned.grad = gradient.to("cpu", non_blocking=True) if self.offload else gradient

    def zero(self, in_place: bool = False) -> None:
        """Lets go of the gradients, or writes zeros where they lie."""
        if in_place:
            torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])
            return
        self.adamw.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            parameter.grad = None
