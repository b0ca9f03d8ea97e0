"""The likely cause of wrong gradients of a custom model: its plan, its reductions, its hooks, its tied weights."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor

from meshwright.base.topology.layout import Layout
from meshwright.prover.compare.causes import (
    MAX_ROUNDING,
    ROUNDED,
    Evidence,
    describe_factor,
    kept_gradients,
    weights_cause,
)
from meshwright.prover.compare.discrepancy import FACTOR_TOLERANCE, Difference, equal_within
from meshwright.prover.tracer import AssembledTrace, Region

SUM_TOLERANCE = 1e-3
"""The largest relative error of a sum over ranks that explains a gradient."""
ELEMENTS_PER_WEIGHT = 4
"""Elements of the wrong gradients per micro-batch from which the weights of micro-batches can be told."""

NEXT_MOVES_OF_CUSTOM = {
    "fetch": "make samples and collate functions of the index alone, not of the rank, the process or the time, and let "
    "forward change no input in place",
    "forward": "look for what the model and the loss read of the rank, of the number of ranks or of a process group",
    "backward": "look at hooks, autograd functions, detach and the rows of tp_plan above the first wrong parameter",
    "evaluate": "compare the model in evaluation mode on one rank and on several",
}
"""Phase -> what to do next; the other phases are those of every run."""

FORWARD_BY_AXIS = {
    "tensor": "a row of tp_plan is wrong, or a reduction over the tensor axis is missing or made twice",
    "pipeline": "a stage computes other blocks, or other activations of the batch (pipeline)",
    "context": "positions, masks, labels or attention of the sequence chunks (context)",
    "experts": "tokens that reach the wrong expert or return in the wrong order (experts)",
}
BACKWARD_BY_AXIS = {
    "tensor": "a sum over the tensor axis is missing or made twice in backward, by an autograd function or by tp_plan",
    "pipeline": "a stage lacks the gradients of a micro-batch (pipeline)",
    "context": "gradients are not summed over the sequence chunks (context)",
}
ANY_FORWARD = "the forward pass or the loss depends on the rank or on the number of ranks"
ANY_BACKWARD = "a hook, a detach or an autograd function that depends on the rank or on the number of ranks"


def custom_gradient_cause(gradients: list[Difference], first: Difference, evidence: Evidence, names: list[str]) -> str:
    """The cause of wrong gradients. `names` are all parameters, in the order in which the module registers them."""
    wrong = [found.quantity.name for found in gradients]
    layout, step = evidence.layout, gradients[0].quantity.step
    if conflict := first_conflict(wrong, step, evidence):
        forward = f"{by_axis(ANY_FORWARD, FORWARD_BY_AXIS, layout)}; " if first.quantity.kind == "loss" else ""
        return forward + conflict
    found = next(s for s in evidence.measured.trace.steps if s.step == step)
    if missing := [name for name in wrong if name not in found.gradients]:
        return (
            f"{missing[0]} receives no gradient in the run ({len(missing)} of {len(names)} parameters): it is left out "
            "of the optimizer or of the ParallelSpec, or it is detached"
        )
    low = evidence.config.precision.compute in ("bf16", "fp16") or evidence.config.ddp.comm_hook != "none"
    if scaled := scaled_gradients(gradients, evidence, names, MAX_ROUNDING if low else FACTOR_TOLERANCE):
        return scaled
    if kept := kept_gradients(gradients, evidence):
        return kept
    if all(name in evidence.tied for name in wrong):
        uses = " and ".join([wrong[0], *evidence.tied[wrong[0]]])
        return f"a tied weight ({uses}): the gradients of its uses are not summed exactly once"
    rounded = all(f.error < MAX_ROUNDING and f.factor_error < MAX_ROUNDING / 2 for f in [first, *gradients])
    if rounded and low:
        return ROUNDED
    cells = layout.data_degree * evidence.accumulation
    enough = sum(found.gradients[name].numel() for name in wrong) >= ELEMENTS_PER_WEIGHT * cells
    weights = weights_cause(step, wrong, evidence) if enough else ""
    if first.quantity.kind == "loss":
        if weights:
            return f"forward is correct, but the samples have unequal weights: {weights}"
        most = max(gradients, key=lambda difference: difference.error).quantity.name
        return f"{by_axis(ANY_FORWARD, FORWARD_BY_AXIS, layout)}; most wrong is the gradient of {most}"
    if weights:
        return f"gradients of some ranks or micro-batches are missing or counted twice: {weights}"
    backward = by_axis(ANY_BACKWARD, BACKWARD_BY_AXIS, layout)
    if wrong == names[: len(wrong)] and len(wrong) < len(names):
        return f"backward is correct down to {names[len(wrong)]} and wrong below: {backward}"
    return f"{len(wrong)} of {len(names)} gradients are wrong, first that of {wrong[0]}: {backward}"


def scaled_gradients(gradients: list[Difference], evidence: Evidence, names: list[str], tolerance: float) -> str:
    """Whether all wrong gradients are the right ones times one factor; '' if not."""
    factor = gradients[0].factor
    if not all(equal_within(found.factor, factor, tolerance) for found in gradients) or not all(
        equal_within(found.error, abs(factor - 1), max(tolerance, 1e-3)) for found in gradients
    ):
        return ""
    average = describe_factor(factor, evidence.layout, evidence.accumulation, tolerance)
    size = f"gradients are {factor:.4g} times as large" + (f": {average}" if average else "")
    if len(gradients) == len(names):
        return size
    of = f"{len(gradients)} of {len(names)} {size}"
    return f"{of}; first that of {gradients[0].quantity.name}: a hook, an autograd function or a reduction above it"


def first_conflict(names: list[str], step: int, evidence: Evidence) -> str:
    """The first of these parameters whose gradient differs between ranks that must agree; '' if there is none."""
    right = next(s.gradients for s in evidence.expected.steps if s.step == step)
    for name in names:
        if text := explain_conflict(name, step, evidence.measured, right.get(name), evidence.layout):
            return text
    return ""


def explain_conflict(name: str, step: int, measured: AssembledTrace, right: Tensor | None, layout: Layout) -> str:
    """Along which axis ranks have different gradients of a shard that they share, and whether their sum is right."""
    regions = measured.conflicts.get(("gradient", step, name))
    if regions is None:
        return ""
    axes = conflicting_axes(regions, layout)
    for axis in axes if right is not None else ():
        group = [rank for rank in layout.group(min(regions), axis) if rank in regions]
        total = torch.stack([torch.from_numpy(regions[rank].values).double() for rank in group]).sum(dim=0)
        expected = right.double()[regions[group[0]].where] if right is not None else total
        if float((total - expected).norm()) <= SUM_TOLERANCE * float(expected.norm()):
            return (
                f"partial gradient of {name}, a replicated parameter, over the {axis} axis: every rank has a part, and "
                "only their sum is right; declare the parameter in tp_plan, or sum its gradient over the axis"
            )
    where = f"the {' and '.join(axes)} axis" if axes else "several axes"
    return f"the gradient of {name}, a replicated parameter, differs between the ranks of {where}"


def conflicting_axes(regions: Mapping[int, Region], layout: Layout) -> list[str]:
    """The axes along which two ranks with the same shard, and equal on all other axes, have different values."""
    axes = {}
    for one, other in combinations(regions, 2):
        coordinates = layout.coordinates(one), layout.coordinates(other)
        differ = [axis for axis in layout.active_mesh_axes if coordinates[0][axis] != coordinates[1][axis]]
        values = torch.from_numpy(regions[one].values), torch.from_numpy(regions[other].values)
        if len(differ) == 1 and regions[one].offset == regions[other].offset and not torch.equal(*values):
            axes[differ[0]] = True
    return list(axes)


def by_axis(cause: str, causes: Mapping[str, str], layout: Layout) -> str:
    """The causes that a layout makes possible, those of its axes first."""
    return "; or ".join([*(text for axis, text in causes.items() if axis in layout.active_axes), cause])
