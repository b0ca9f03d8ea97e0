"""Infers the ParallelSpec of a model that comes without one: its blocks, the modules around them, and its plans."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from meshwright.core.parallel.parallel_spec import ParallelSpec, empty_tp_plan, find_modules, tied_parameters
from meshwright.core.parallel.tensor_plans.transformers_plan import shipped_plans, transformers_tp_plan

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

SMALLEST_SHARE = 0.05
"""A list of equal modules with a smaller share of the parameters than this is not a list of blocks."""


def infer_parallel_spec(
    module: nn.Module, given: ParallelSpec | None = None, run: Callable[[], Any] | None = None
) -> ParallelSpec:
    """The spec of a model, from its modules alone. Fields that the user has given win.

    `run` runs the forward of the model, on fake tensors for example: a list of modules that it does not call once each,
    in order, belongs to the root unit; modules outside of the blocks are ordered by their first call, and those that
    are not called stay in the root unit. Without it they are ordered as registered.
    """
    given = given or ParallelSpec()
    calls = None if run is None else record_calls(module, run)
    patterns = infer_blocks(module, calls)
    blocks = given.blocks or (patterns[0] if len(patterns) == 1 else patterns or "")
    before, after = infer_ends(module, ParallelSpec(blocks))
    if calls is not None:
        before, after = order_by_calls(module, ParallelSpec(blocks), before + after, calls)
    shipped = any(shipped_plans(module))
    inferred_plan = partial(transformers_tp_plan, module) if shipped else empty_tp_plan
    return ParallelSpec(
        blocks=blocks,
        before=given.before or before,
        after=given.after or after,
        tp_plan=inferred_plan if given.tp_plan is empty_tp_plan else given.tp_plan,
        positions=given.positions or infer_positions(module),
        experts=given.experts or infer_experts(module),
        tied=tied_parameters(module),
    )


def describe_spec(spec: ParallelSpec, given: ParallelSpec | None = None) -> list[str]:
    """What was inferred, one line per field of ParallelSpec that the user has not given."""
    given = given or ParallelSpec()
    names = ", ".join
    lines = {
        "blocks": names(spec.block_patterns)
        or "no repeated modules that are called once each, so the whole model is one FSDP unit",
        "before": names(spec.before),
        "after": names(spec.after),
        "tp_plan": "" if spec.tp_plan is empty_tp_plan else "the plan that transformers ships for this model",
        "positions": spec.positions,
        "experts": spec.experts,
        "tied": names(" = ".join(group) for group in spec.tied),
    }
    empty: tuple[object, ...] = ("", (), empty_tp_plan)
    return [f"ParallelSpec.{name}: {text}" for name, text in lines.items() if text and getattr(given, name) in empty]


def infer_blocks(model: nn.Module, calls: list[nn.Module] | None = None) -> tuple[str, ...]:
    """The names of the repeated blocks, `layers.*`, in the order of registration: the outermost lists of modules of one
    class. A list of one module counts where transformers names its class as a unit (`_no_split_modules`), and a small
    list where a large one has modules of the same class. With the calls of a forward, a list counts if its modules are
    called once each, in order: FSDP2 needs all ranks to call the same units in the same order.
    """
    units = {str(name) for sub in model.modules() for name in getattr(sub, "_no_split_modules", None) or ()}
    lists = outermost(
        {name: items for name, items in module_lists(model) if len(items) > 1 or type(items[0]).__name__ in units}
    )
    total = sum(parameter.numel() for parameter in model.parameters())
    sizes = {name: sum(p.numel() for item in items for p in item.parameters()) for name, items in lists.items()}
    classes = {type(items[0]) for name, items in lists.items() if sizes[name] > SMALLEST_SHARE * total}
    return tuple(
        child(name, "*")
        for name, items in lists.items()
        if type(items[0]) in classes and (calls is None or called_in_order(items, calls))
    )


def record_calls(model: nn.Module, run: Callable[[], Any]) -> list[nn.Module]:
    """The modules in the order in which `run` calls them."""
    calls: list[nn.Module] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, _inputs: calls.append(module)) for module in model.modules()
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def called_in_order(items: list[nn.Module], calls: list[nn.Module]) -> bool:
    """Whether the modules of a list are called once each, in order."""
    return [module for module in calls if module in items] == items


def module_lists(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """(name, items) of every container whose items are modules of one class with parameters."""
    for name, container in model.named_modules():
        if isinstance(container, CONTAINERS):
            items = list(container.children())
            if len({type(item) for item in items}) == 1 and all(any(True for _ in i.parameters()) for i in items):
                yield name, items


def outermost(lists: dict[str, list[nn.Module]]) -> dict[str, list[nn.Module]]:
    """The lists that are inside of no other list."""
    return {name: items for name, items in lists.items() if not any(is_inside(name, other) for other in lists)}


def is_inside(name: str, other: str) -> bool:
    return name != other and (other == "" or name.startswith(f"{other}."))


def infer_ends(model: nn.Module, spec: ParallelSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(modules with parameters registered before the first block, those after the last block).

    Modules between two lists of blocks are left to the root unit.
    """
    blocks = {id(block) for pattern in spec.block_patterns for block in find_modules(model, pattern)}
    names = [name for name, _ in model.named_modules()]
    positions = [index for index, module in enumerate(model.modules()) if id(module) in blocks]
    if not positions or id(model) in blocks:
        return (), ()
    ends = [(names.index(name), name) for name in outer_modules(model, "", blocks)]
    return (
        tuple(name for index, name in ends if index < positions[0]),
        tuple(name for index, name in ends if index > positions[-1]),
    )


def outer_modules(module: nn.Module, prefix: str, blocks: set[int]) -> Iterator[str]:
    """The largest modules with parameters that contain no block and have a forward."""
    for child_name, submodule in module.named_children():
        name = child(prefix, child_name)
        if id(submodule) in blocks or not any(True for _ in submodule.parameters()):
            continue
        has_forward = not isinstance(submodule, (nn.ModuleList, nn.ModuleDict))
        if has_forward and not any(id(inner) in blocks for inner in submodule.modules()):
            yield name
        else:
            yield from outer_modules(submodule, name, blocks)


def order_by_calls(
    model: nn.Module, spec: ParallelSpec, names: tuple[str, ...], calls: list[nn.Module]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(modules first called before the first block, those first called after the last block). Modules of a list that
    is not called in order stay in the root unit: ranks may call different ones.
    """
    blocks = [block for pattern in spec.block_patterns for block in find_modules(model, pattern)]
    routed = [name for name, items in module_lists(model) if not called_in_order(items, calls)]
    names = tuple(name for name in names if not any(is_inside(name, other) for other in routed))
    watched = {model.get_submodule(name): name for name in names} | dict.fromkeys(blocks, "")
    called = [watched[module] for module in calls if module in watched]
    if "" not in called:
        return (), ()
    first, last = called.index(""), len(called) - 1 - called[::-1].index("")
    before, inside = set(called[:first]), set(called[first:last])
    after = set(called[last:]) - before - inside
    return tuple(n for n in names if n in before - inside), tuple(n for n in names if n in after)


def infer_positions(model: nn.Module) -> str:
    return "position_ids" if "position_ids" in inspect.signature(model.forward).parameters else ""


def infer_experts(model: nn.Module) -> str:
    """The modules with the weights of all experts: 3-d parameters with the experts as first dimension, and a forward
    of (hidden states, chosen experts, weights of the chosen experts).
    """
    for name, module in model.named_modules():
        stacked = [parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 3]
        required = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
        if len(stacked) > 1 and len({len(parameter) for parameter in stacked}) == 1 and len(required) == 3:
            return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
    return ""


def child(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
