"""Notes about a custom model: statistics of each rank, frozen and unused parameters, ties that do not exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from meshwright.base.config import PrecisionConfig
from meshwright.core.parallel.parallel_spec import ParallelSpec, find_blocks
from meshwright.core.trainer.precision import Precision
from meshwright.errors import ConfigError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Modules that normalize by the statistics of a rank's micro-batch."""
SHOWN = 3
"""Names that a note lists; the rest are counted."""


def model_notes(model: nn.Module, spec: ParallelSpec) -> list[str]:
    """Returns notes about the modules and parameters of a model. Raises ConfigError if declared ties do not exist."""
    check_declared_ties(model)
    notes = []
    if norms := [n for n, child in model.named_modules() if isinstance(child, BATCH_NORMS) and child.training]:
        notes.append(
            f"{short_list(norms)} normalize by the statistics of each rank's micro-batch, so the result depends on the "
            "layout; try nn.SyncBatchNorm.convert_sync_batchnorm(model)"
        )
    named = list(model.named_parameters())
    if frozen := [name for name, p in named if not p.requires_grad]:
        notes.append(f"{len(frozen)} of {len(named)} parameters are frozen: {short_list(frozen)}")
    notes += [
        f"{first} and {second} have equal values and are two parameters; tied weights must be one parameter"
        for first, second in untied_embeddings(model, spec)
    ]
    return notes


def dtype_notes(model: nn.Module, config: PrecisionConfig) -> list[str]:
    """Returns a note if floating-point parameters have another dtype than the weights that are trained."""
    trained = Precision(config, torch.device("cpu")).parameters
    named = [(name, p.dtype) for name, p in model.named_parameters() if p.is_floating_point()]
    others = [(name, dtype) for name, dtype in named if dtype != trained]
    if not others:
        return []
    return [
        f"{len(others)} of {len(named)} parameters are not {dtype_name(trained)} ({others[0][0]} is "
        f"{dtype_name(others[0][1])}) and are trained as {dtype_name(trained)}, because precision.compute = "
        f"{config.compute}"
    ]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def untied_embeddings(model: nn.Module, spec: ParallelSpec) -> Iterator[tuple[str, str]]:
    """Yields pairs of an embedding's weights and another matrix with equal values: a tie that an initialization has
    broken. Two parameters inside of blocks may be copies, as the layers of `nn.TransformerEncoder` are.
    """
    of_blocks = {id(p) for block in find_blocks(model, spec) if block is not model for p in block.parameters()}
    embeddings = {f"{name}.weight": c.weight for name, c in model.named_modules() if isinstance(c, nn.Embedding)}
    for name, parameter in model.named_parameters():
        for other, weight in embeddings.items():
            if name in embeddings or weight.is_meta or {id(weight), id(parameter)} <= of_blocks:
                continue
            if same_values(weight, parameter):
                yield other, name


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal values that are not all the same."""
    return one.shape == other.shape and torch.equal(one, other) and bool((one != one.flatten()[0]).any())


def check_declared_ties(model: nn.Module) -> None:
    """Raises ConfigError if a model of transformers declares tied weights that are two parameters."""
    declared = getattr(model, "_tied_weights_keys", None)
    if not isinstance(declared, dict) or not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for target, source in declared.items():
        if target in parameters and source in parameters and parameters[target] is not parameters[source]:
            raise ConfigError(
                f"{target} and {source} are two parameters, and the model declares them as tied "
                "(config.tie_word_embeddings)",
                "try model.tie_weights() after the initialization, or tie_word_embeddings=False",
            )


def gradient_notes(model: nn.Module, spec: ParallelSpec) -> list[str]:
    """Returns notes about parameters that got no gradient from a backward pass over the first batch."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    unused = {name for name, p in trained if p.grad is None}
    if not unused:
        return []
    notes, names = [], {id(child): name for name, child in model.named_modules()}
    for block in find_blocks(model, spec):
        prefix = names[id(block)] + "."
        of_block = {name for name, _ in trained if name.startswith(prefix)}
        if of_block and of_block <= unused:
            notes.append(f"no gradient reaches {prefix[:-1]}: a detach() or no_grad() may stand behind it")
            unused -= of_block
    if unused:
        notes.append(f"no gradient on the first batch for {short_list(sorted(unused))}")
    return notes


def unused_parameters(model: nn.Module) -> list[str]:
    """Returns the parameters that require a gradient and have none."""
    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def short_list(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more
