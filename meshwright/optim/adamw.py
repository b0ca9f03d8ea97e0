"""AdamW on local shards, with gradient unscaling and global-norm clipping folded into the update."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.config import OptimizerConfig
from meshwright.parallel.local_shard import LocalShard, local_shard, local_tensor
from meshwright.parallel.world import World
from meshwright.topology.layout import Layout
from meshwright.torch_private import foreach_mul_, foreach_norm, foreach_zero_


class AdamW:
    """torch's AdamW on this rank's local shards; it is elementwise, so no shard needs another. `update` unscales, clips
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
        self.shards = [local_shard(parameter) for parameter in self.parameters]
        self.local_parameters = [self._local(p, shard) for p, shard in zip(self.parameters, self.shards, strict=True)]
        """what torch's AdamW updates: the parameters, local shards of DTensors, or copies in CPU memory"""
        self.used_parameters = 0
        """a hash of which parameters had a gradient, which all ranks must agree on; 0 where all had one"""
        self.sharded = self.layout.pipeline > 1 or any(shard.sharded_axes for shard in self.shards)
        """whether any rank has elements that another rank does not have"""
        first_ranks = {
            axes: self.layout.replica_group(self.world.rank, axes)[0]
            for axes in {shard.sharded_axes for shard in self.shards}
        }
        self.counts_in_norm = [first_ranks[shard.sharded_axes] == self.world.rank for shard in self.shards]
        """per shard: whether this rank adds it to the gradient norm; one of the ranks with the same shard does"""
        matrices = [p for p in self.local_parameters if p.ndim >= 2]
        vectors = [p for p in self.local_parameters if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            **({"fused": True} if self.fused else {"foreach": True}),
        )
        for parameter in self.local_parameters:  # AdamW creates its state lazily; a checkpoint must be able to load it
            self.adamw.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if self.fused else "cpu"),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }

    def _local(self, parameter: nn.Parameter, shard: LocalShard) -> nn.Parameter:
        if self.offload:
            host = torch.empty(shard.local.shape, dtype=shard.local.dtype, pin_memory=shard.local.is_cuda)
            return nn.Parameter(host.copy_(shard.local))
        return nn.Parameter(shard.local) if isinstance(parameter, DTensor) else parameter

    def moments(self) -> dict[str, LocalShard]:
        """Returns the optimizer state, sharded like the parameters, by `parameter name/key`."""
        return {
            f"{name}/{key}": shard.with_local(value) if value.ndim or not shard.shape else local_shard(value)
            for name, shard, local in zip(self.names, self.shards, self.local_parameters, strict=True)
            for key, value in self.adamw.state[local].items()
        }

    def refresh_offloaded(self) -> None:
        """Copies the parameters to CPU memory again after a checkpoint has changed them."""
        if self.offload:
            with torch.no_grad():
                for local, shard in zip(self.local_parameters, self.shards, strict=True):
                    local.copy_(shard.local)

    def gradients(self) -> list[tuple[Tensor, bool]]:
        """Returns the local gradient shards, and for each whether this rank adds it to the norm."""
        pairs = zip(self.parameters, self.counts_in_norm, strict=True)
        return [(local_tensor(p.grad), counts) for p, counts in pairs if p.grad is not None]

    def gradient_norm(self) -> Tensor:
        """Returns the norm over all parameters, each counted once. Gradients are already summed over ranks."""
        gradients = self.gradients()
        has_gradient = bytes(p.grad is not None for p in self.parameters)
        # The hash is 0 where every parameter has a gradient, because pipeline stages differ in their parameters.
        self.used_parameters = 0 if all(has_gradient) else zlib.crc32(has_gradient)
        if not self.sharded:
            return torch.nn.utils.get_total_norm([gradient for gradient, _ in gradients], foreach=True)
        counted = [gradient for gradient, counts in gradients if counts]
        square = torch.zeros((), dtype=torch.float64, device=self.world.device)
        if counted:
            square += torch.stack(foreach_norm(counted)).double().square().sum()
        return self.world.all_reduce(square, "gradient norm").wait().sqrt().to(self.shards[0].local.dtype)

    def update(self, lr: float, norm: Tensor, scale: Tensor, finite: Tensor) -> None:
        """Updates the parameters once. `norm` is that of the unscaled gradient; the stored one is `scale` times it."""
        self._attach_gradients()
        divisor = scale * torch.clamp(norm / self.clip, min=1.0) if self.clip else scale * torch.ones_like(norm)
        if self.offload:
            divisor, finite = divisor.cpu(), finite.cpu()  # the host waits for the gradients, too
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if self.fused:
            # The fused kernels take both as device scalars: no extra pass for clipping, no synchronization on `finite`.
            self.adamw.grad_scale = divisor.float()  # type: ignore[attr-defined]
            self.adamw.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]
            if divisor.dtype == torch.float64:  # the kernels accept a float32 scale only
                self._divide(divisor)
                self.adamw.grad_scale = None  # type: ignore[attr-defined]
            self.adamw.step()
        elif bool(finite):
            self._divide(divisor)
            self.adamw.step()
        if self.offload:
            with torch.no_grad():
                for local, shard in zip(self.local_parameters, self.shards, strict=True):
                    shard.local.copy_(local, non_blocking=True)

    def _divide(self, divisor: Tensor) -> None:
        if gradients := [p.grad for p in self.local_parameters if p.grad is not None]:
            foreach_mul_(gradients, 1.0 / divisor)

    def _attach_gradients(self) -> None:
        """Gives each local parameter the local shard of its parameter's gradient, in CPU memory if offloaded."""
        for parameter, local in zip(self.parameters, self.local_parameters, strict=True):
            if parameter is not local and parameter.grad is not None:
                gradient = local_tensor(parameter.grad)
                local.grad = gradient.to("cpu", non_blocking=True) if self.offload else gradient

    def zero_grad(self, in_place: bool = False) -> None:
        """Frees the gradients, or fills them with zeros in place."""
        if in_place:
            foreach_zero_([p.grad for p in self.parameters if p.grad is not None])
            return
        self.adamw.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            parameter.grad = None
