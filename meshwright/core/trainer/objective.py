"""A custom model and loss as one module with the step's signature: flat tensors of a batch -> (loss sum, count)."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.base.config import IGNORE_INDEX
from meshwright.core.data.batch_structure import BatchStructure, CountRule
from meshwright.core.data.loader import TOKENS_AND_LABELS, target_count
from meshwright.core.parallel.local_shard import full_tensor
from meshwright.core.torch_private import is_fake
from meshwright.core.trainer.first_batch.fused_head import SUM_ARGUMENT, FusedHead, has_plain_head
from meshwright.core.trainer.forward_arguments import accepted_entries, accepts, describe_dropped, dropped_entries
from meshwright.errors import ConfigError, DataError

LossFunction = Callable[[Any, Any], Any]
Metric = Callable[[Any, Any], Any]
Reduction = Literal["sum", "mean"]


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a micro-batch, and what it was computed from."""

    total: Tensor
    """the sum over valid targets"""
    parts: Any
    """the same, or a dict of the sums that it consists of"""
    count: Tensor | None
    """the number of valid targets, if the loss returned it"""
    outputs: Any
    target: Any
    """what the loss gets beside the outputs: the target of a tuple, or the whole batch"""
    flat: tuple[Tensor, ...]


class Objective(nn.Module):
    """Combines a model and a loss. The loss is the *sum* over valid targets, not the mean: the step divides once, by
    the count over the global batch.

    A tuple of tensors: `loss(model(*inputs), target)` with the last entry as target. A dict or dataclass: the model
    gets by keyword the entries that its forward accepts, except the targets, and the loss gets (outputs, batch).
    Without a loss the model gets the targets too and computes its loss itself, as models of transformers do. A loss may
    return a dict of sums, which are added up, and `(sum, count)` to have its count compared with that of the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        batch: BatchStructure = TOKENS_AND_LABELS,
        *,
        reduction: Reduction | None = None,
        metrics: Mapping[str, Metric] | None = None,
        loss_names: tuple[str, ...] = (),
        returns_count: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(
                "the model has no parameter to train", "expected at least one parameter that requires a gradient"
            )
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.loss = loss if isinstance(loss, nn.Module) or loss is None else _LossModule(loss)
        self.batch = batch
        self.exact = {batch.names.index(name) for name in getattr(loss, "exact_entries", ())}
        """positions of entries that the loss takes without rounding them to the dtype of the weights"""
        self.reduction = reduction or ("sum" if loss is not None or returns_sum(model) else "mean")
        self.auxiliary_scale = 1.0
        """factor of the auxiliary loss of routers"""
        self.has_auxiliary = False
        """whether the model has added an auxiliary loss of routers to its loss"""
        self.labels_shifted = False
        """whether the targets that arrive are shifted already, as under context parallelism"""
        self.fused_head: FusedHead | None = None
        """computes the loss of the model without its logits, see `fuse_head`"""
        self.metrics = dict(metrics or {})
        self.loss_names = loss_names
        self.returns_count = returns_count
        self.measured: list[Tensor] = []
        """sums and counts since the last `pop_measured`; the stages of a pipeline share the list"""
        self.changed_in_forward: frozenset[str] = frozenset()
        """names of the model's parameters that a forward pass changes"""
        self.checked = False
        check_declared_reduction(loss, self.reduction)
        if loss is None and (batch.is_tuple or batch.count is None):
            raise ConfigError(
                "loss is None, and samples have no entry named labels for a model that computes its loss itself",
                'expected samples such as {"input_ids": ..., "labels": ...}, or train(..., loss=...)',
            )
        if loss is None and not self.metrics and (dropped := dropped_entries(model, batch)):
            raise ConfigError(
                f"{describe_dropped(model, dropped)}, and there is no other use for it",
                "expected entries with the names of forward's arguments, or try to leave it out of the samples",
            )
        self.keywords = () if batch.is_tuple else accepted_entries(model, batch, with_targets=loss is None)

    def forward(self, *flat: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.compute(flat)
        if self.measured_length and not is_fake(loss.total):
            self.measure(loss)
        return loss.total, torch.zeros((), device=loss.total.device) if loss.count is None else loss.count

    def compute(self, flat: tuple[Tensor, ...]) -> BatchLoss:
        """Runs the model and the loss on a micro-batch."""
        # numpy's floats are float64 by default; inputs follow the dtype of the model's weights
        casts = (tensor.is_floating_point() and i not in self.exact for i, tensor in enumerate(flat))
        flat = tuple(t.to(self.dtype) if cast else t for t, cast in zip(flat, casts, strict=True))
        outputs = self.call_model(flat)
        target = self.loss_argument(flat)
        result = self.own_loss(outputs, flat) if self.loss is None else self.loss(outputs, target)
        parts, count = split_result(result)
        if not self.checked and not is_fake(flat[0]):
            check_parts(parts)
            self.check_count(count, flat)
            self.checked = True
        if self.loss is not None and self.reduction == "mean":
            parts = scale_parts(parts, self.count_targets(flat) if count is None else count)
        total = torch.stack(list(parts.values())).sum() if isinstance(parts, Mapping) else parts
        return BatchLoss(total, parts, count, outputs, target, flat)

    def call_model(self, flat: tuple[Tensor, ...]) -> Any:
        """Calls the model with the entries of a batch: by keyword for a dict or dataclass, by position for a tuple."""
        if self.batch.is_tuple:
            return self.model(*self.batch.unflatten(flat)[:-1])
        entries = self.batch.entries(flat)
        arguments = {name: entries[name] for name in self.keywords}
        if self.loss is None and self.reduction == "sum" and accepts(self.model, SUM_ARGUMENT):
            arguments[SUM_ARGUMENT] = 1
        if self.loss is None and self.labels_shifted:
            arguments["shift_labels"] = arguments["labels"]
        if self.fused_head is not None:
            self.fused_head.take_labels(arguments["labels"], shifted=self.labels_shifted)
        return self.model(**arguments)

    def fuse_head(self) -> None:
        """Prepares the fused loss of a causal language model that computes its loss itself, unless its head is no plain
        linear layer or metrics read its logits. The model may be wrapped, as by adapters.
        """
        if self.loss is None and not self.metrics and shifts_labels(self.model):
            inner = next(module for module in self.model.modules() if calls_loss_function(type(module)))
            self.fused_head = FusedHead(inner) if has_plain_head(inner) else None

    def take_shifted_labels(self) -> None:
        """Prepares for `shift_labels`: a model that shifts the labels of a sequence chunk would lose the last one."""
        self.labels_shifted = self.loss is None and self.batch.count is not None and self.batch.count.kind == "shifted"

    def shift_labels(self, flat: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Shifts the labels of full sequences."""
        assert self.batch.count is not None
        entry = self.batch.count.entry % len(flat)
        shifted = nn.functional.pad(flat[entry][:, 1:], (0, 1), value=IGNORE_INDEX)
        return (*flat[:entry], shifted, *flat[entry + 1 :])

    def loss_argument(self, flat: tuple[Tensor, ...]) -> Any:
        """Returns what the loss and the metrics get beside the outputs: the target of a tuple, or the whole batch."""
        batch = self.batch.unflatten(flat)
        return batch[-1] if self.batch.is_tuple else batch

    def own_loss(self, outputs: Any, flat: tuple[Tensor, ...]) -> Tensor:
        """Returns the sum of a loss that the model computed itself.

        The auxiliary loss of routers is a function of the whole micro-batch and no sum over targets; the model adds it
        to the loss once. It is weighted by the targets of the micro-batch, so that the step's mean contains its mean.
        """
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"loss is None, and the model returned a {type(outputs).__name__} without a loss",
                "expected an output with .loss, or train(..., loss=...)",
            )
        auxiliary = auxiliary_loss(self.model, outputs)
        self.has_auxiliary = auxiliary is not None
        if auxiliary is not None:
            loss = loss - auxiliary
        if self.reduction == "mean":
            loss = mean_to_sum(loss, self.count_targets(flat))
        return loss if auxiliary is None else loss + auxiliary * self.auxiliary_scale * self.count_targets(flat)

    def count_targets(self, flat: tuple[Tensor, ...]) -> Tensor:
        """Returns the number of valid targets of this rank's part of a micro-batch."""
        rule = self.batch.count
        assert rule is not None
        return target_count(CountRule("valid", rule.entry) if self.labels_shifted else rule, flat)

    def check_count(self, count: Any, flat: tuple[Tensor, ...]) -> None:
        """Compares the count of a loss with that of the first batch; a device would be synchronized at every step."""
        if count is None or self.batch.count is None:
            return
        if int(count) != (expected := int(self.count_targets(flat))):
            raise count_error(int(count), expected)

    @property
    def measured_names(self) -> tuple[str, ...]:
        """The names of what is measured: the parts of the loss, the metrics, and what the loss measures itself."""
        return (*self.loss_names, *self.metrics, *getattr(self.loss, "measured_names", ()))

    @property
    def measured_length(self) -> int:
        """The length of `measured`: the count of the loss if it returns one, then (sum, count) of every name."""
        return int(self.returns_count) + 2 * len(self.measured_names)

    @torch.no_grad()
    def measure(self, loss: BatchLoss) -> None:
        """Adds what a micro-batch measures to `measured`, without a collective."""
        values: list[Any] = [math.nan if loss.count is None else loss.count] if self.returns_count else []
        for name in self.loss_names:
            values += [loss.parts[name], self.count_targets(loss.flat) if loss.count is None else loss.count]
        if self.metrics:
            outputs = gather_outputs(loss.outputs)
            for name, metric in self.metrics.items():
                values += measured_pair(name, metric(outputs, loss.target))
        values += getattr(self.loss, "take_measured", list)()
        vector = torch.stack([scalar_on(v, loss.total.device).detach().double() for v in values])
        self.measured[:] = [vector if not self.measured else self.measured[0] + vector]

    def pop_measured(self, device: torch.device) -> Tensor:
        """Returns the sums and counts since the last call; zeros where this rank computed no loss."""
        if not self.measured:
            return torch.zeros(self.measured_length, dtype=torch.float64, device=device)
        return self.measured.pop()

    def measured_values(self, sums: Sequence[float], targets: int, where: str) -> dict[str, float]:
        """Returns sum / count of every measured name; NaN where nothing was counted. Raises DataError if the loss has
        counted another number of targets than the batches have.
        """
        if self.returns_count:
            counted, *sums = sums
            if not math.isnan(counted) and round(counted) != targets:  # NaN: the loss has returned no count
                raise DataError(
                    f"{where}: the loss counted {round(counted)} valid targets, and the batch has {targets}",
                    "expected the count of the first batch's rule at every step: mask targets with -100",
                )
        pairs = zip(self.measured_names, sums[::2], sums[1::2], strict=True)
        return {name: total / count if count else math.nan for name, total, count in pairs}


def find_objective(module: nn.Module) -> Objective | None:
    """Returns the objective that a rank's module is or contains."""
    return next((child for child in module.modules() if isinstance(child, Objective)), None)


def count_error(found: int, expected: int) -> ConfigError:
    return ConfigError(
        f"the loss counted {found} valid targets, but the batch has {expected}",
        "try to mask with the target -100, or return the sum alone",
    )


def split_result(result: Any) -> tuple[Any, Tensor | None]:
    """Splits what a loss returned into its sum or sums and its count; None for the count if it returned none."""
    if not isinstance(result, tuple):
        return result, None
    if len(result) != 2 or (isinstance(result[1], Tensor) and result[1].requires_grad):
        raise ConfigError(
            f"the loss returned a tuple of {len(result)} values that is not (sum, count)",
            'expected a sum, (sum, count), or a dict of sums such as {"first": ..., "second": ...}',
        )
    return result[0], torch.as_tensor(result[1])


def scale_parts(parts: Any, count: Any) -> Any:
    if isinstance(parts, Mapping):
        return {name: mean_to_sum(part, count) for name, part in parts.items()}
    return mean_to_sum(parts, count)


def mean_to_sum(loss: Tensor, count: Any) -> Tensor:
    """The mean over no target is NaN and its sum is 0: a chunk of a sequence, or a micro-batch, may have none."""
    count = scalar_on(count, loss.device)
    return torch.where(count > 0, loss * count, torch.zeros_like(loss))


def scalar_on(value: Any, device: torch.device) -> Tensor:
    """Returns a number or scalar tensor on a device, without a synchronization of the device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    return torch.full((), value, device=device)


def gather_outputs(outputs: Any) -> Any:
    """Returns outputs with full tensors in place of DTensors, for metrics."""
    if isinstance(outputs, Tensor):
        return full_tensor(outputs)
    if isinstance(outputs, Mapping):
        gathered = copy.copy(outputs)
        for name, value in outputs.items():
            gathered[name] = gather_outputs(value)  # type: ignore[index]
        return gathered
    return type(outputs)(map(gather_outputs, outputs)) if type(outputs) in (tuple, list) else outputs


def check_parts(parts: Any) -> None:
    """Checks on the first batch that a loss is a scalar, or a dict of scalars, with a gradient."""
    for value in parts.values() if isinstance(parts, Mapping) and parts else [parts]:
        if not isinstance(value, Tensor) or (torch.is_grad_enabled() and not value.requires_grad):
            what = "a tensor without a gradient graph" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ConfigError(
                f"the loss returned {what}", "expected the sum over valid targets: a scalar tensor with a gradient"
            )
        if value.ndim:
            raise ConfigError(
                f"the loss returned a tensor of shape {tuple(value.shape)}",
                "expected the sum over valid targets: a scalar",
            )


def measured_pair(name: str, value: Any) -> list[Any]:
    """Returns (sum, count) of what a metric returned: a pair, or a tensor with a value per sample."""
    if isinstance(value, tuple) and len(value) == 2:
        return list(value)
    if isinstance(value, Tensor) and value.ndim:
        return [value.double().sum(), value.numel()]
    raise ConfigError(
        f"metric {name} returned a {type(value).__name__} that is neither (sum, count) nor a tensor of values",
        "expected (sum, count), so that it can be summed over ranks and micro-batches",
    )


def check_declared_reduction(loss: LossFunction | None, reduction: Reduction) -> None:
    """Compares the `reduction` of a loss module with the declared one."""
    found = getattr(loss, "reduction", reduction)
    plain_mean = ', or train(..., reduction="mean") if it is the plain mean over all valid targets'
    mend = f'reduction="sum" in the loss{plain_mean if found == "mean" else ""}'
    if found != reduction:
        raise ConfigError(
            f"the loss has reduction = {found!r}, and {reduction!r} is expected: the step divides the global sum",
            f"try {'train(...) without reduction' if found == 'sum' else mend}",
        )


def ignored_target(loss: LossFunction | None) -> int | None:
    """Returns the `ignore_index` of a loss module, or of a `functools.partial`; None if it has none."""
    found = getattr(loss, "ignore_index", None)
    return found if found is not None else getattr(loss, "keywords", {}).get("ignore_index")


def returns_sum(model: nn.Module) -> bool:
    """Whether a model that computes its loss itself divides the summed loss by `num_items_in_batch`. Models of
    transformers do where forward hands its keywords to `self.loss_function`; the others return a mean.
    """
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names or not accepts(model, SUM_ARGUMENT):
        return False
    config = getattr(model, "config", None)
    is_classifier = getattr(getattr(model, "loss_function", None), "__name__", "") == "ForSequenceClassificationLoss"
    return not is_classifier or (
        getattr(config, "num_labels", 2) > 1 and getattr(config, "problem_type", None) in (None, SINGLE_LABEL)
    )


SINGLE_LABEL = "single_label_classification"
"""The only problem of transformers' sequence classifiers whose loss can be a sum."""


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model that computes its loss itself compares position i with label i + 1, as causal language models of
    transformers do. Some of them name `ForCausalLMLoss` and compute the loss without it; decoders behind an encoder get
    their inputs shifted instead.
    """
    return (
        getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
        and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        and any(calls_loss_function(type(module)) for module in model.modules())  # the model may be wrapped
    )


def calls_loss_function(kind: type[nn.Module]) -> bool:
    """Whether forward of a class, or the forward of a base class that it calls, uses `self.loss_function`."""
    for base in kind.__mro__:
        code = getattr(inspect.unwrap(vars(base).get("forward", len)), "__code__", None)
        if code is not None and ("loss_function" in code.co_names or "super" not in code.co_names):
            return "loss_function" in code.co_names
    return False


def auxiliary_loss(model: nn.Module, outputs: Any) -> Tensor | None:
    """Returns the weighted auxiliary loss of the routers that a model of transformers has added to its loss."""
    value, weight = getattr(outputs, "aux_loss", None), getattr(model, "router_aux_loss_coef", None)
    return value * weight if isinstance(value, Tensor) and weight is not None else None


class _LossModule(nn.Module):
    """A loss function as a module."""

    def __init__(self, function: LossFunction) -> None:
        super().__init__()
        self.function = function

    def forward(self, outputs: Any, targets: Any) -> Any:
        return self.function(outputs, targets)
