"""What a user brings to train in place of a built-in model: a module, its loss, its batches, and its parallelism."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.base.config import OptimizerConfig
from meshwright.base.topology.parameter_groups import is_frozen, validate_groups
from meshwright.core.data.batch_structure import BatchStructure, CountRule
from meshwright.core.data.loader import TOKENS_AND_LABELS
from meshwright.core.data.source import Collate
from meshwright.core.parallel.local_shard import full_tensor
from meshwright.core.parallel.materialize import Materializer, named_tensors
from meshwright.core.parallel.parallel_model import rounded_parameters
from meshwright.core.parallel.parallel_spec import ParallelSpec
from meshwright.core.parallel.sync_batch_norm import synchronize_batch_norm
from meshwright.core.trainer.first_batch.gradient_sketch import PlainPass
from meshwright.core.trainer.objective import LossFunction, Metric, Objective, Reduction, ignored_target, shifts_labels
from meshwright.errors import ConfigError

MODEL_PREFIX = "model."
"""What the names of a custom model's parameters begin with in the module that contains the model and its loss."""
CodeRecord = dict[str, Any]
"""The code of a custom model, as identity.json records it: class, fingerprint, python, parts and structure."""


@dataclass(frozen=True)
class CustomModel:
    """A user's model. Ranks that are forked share its modules, so each rank trains a copy of them."""

    module: nn.Module
    loss: LossFunction | None
    """None: the model computes its loss itself"""
    spec: ParallelSpec
    """how the model is parallelized"""
    batch: BatchStructure = TOKENS_AND_LABELS
    """the entries of a batch, and how its valid targets are counted"""
    collate: Collate | None = None
    """makes a batch of a list of samples; None: samples are stacked"""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """name -> function of (outputs, target or batch) that returns (sum, count)"""
    reduction: Reduction | None = None
    """what the loss returns; None: a sum, or what a model that computes its loss itself is known to return"""
    loss_names: tuple[str, ...] = ()
    """names of the sums, where the loss returns a dict of them"""
    returns_count: bool = False
    """whether the loss returns, or may return, the number of its targets, which is then compared at every step"""
    init: Callable[[str, Tensor], Any] | None = None
    """writes the initial values of a parameter or buffer of a model on the meta device"""
    frozen: frozenset[str] = frozenset()
    """names of parameters that groups of the optimizer freeze"""
    code: CodeRecord | None = None
    """the fingerprints of the model, the loss and the functions beside them"""
    unit: str = "targets"
    """what a valid target is called on the terminal and in reports: tokens, samples or targets"""
    inferred: tuple[str, ...] = ()
    """what was inferred of the spec, one line per field"""
    notes: tuple[str, ...] = ()
    """what the check of the first batch found, one line each"""
    changed: frozenset[str] = frozenset()
    """names of the parameters that a forward pass changes, such as those of a momentum teacher"""
    plain_pass: PlainPass | None = None
    """what ranks compare their first pass with; None: nothing"""

    def __post_init__(self) -> None:
        count = self.batch.count
        if self.loss is None and count is not None and count.kind == "valid" and shifts_labels(self.module):
            object.__setattr__(self, "batch", self.batch.with_count(CountRule("shifted", count.entry)))
        elif count is not None and (ignored := ignored_target(self.loss)) is not None:
            object.__setattr__(self, "batch", self.batch.with_count(replace(count, ignored=ignored)))

    def with_frozen_groups(self, config: OptimizerConfig) -> CustomModel:
        """Returns the model with the parameters of frozen groups. Raises a ConfigError for a group without one."""
        trained = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        if isinstance(self.loss, nn.Module):
            trained += [f"loss.{name}" for name, p in self.loss.named_parameters() if p.requires_grad]
        validate_groups(config, trained)
        return replace(self, frozen=frozenset(name for name in trained if is_frozen(config, name)))

    def modules(self) -> list[nn.Module]:
        """Returns the modules that may have parameters: the model, and the loss if it is a module."""
        return [module for module in (self.module, self.loss) if isinstance(module, nn.Module)]

    def on_meta(self) -> set[str]:
        """Returns the names of the parameters and buffers that are on the meta device, and have no values."""
        return {name for name, tensor in named_tensors(self.module) if tensor.is_meta}

    def require_init(self) -> None:
        """Raises a ConfigError if the model is on the meta device, and nothing initializes it."""
        if self.init is None and (names := sorted(self.on_meta())):
            raise ConfigError(
                f"the model is on the meta device ({names[0]} and {len(names) - 1} more tensors), and has no init",
                "expected init=..., a function of a name and a tensor that writes the initial values into the tensor",
            )

    def initial_values(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        """Returns the initial values of a full parameter or buffer on the meta device. They depend on the seed and the
        name alone, so they are the same on every layout.
        """
        assert self.init is not None
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        full = torch.full(shape, torch.nan if dtype.is_floating_point else 0, dtype=dtype)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            self.init(name, full)
        if full.is_floating_point() and full.isnan().any():
            raise ConfigError(
                f"init wrote no values, or NaN, to {name}",
                "expected init(name, tensor) to write all values of every parameter and buffer, in place",
            )
        return full

    def with_values(self, seed: int) -> CustomModel:
        """Returns the model with its initial values, in this process, if it is on the meta device."""
        if not self.on_meta():
            return self
        module = copy_module(self.module)
        Materializer(module, None, torch.device("cpu")).allocate(module)
        for name, tensor in named_tensors(module):
            if name in self.on_meta():
                tensor.data.copy_(self.initial_values(name, tuple(tensor.shape), tensor.dtype, seed))
        return replace(self, module=module)

    def build_objective(self, device: torch.device, dtype: torch.dtype) -> Objective:
        """Returns a copy of model and loss as one module on a device."""
        module = copy_module(self.module)
        loss = copy_module(self.loss).to(device, dtype) if isinstance(self.loss, nn.Module) else self.loss
        synchronize_batch_norm(module)
        disable_caches(module)
        if self.on_meta():
            module = module.to(dtype)._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        else:
            module = module.to(device, dtype)
        objective = self.objective_of(module, loss)
        for name, parameter in objective.named_parameters():
            if name.removeprefix(MODEL_PREFIX) in self.frozen:
                parameter.requires_grad_(False)
        return objective

    def objective_of(self, module: nn.Module, loss: LossFunction | None) -> Objective:
        """Returns a model and a loss as one module."""
        objective = Objective(
            module,
            loss,
            self.batch,
            reduction=self.reduction,
            metrics=self.metrics,
            loss_names=self.loss_names,
            returns_count=self.returns_count,
        )
        objective.changed_in_forward = self.changed
        return objective

    def objective_spec(self) -> ParallelSpec:
        """Returns the spec of the module that `build_objective` returns."""
        return self.spec.under_objective()


def copy_module(module: nn.Module) -> nn.Module:
    """Returns a copy of a module, without the graphs of the results that an earlier forward pass has kept in it."""
    return copy.deepcopy(module, {id(result): result.detach().clone() for _, result in kept_results(module)})


def kept_results(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the attributes of modules in which a forward pass has kept a result."""
    for prefix, child in module.named_modules():
        for key, value in vars(child).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                yield f"{prefix}.{key}" if prefix else key, value


def disable_caches(module: nn.Module) -> None:
    """Turns off the caches for generation in models of transformers: recomputation would add the same keys again."""
    for submodule in module.modules():
        if getattr(getattr(submodule, "config", None), "use_cache", False):
            submodule.config.use_cache = False  # type: ignore[union-attr]


@torch.no_grad()
def copy_trained_weights(
    trained: Objective,
    masters: Mapping[nn.Parameter, Tensor],
    targets: list[nn.Module],
    write: bool,
    pipeline: dist.ProcessGroup | None,
) -> None:
    """Copies the trained weights into the custom modules, from the master weights of those that have one. All ranks
    gather the shards; those with `write` copy them. Every rank of a `pipeline` has the weights of its stages only.
    """
    for module, target in zip((trained.model, trained.loss), targets, strict=False):
        copies = set(rounded_parameters(trained)) - masters.keys()  # of tied weights, which another stage owns
        named = [(name, t) for name, t in saved_tensors(module) if t not in copies] if module is not None else []
        state = {name: masters.get(t, t) if isinstance(t, nn.Parameter) else t for name, t in named}
        names = [set(state)]
        if pipeline is not None:
            names = [set() for _ in range(pipeline.size())]
            dist.all_gather_object(names, set(state), group=pipeline)
        for name, value in saved_tensors(target):
            owner = next((rank for rank, of_rank in enumerate(names) if name in of_rank), None)
            if value.is_meta or owner is None:  # no process has the model whole, or another name has the tied weight
                continue
            full = (
                full_tensor(state[name]) if name in state and (pipeline is None or pipeline.rank() == owner) else None
            )
            if pipeline is not None:
                # Training may be in another dtype than the user's module, which decides the size of the message.
                full = value.to(device_of(trained), copy=True) if full is None else full.to(value.dtype).contiguous()
                dist.broadcast(full, group=pipeline, group_src=owner)
            if write:
                assert full is not None
                value.copy_(full)


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and persistent buffers of a module by all of their names. `state_dict` may return copies of them,
    and values that are no tensors.
    """
    yield from module.named_parameters(remove_duplicate=False)
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
