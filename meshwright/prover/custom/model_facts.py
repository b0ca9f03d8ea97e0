"""What the plain module shows by itself in one process: precision, randomness, state between calls, and whether its
loss is a sum over independent samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.core.data.source import ConcatenatedSource, Source, spaced_indices
from meshwright.core.parallel.world import World
from meshwright.core.torch_private import TorchDispatchMode
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.errors import ConfigError, describe_exception
from meshwright.prover.claims import Claim
from meshwright.prover.custom.copied_module import find_copy_problem, find_unregistered, unchanged_parameters
from meshwright.prover.custom.subject import find_tied_parameters, plain_objective
from meshwright.prover.oracle.plain_model import BatchDivision, PlainModel, Samples, seed_all

SAMPLES = 6
"""Samples of the batch that is tried."""
ROUNDING = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 0.05, "fp16": 0.01}
"""Relative differences of a loss that another order of sums explains, by the lowest precision in the module."""
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class ModelFacts:
    """What a plain module shows by itself."""

    name: str
    float64: bool = True
    """whether it computes in float64"""
    float64_error: str = ""
    inner_precision: str = "fp64"
    """the lowest precision that an operator returns, although the weights are float64"""
    random: bool = False
    """whether the forward pass draws random numbers"""
    repeatable: bool = True
    """whether the same parameters, samples and seed give the same loss twice"""
    batch_dependence: str = ""
    """why the loss of a batch is not the sum of the losses of its parts; '' if it is"""
    synchronized: bool = False
    """whether it depends on the batch through SyncBatchNorm alone"""
    auxiliary: bool = False
    """whether the loss contains an auxiliary loss of routers, which is that of a micro-batch"""
    unregistered: str = ""
    """a tensor that receives a gradient and is no parameter from the start; '' if there is none"""
    copy_problem: str = ""
    """how a copy of the module, which each rank trains, differs from the module; '' if it does not"""
    without_gradient: tuple[str, ...] = ()
    """parameters that require a gradient and receive none"""
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """parameters with several names: the first one -> the others"""

    @property
    def exact_dtype(self) -> torch.dtype:
        """The precision of the reference."""
        return torch.float64 if self.float64 else torch.float32

    @property
    def divided(self) -> Literal["whole", "micro-batches", "ranks"]:
        """How the reference divides a batch."""
        if self.random or self.auxiliary or (self.batch_dependence and not self.synchronized):
            return "ranks"
        return "micro-batches" if self.synchronized else "whole"

    def claims(self) -> Iterator[Claim]:
        """What every model must satisfy so that its results do not depend on how samples are divided."""
        tried = f"{self.name} in one process"
        yield Claim(
            f"{tried}: the same parameters, samples and seed give the same loss twice",
            self.repeatable,
            "two passes give equal losses"
            if self.repeatable
            else "two passes differ: the forward pass keeps state between calls, or draws from a generator of its own",
        )
        yield Claim(
            f"{tried}: every tensor that receives a gradient is a parameter, and a copy of the module has its own",
            not self.unregistered and not self.copy_problem,
            self.unregistered or self.copy_problem or "all leaves of the gradient graph are parameters",
        )
        wrong = bool(self.batch_dependence) and not self.synchronized
        yield Claim(
            f"{tried}: the loss of a batch is the sum of the losses of its parts, in any order",
            not wrong,
            self.batch_dependence or f"{SAMPLES} samples, whole, in two parts and reversed",
        )


def collect_facts(_world: World, custom: CustomModel, sources: list[Source]) -> ModelFacts:
    """Tries the module on some samples, in a process of its own."""
    facts = ModelFacts(type(custom.module).__qualname__, tied=find_tied_parameters(custom.modules()))
    source = ConcatenatedSource(sources)
    batch = [source[sample] for sample in spaced_indices(len(source), SAMPLES)]
    batch *= 1 if len(batch) > 1 else 2  # two parts of it are compared with the whole
    model = PlainModel(plain_objective(custom), BatchDivision())
    lowest, names = LowestPrecision(), set(model.parameters())
    try:
        with unchanged_parameters(model), lowest:
            loss_of(model, batch).backward()
    except Exception as error:  # noqa: BLE001  a user's module may raise anything
        facts = replace(facts, float64=False, float64_error=f"{type(error).__name__}: {describe_exception(error)}")
        model = PlainModel(plain_objective(custom), BatchDivision(), dtype=torch.float32)
        try:
            with unchanged_parameters(model), lowest:
                loss_of(model, batch).backward()
        except Exception as second:
            raise ConfigError(
                f"the model {facts.name} fails in one plain process: {type(second).__name__}: "
                f"{describe_exception(second)}",
                "try model(*inputs) and loss(outputs, targets) on one batch of the source",
            ) from second
    unused = [name for name, p in model.parameters().items() if p.requires_grad and p.grad is None]
    facts = replace(facts, inner_precision=PRECISIONS[lowest.dtype], without_gradient=tuple(unused))
    facts = replace(facts, unregistered=find_unregistered(model, batch, names))
    if not facts.unregistered:
        facts = replace(facts, copy_problem=find_copy_problem(model, custom, batch))
    with torch.no_grad():
        seed_all(0)
        with unchanged_parameters(model):
            whole = float(model.loss_sum(batch))
        facts = replace(facts, auxiliary=whole != float(loss_of(model, batch)))
        once, again, other = (float(loss_of(model, batch, seed)) for seed in (0, 0, 1))
        facts = replace(facts, repeatable=once == again or once != once, random=once == again != other)
        return with_batch_dependence(facts, model, batch)


def with_batch_dependence(facts: ModelFacts, model: PlainModel, batch: Samples) -> ModelFacts:
    """Compares the loss of a batch with those of two parts, and with that of the reversed batch. Dropout is off."""
    for child in model.objective.module.modules():
        if isinstance(child, DROPOUT):
            child.p = 0.0
    if float(loss_of(model, batch, 0)) != float(loss_of(model, batch, 1)):
        return facts  # still random: nothing can be concluded
    half = max(1, len(batch) // 3)
    parts = [batch[:half], batch[half:]]
    (whole, seen), *of_parts = [loss_with_outputs(model, part) for part in (batch, *parts)]
    of_both = sum(loss for loss, _ in of_parts)
    backwards = float(loss_of(model, batch[::-1]))
    limit = ROUNDING[facts.inner_precision] * max(abs(whole), 1e-300)
    if not abs(whole - of_both) > limit and not abs(whole - backwards) > limit:
        return facts
    modules = first_dependent_modules(seen, [outputs for _, outputs in of_parts])
    normalized = [name for name, child in model.objective.module.named_modules() if is_batch_norm(child)]
    synchronized = bool(normalized) and all(
        isinstance(child, nn.SyncBatchNorm) for child in model.objective.module.modules() if is_batch_norm(child)
    )
    if abs(whole - of_both) > limit and normalized:
        reason = f"batch statistics by rank (BatchNorm): the output of {normalized[0]} depends on the other samples"
        advice = "try nn.SyncBatchNorm.convert_sync_batchnorm(model), or a norm over the features"
    elif is_mean(model, batch, parts, whole, [loss for loss, _ in of_parts]) and not modules:
        reason, advice = "the loss is the mean over the batch, not the sum", "try reduction='sum'"
    elif modules:
        reason = f"the output of {modules[0]} for a sample depends on the other samples of the batch"
        advice = "expected a forward pass that computes each sample by itself"
    else:
        reason = "the loss depends on the number or the order of the samples in the batch"
        advice = "expected the sum over samples"
    text = f"{reason}: loss {whole:.6g} of the batch, {of_both:.6g} in two parts, {backwards:.6g} reversed; {advice}"
    return replace(facts, batch_dependence=text, synchronized=synchronized)


def is_mean(model: PlainModel, batch: Samples, parts: list[Samples], whole: float, losses: list[float]) -> bool:
    """Whether the loss of the batch is the mean of the losses of its parts, weighted by their valid targets."""
    counts = [model.count_valid_targets(part) for part in parts]
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / max(
        1, model.count_valid_targets(batch)
    )
    return abs(whole - mean) <= 1e-4 * abs(whole)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module normalizes by the statistics of the batch."""
    return isinstance(module, BATCH_NORM) and (module.training or not module.track_running_stats)


def loss_of(model: PlainModel, batch: Samples, seed: int = 0) -> Tensor:
    """The loss without the auxiliary loss of routers, which is no sum over samples."""
    seed_all(seed)
    with nullcontext() if torch.is_grad_enabled() else unchanged_parameters(model):
        return model.loss_sum(batch, auxiliary=False)


Outputs = dict[str, Tensor]


def loss_with_outputs(model: PlainModel, batch: Samples) -> tuple[float, Outputs]:
    """The loss, and every output of a module with one row per sample, in the order of computation."""
    outputs: Outputs = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.ndim and len(output) == len(batch):
                outputs[name] = output.detach().clone()

        return hook

    hooks = [child.register_forward_hook(keep(name)) for name, child in model.objective.module.named_modules() if name]
    loss = float(loss_of(model, batch))
    for handle in hooks:
        handle.remove()
    return loss, outputs


def first_dependent_modules(whole: Outputs, parts: list[Outputs]) -> list[str]:
    """The modules whose output for the batch is not that for its parts, first the one that computes first."""
    found = []
    for name, output in whole.items():
        together = [part[name] for part in parts if name in part]
        if len(together) == len(parts) and not torch.allclose(torch.cat(together), output, rtol=1e-4, atol=1e-6):
            found.append(name)
    return found


class LowestPrecision(TorchDispatchMode):
    """Notes the lowest floating-point precision to which an operator rounds tensors of a higher one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, returned = (
            [value.dtype for value in values if isinstance(value, Tensor) and value.dtype in PRECISIONS]
            for values in (args, result if isinstance(result, (tuple, list)) else [result])
        )
        for dtype in returned:
            if any(torch.finfo(dtype).eps > torch.finfo(other).eps for other in read):
                self.dtype = max(self.dtype, dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result
