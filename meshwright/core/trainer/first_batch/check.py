"""Checks a custom model on the first samples, before a step: the loss of a batch must be the sum over its samples.

The check runs on a plain copy of the model in one process. What makes the result depend on the layout is refused or,
where a run is still well-defined, named in a note of the start record.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from meshwright.base.config import RunConfig, derive_batch
from meshwright.base.topology.layout import Layout
from meshwright.base.user_code.entry_points import describe_user_error
from meshwright.core.data.batch_structure import CountRule
from meshwright.core.data.source import Source
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.first_batch.batch_check import BatchCheck, seeded
from meshwright.core.trainer.first_batch.first_samples import Flat, find_unit, read_batches, shorten, why_unchecked
from meshwright.core.trainer.first_batch.given_objects import NOT_COMPARED, compare_with_given
from meshwright.core.trainer.first_batch.gradient_sketch import PlainPass
from meshwright.core.trainer.first_batch.model_notes import gradient_notes, model_notes, short_list, unused_parameters
from meshwright.core.trainer.first_batch.plain_pass import (
    affordable_rows,
    first_rows,
    make_plain_pass,
    why_incomparable,
)
from meshwright.core.trainer.first_batch.trained_tensors import check_hooks, check_registered
from meshwright.core.trainer.forward_arguments import describe_dropped, dropped_entries
from meshwright.core.trainer.objective import Objective, Reduction
from meshwright.errors import ConfigError, MeshwrightError

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest relative difference of a loss and the sum over its parts, by the dtype of the copy. A model may compute in
float32 inside of a float64 copy."""


@dataclass(frozen=True)
class FirstBatch:
    """What the check found out about a custom model."""

    count: CountRule | None
    """how valid targets are counted"""
    unit: str
    notes: tuple[str, ...]
    reduction: Reduction | None = None
    loss_names: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    """parameters that require a gradient and got none"""
    returns_count: bool = False
    """whether the loss returns the number of its targets, or may return it"""
    changed: tuple[str, ...] = ()
    """parameters that a forward pass changes"""
    plain_pass: PlainPass | None = None
    """what ranks compare their first pass with"""

    def apply(self, custom: CustomModel) -> CustomModel:
        """Returns the custom model as it is trained."""
        return replace(
            custom,
            batch=replace(custom.batch, count=self.count),
            unit=self.unit,
            notes=self.notes,
            reduction=self.reduction or custom.reduction,
            loss_names=self.loss_names,
            returns_count=self.returns_count,
            changed=frozenset(self.changed),
            plain_pass=self.plain_pass,
        )


def check_first_batch(
    custom: CustomModel, source: Source, seed: int = 0, config: RunConfig | None = None
) -> FirstBatch:
    """Finds out how the loss of a custom model counts its targets. Raises ConfigError if the loss of a batch is not the
    sum over its samples. `custom.batch` is the structure of the source's samples. A model on the meta device gets its
    initial values by `seed`. With the `config` of a run on several ranks, the pass that they compare theirs with is
    made.
    """
    check_hooks(custom.modules())
    complete = read_batches(custom, source)
    batches = shorten(custom, complete)
    if reason := why_unchecked(custom, batches[0]):
        return leave_unchecked(custom, complete[0], reason)
    given, custom = custom, custom.with_values(seed)
    try:
        objective, tolerance = build_copy(custom, batches[0])
    except Exception as error:
        if batches is complete or isinstance(error, MeshwrightError):
            raise
        reason = f"it would take long on a CPU, and the model fails on shorter sequences: {type(error).__name__}"
        return leave_unchecked(custom, complete[0], reason)
    notes = model_notes(custom.module, custom.spec) + entry_notes(custom)
    compared, reason = affordable_rows(objective, custom, batches[0])
    changed: tuple[str, ...] = ()
    if compared is not None:
        more, changed = compare_with_given(custom, compared, objective.dtype)
        notes += more
    notes += BatchCheck(objective, batches, tolerance).run(custom.modules())
    notes += gradient_notes(objective.model, custom.spec)
    unused = unused_parameters(objective.model) if batches is complete else []  # an expert may need a longer sequence
    if changed:
        notes.append(f"forward changes {short_list(changed)}, so the result depends on the number of micro-batches")
    found = FirstBatch(
        objective.batch.count,
        find_unit(objective.batch, complete[0]),
        tuple(notes),
        objective.reduction,
        objective.loss_names,
        tuple(unused),
        objective.returns_count,
        changed,
    )
    if compared is None:
        return replace(found, notes=(*found.notes, f"{NOT_COMPARED}: {reason}"))
    if config is None or Layout.from_config(config.layout).ranks == 1:
        return found
    reason = why_incomparable(given, config, shortened=batches is not complete)
    plain_pass = reason or plain_pass_of_ranks(found.apply(custom), compared, objective, config)
    if isinstance(plain_pass, PlainPass):
        return replace(found, plain_pass=plain_pass)
    note = f"the gradients of ranks are not compared with a plain pass: {plain_pass}"
    return replace(found, notes=(*found.notes, note))


def plain_pass_of_ranks(custom: CustomModel, flat: Flat, objective: Objective, config: RunConfig) -> PlainPass | str:
    """The pass that ranks compare theirs with, of no more samples than a micro-batch has, or why there is none."""
    layout = Layout.from_config(config.layout)
    micro = derive_batch(config.batch, layout.data_degree).micro
    rows = first_rows(flat, micro)
    if len(rows[0]) > micro:
        return "the batch of the check cannot be cut to the size of a micro-batch"
    if objective.has_auxiliary and layout.context > 1:
        return "the auxiliary loss of routers is another one on chunks of the sequence"
    try:
        return make_plain_pass(custom, rows, objective.dtype, config.precision)
    except Exception as error:  # noqa: BLE001  what fails on some rows only, or in the precision of the run
        return describe_user_error(error)


def leave_unchecked(custom: CustomModel, flat: Flat, reason: str) -> FirstBatch:
    """Returns what is known without a pass. Raises ConfigError if that does not include how targets are counted."""
    if custom.batch.count is None:
        raise ConfigError(
            f"no entry of a sample is named labels, label, targets or target ({', '.join(custom.batch.names)}), and "
            f"the first batch is not checked: {reason}",
            "expected an entry of that name, by which the targets are counted",
        )
    notes = [*model_notes(custom.module, custom.spec), *entry_notes(custom)]
    notes.append(f"the first batch is not checked: {reason}")
    return FirstBatch(custom.batch.count, find_unit(custom.batch, flat), tuple(notes), returns_count=True)


def entry_notes(custom: CustomModel) -> list[str]:
    """Returns a note about entries of samples that the model does not get."""
    dropped = dropped_entries(custom.module, custom.batch)
    return [f"{describe_dropped(custom.module, dropped)}: loss and metrics alone get it"] if dropped else []


def build_copy(custom: CustomModel, flat: Flat) -> tuple[Objective, float]:
    """Returns a copy of model and loss in float64, or in float32 where float64 fails, and the tolerance."""
    failure: Exception | None = None
    reached: list[bool] = []
    for dtype, tolerance in TOLERANCES.items():
        objective = custom.build_objective(torch.device("cpu"), dtype)
        names = {name for name, _ in objective.named_parameters()}
        hooks = (
            [objective.loss.register_forward_pre_hook(lambda *_: reached.append(True))]
            if objective.loss is not None
            else []
        )
        try:
            with seeded(0):
                objective.compute(flat)
            check_registered(objective, names)
        except MeshwrightError:
            raise
        except Exception as error:  # noqa: BLE001  a user's model may raise anything
            failure = error
            continue
        finally:
            for hook in hooks:
                hook.remove()
        objective.checked = False
        return objective, tolerance
    assert failure is not None
    if reached:
        compare_with_given(custom, flat, torch.float32)
    if reached and not custom.batch.is_tuple and isinstance(failure, TypeError | AttributeError):
        raise ConfigError(
            f"the loss raised {describe_user_error(failure)}",
            "expected loss(outputs, batch) for samples with names, where batch has the entries "
            f"{', '.join(custom.batch.names)}",
        ) from failure
    raise failure  # it is reported as a failure of a rank, with the line and the traceback of the user's code
