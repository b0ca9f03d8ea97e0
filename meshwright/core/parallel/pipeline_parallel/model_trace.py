"""One forward pass of the full model on fake tensors: the shapes between stages, and whether stages can run it.

Every stage runs the model's own forward, with stand-ins for the modules of other stages. That is right only if blocks
exchange nothing but hidden states, so the pass follows where the values of every operator come from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.parallel.parallel_model import Autocast
from meshwright.core.parallel.pipeline_parallel.stand_ins import ModelTrace, ModuleResult, TensorShape, hidden_argument
from meshwright.core.torch_private import (
    FakeTensors,
    TorchDispatchMode,
    is_fake,
    storage_id,
    tree_leaves,
    tree_unflatten,
)
from meshwright.errors import ConfigError

SHAPE_ONLY = (
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full"),
)
"""Operators that read the shape of their input and none of its values."""


class ValueSources(TorchDispatchMode):
    """Follows which values the tensors of a pass were computed from. A tensor has the labels of all of its sources."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.labels: dict[int, frozenset[str]] = {}
        self.storages: list[Any] = []
        """keeps every labelled storage alive, so that no other gets its address"""
        self.block: str | None = None
        """the block that runs now"""
        self.own_labels: frozenset[str] = frozenset()
        """labels that its operators may read"""

    def of(self, *tensors: Tensor) -> frozenset[str]:
        return frozenset().union(*(self.labels.get(storage_id(tensor), frozenset()) for tensor in tensors))

    def add(self, tensor: Tensor, labels: frozenset[str]) -> None:
        if labels:
            self.labels[storage_id(tensor)] = self.of(tensor) | labels
            self.storages.append(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__.partition(".")[0] in SHAPE_ONLY:
            return result
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        labels: frozenset[str] = self.of(*inputs)
        views = frozenset() if func._schema.is_mutable else frozenset(map(storage_id, inputs))
        if self.block is not None:
            if foreign := labels - self.own_labels:
                raise ForeignValue(f"{min(foreign)} is used inside {self.block}")
            labels |= {self.block}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and storage_id(leaf) not in views:
                self.add(leaf, labels)
        return result


class ForeignValue(Exception):
    """An operator of a block reads a value that belongs to another stage."""


class ModelTracer:
    """A copy of the full model on fake tensors, with the dtype of trained weights that the stages will have. It is made
    before anything is removed from the model.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[tuple[str, nn.Module]],
        before: list[tuple[str, nn.Module]],
        after: list[tuple[str, nn.Module]],
        device: torch.device,
        weights: torch.dtype,
    ) -> None:
        self.device, self.fake = device, FakeTensors()
        copies: dict[int, Any] = {}
        with self.fake.mode:
            for parameter in model.parameters():
                is_rounded = parameter.requires_grad and parameter.dtype == torch.float32
                dtype = weights if is_rounded else parameter.dtype
                empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                copies[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            for buffer in model.buffers():  # stages may read those of stand-ins
                has_values = not buffer.is_meta and not is_fake(buffer)
                copies[id(buffer)] = (
                    buffer if has_values else torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
                )
        self.model = copy.deepcopy(model, copies)

        def find(parts: list[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
            return {name: copies[id(module)] for name, module in parts}

        self.blocks, self.before, self.after = find(blocks), find(before), find(after)
        self.traces: dict[tuple[TensorShape, ...], ModelTrace] = {}

    def trace(self, batch: tuple[Tensor, ...], autocast: Autocast) -> ModelTrace:
        """The trace of a micro-batch of these shapes."""
        key = tuple(map(TensorShape.of, batch))
        if key not in self.traces:
            with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
                self.traces[key] = self._run(key, autocast)
        return self.traces[key]

    def _run(self, batch: tuple[TensorShape, ...], autocast: Autocast) -> ModelTrace:
        with self.fake.mode, ValueSources() as sources, autocast():
            run = TracedPass(self, sources)
            self._label_parameters(sources)
            inputs = [torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device) for tensor in batch]
            with run.watch():
                try:
                    total, count = self.model(*inputs)
                except ConfigError:
                    raise
                except Exception as error:
                    raise ConfigError(
                        f"the model cannot run on fake tensors, which finds the shapes between pipeline stages: "
                        f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                        "try layout.pipeline = 1, or a forward that reads no values of tensors outside of its blocks",
                    ) from error
            return run.finish(total, count)

    def _label_parameters(self, sources: ValueSources) -> None:
        """Labels the parameters that only some of the stages have. A tied weight is in the first stage and the last."""
        after = {id(parameter) for module in self.after.values() for parameter in module.parameters()}
        outer = {id(parameter) for module in self.before.values() for parameter in module.parameters()}
        for name, block in self.blocks.items():
            for parameter in block.parameters():
                sources.add(parameter, frozenset({block_label(name)}))
                outer.add(id(parameter))
        for name, parameter in self.model.named_parameters():
            if id(parameter) in after and id(parameter) not in outer:
                sources.add(parameter, frozenset({f"the parameter {name} of ParallelSpec.after"}))
            elif id(parameter) not in after and not sources.of(parameter):
                sources.add(parameter, frozenset({f"the parameter {name}"}))


class TracedPass:
    """The state of one traced pass."""

    def __init__(self, tracer: ModelTracer, sources: ValueSources) -> None:
        self.tracer, self.sources = tracer, sources
        self.names = list(tracer.blocks)
        self.inputs: list[TensorShape] = []
        self.results: list[ModuleResult] = []
        self.outer_results: dict[str, list[ModuleResult]] = {name: [] for name in tracer.before}
        self.last: Tensor | None = None
        """the hidden states that the last traced block returned"""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Replaces the forward of blocks and of the modules before them."""
        blocks, before = self.tracer.blocks.values(), self.tracer.before.items()
        forwards = [(module, module.forward) for module in (*blocks, *self.tracer.before.values())]
        for index, block in enumerate(blocks):
            block.forward = partial(self.run_block, index, block.forward)
        for name, module in before:
            module.forward = partial(self.run_outer, name, module.forward)
        try:
            yield
        finally:
            for module, forward in forwards:
                module.forward = forward

    def run_outer(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        self.outer_results[name].append(ModuleResult.of(result))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.sources.add(leaf, frozenset({f"the result of {shown(name)}"}))
        return result

    def run_block(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name, hidden = shown(self.names[index]), hidden_argument(args, kwargs)
        if index != len(self.inputs):
            expected = shown(self.names[len(self.inputs)]) if len(self.inputs) < len(self.names) else "no block"
            raise ConfigError(
                f"pipeline stages cannot divide the model: {name} runs where {expected} was expected",
                "expected every block to run once, in the order of ParallelSpec.blocks",
            )
        if index and hidden is not self.last:
            raise ConfigError(
                f"pipeline stages cannot divide the model: the hidden states that {name} gets are not the result of "
                f"{shown(self.names[index - 1])}",
                "expected every block to get the result of the block before it; try to move what happens between "
                "blocks into a block",
            )
        self._check_arguments(name, hidden, args, kwargs)
        self.inputs.append(TensorShape.of(hidden))
        result = self._block_result(name, index, forward, args, kwargs, hidden)
        if result.hidden is None:
            raise ConfigError(
                f"pipeline stages cannot divide the model: {name} returns no hidden states",
                "expected a block to return the hidden states, or a tuple that begins with them",
            )
        self.results.append(result)
        return self._fresh(result, index)

    def _check_arguments(self, name: str, hidden: Tensor, args: Any, kwargs: Any) -> None:
        others = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf is not hidden]
        for other in others:
            if other.requires_grad or self.sources.of(other):
                source = min(self.sources.of(other), default="a tensor that requires a gradient")
                raise ConfigError(
                    f"pipeline stages cannot divide the model: {name} gets {source} beside the hidden states, as a "
                    f"tensor of shape {tuple(other.shape)}",
                    "expected blocks to get only hidden states and what every stage computes from the batch; try to "
                    "compute it inside the block",
                )
        if not self.inputs:
            for label in self.sources.of(hidden):
                if "ParallelSpec.after" in label:
                    raise ConfigError(
                        f"pipeline stages cannot divide the model: {label} is used before the blocks",
                        "try to name its module in ParallelSpec.before",
                    )

    def _block_result(
        self, name: str, index: int, forward: Callable[..., Any], args: Any, kwargs: Any, hidden: Tensor
    ) -> ModuleResult:
        """The result of a block. One that cannot run on fake tensors, because its shapes depend on values (experts),
        is taken to return hidden states alone; its stage checks that.
        """
        sources = self.sources
        sources.block = label = block_label(self.names[index])
        sources.own_labels = sources.of(hidden) | {label}
        try:
            return ModuleResult.of(forward(*args, **kwargs))
        except ForeignValue as foreign:
            raise ConfigError(
                f"pipeline stages cannot divide the model: {foreign}",
                f"expected {name} to get hidden states as an argument, and nothing else of other blocks",
            ) from None
        except Exception:  # noqa: BLE001
            return ModuleResult.of(hidden)
        finally:
            sources.block = None

    def _fresh(self, result: ModuleResult, index: int) -> Any:
        """New tensors in the structure of a result, which come from this block and from nothing else."""
        fresh = [
            torch.empty(leaf.shape, dtype=leaf.dtype, device=self.tracer.device)
            if isinstance(leaf, TensorShape)
            else leaf
            for leaf in result.leaves
        ]
        for tensor in fresh:
            if isinstance(tensor, Tensor) and index < len(self.names) - 1:
                self.sources.add(tensor, frozenset({f"the result of {shown(self.names[index])}"}))
        self.last = fresh[0]
        return tree_unflatten(fresh, result.tree)

    def finish(self, total: Tensor, count: Any) -> ModelTrace:
        if len(self.inputs) < len(self.names):
            raise ConfigError(
                f"pipeline stages cannot divide the model: its forward does not run "
                f"{shown(self.names[len(self.inputs)])}",
                "expected every block of ParallelSpec.blocks to run once",
            )
        results = [total, count] if isinstance(count, Tensor) else [total]
        last = {block_label(self.names[-1])}
        for label in sorted(self.sources.of(*results) - last):
            if "ParallelSpec.after" not in label:
                raise ConfigError(
                    f"pipeline stages cannot divide the model: {label} is used behind the blocks",
                    "expected only the result of the last block behind it; try to move what uses it into a block, or a "
                    "parameter into a submodule that ParallelSpec.after names",
                )
        return ModelTrace(tuple(self.inputs), tuple(self.results), self.outer_results, TensorShape.of(total))


def block_label(name: str) -> str:
    return f"a value of {shown(name)}"


def shown(name: str) -> str:
    """The name of a module as the user knows it."""
    return name.removeprefix("model.")
