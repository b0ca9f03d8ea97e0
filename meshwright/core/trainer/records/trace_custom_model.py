"""Traces a user's model for the planner: parameters, FLOPs and memory of each block, on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from meshwright.base.config import Batch, PrecisionConfig, RunConfig
from meshwright.base.models.traced_model import TracedModel
from meshwright.core.data.loader import Loader, MicroBatch
from meshwright.core.data.sample_lookup import build_stream
from meshwright.core.data.source import ConcatenatedSource, Source
from meshwright.core.models.trace import TracedModule, copy_to_meta, trace_model
from meshwright.core.parallel.parallel_model import stateful_buffers
from meshwright.core.parallel.parallel_spec import find_blocks, find_modules
from meshwright.core.parallel.tensor_parallel import sharded_dims
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.objective import Objective
from meshwright.core.trainer.precision import Precision
from meshwright.errors import DataError

PREFIX = "model."
"""Names of the model's modules have this prefix inside an Objective."""


def first_micro_batch(config: RunConfig, batch: Batch, sources: Sequence[Source], custom: CustomModel) -> MicroBatch:
    """The first micro-batch of a run. A sample that cannot be decoded is a DataError."""
    stream = build_stream(config, list(sources))
    source = ConcatenatedSource(list(sources))
    loader = Loader(source, stream, batch, 0, config.data, structure=custom.batch, collate=custom.collate)
    micro_batch = loader.first()
    if not micro_batch.tensors:
        raise DataError(str(micro_batch.bad_samples[0]), "try to repair the sample")
    return micro_batch


def build_objective_on_meta(custom: CustomModel, dtype: torch.dtype) -> Objective:
    """Returns a copy of model and loss without values, which takes no memory."""
    loss = copy_to_meta(custom.loss) if isinstance(custom.loss, nn.Module) else custom.loss
    on_meta = replace(custom, module=copy_to_meta(custom.module), loss=loss)
    objective = on_meta.build_objective(torch.device("meta"), dtype)
    objective.checked = True  # a real run checks the values of its first batch
    return objective


def trace_run(
    custom: CustomModel, config: RunConfig, batch: Batch, sources: Sequence[Source], samples: Sequence[int] = ()
) -> TracedModel:
    """Traces the model of a run on its first micro-batch, by default with the run's number of samples."""
    micro_batch = first_micro_batch(config, batch, sources, custom)
    return trace_custom_model(custom, micro_batch, config.precision, samples or (batch.micro,))


PLANNED_SAMPLES = (2, 4)
"""Sizes of the micro-batches that are traced for a plan, which may choose another size."""


def trace_workload(custom: CustomModel, config: RunConfig, sources: Sequence[Source]) -> TracedModel:
    """Traces a model for a plan, whose layout and micro-batches are not known yet."""
    samples = min(config.batch.global_, PLANNED_SAMPLES[-1])
    batch = Batch(config.batch.global_, samples, 1, config.batch.global_ // samples)
    return trace_run(custom, config, batch, sources, PLANNED_SAMPLES)


def trace_custom_model(
    custom: CustomModel, micro_batch: MicroBatch, config: PrecisionConfig, samples: Sequence[int]
) -> TracedModel:
    """Traces forward and backward of micro-batches with these numbers of samples, one or two, in the run's precision.

    In a mixed precision, FSDP2 casts the parameters of blocks, and DDP leaves it to autocast: both are traced.
    """
    precision = Precision(config, torch.device("cpu"))
    replicated = build_objective_on_meta(custom, precision.parameters)
    name = type(custom.module).__name__
    tensors = micro_batch.tensors
    autocast_spec, pass_trace = trace_model(describe(custom, replicated), name, tensors, samples, precision.autocast)
    spec = autocast_spec
    if precision.compute != precision.parameters:
        sharded = cast_units(build_objective_on_meta(custom, precision.parameters), custom, precision.compute)
        spec, _ = trace_model(describe(custom, sharded), name, tensors, samples, precision.autocast)
    tokens = tensors[0]
    is_text = tokens.ndim == 2 and not tokens.is_floating_point()
    sequence = tokens.shape[1] if is_text else 1
    attention, routed_tokens = pass_trace.attention, pass_trace.routed_tokens
    return TracedModel(
        name,
        spec,
        autocast_spec,
        sequence,
        sum(tensor.nbytes for tensor in tensors) // len(tokens),
        sum(buffer.nbytes for buffer in stateful_buffers(replicated)),
        len(replicated.measured_names),
        *((attention.heads, attention.kv_heads, attention.head_dim) if attention else (0, 0, 0)),
        experts_active=max(1, routed_tokens // (pass_trace.samples * sequence)),
        axes=frozenset(served_axes(custom, attention is not None and is_text)),
    )


def describe(custom: CustomModel, objective: Objective) -> TracedModule:
    """Names the parts of an objective as the user's model names them."""
    spec = custom.objective_spec()
    names = {module: name.removeprefix(PREFIX) for name, module in objective.named_modules()}
    blocks = find_blocks(objective, spec) if any(custom.spec.block_patterns) else []
    experts = find_modules(objective, spec.experts) if spec.experts else []
    return TracedModule(
        objective,
        {names[block]: block for block in blocks},
        tuple(names[module] for name in spec.before for module in find_modules(objective, name)),
        tuple(names[module] for name in spec.after for module in find_modules(objective, name)),
        tensor_parallel_dims(custom, objective),
        frozenset(f"{names[module]}.{name}" for module in experts for name, _ in module.named_parameters()),
        PREFIX,
    )


def tensor_parallel_dims(custom: CustomModel, objective: Objective) -> dict[str, int]:
    """The parameters that the tensor-parallel plan shards, and the dimension."""
    names = {module: name.removeprefix(PREFIX) for name, module in objective.named_modules()}
    return {
        f"{names[module]}.{parameter}": dim
        for pattern, style in custom.objective_spec().tp_plan().items()
        for module in find_modules(objective, pattern)
        for parameter, dim in sharded_dims(style, module).items()
        if dim is not None and getattr(module, parameter, None) is not None
    }


def cast_units(objective: Objective, custom: CustomModel, dtype: torch.dtype) -> Objective:
    """Casts the parameters of the units that FSDP2 unshards in the compute precision: the blocks and what follows."""
    spec = custom.objective_spec()
    blocks = find_blocks(objective, spec) if any(custom.spec.block_patterns) else []
    after = [module for name in spec.after for module in find_modules(objective, name)]
    for unit in (*blocks, *after):
        unit.to(dtype)
    return objective


def served_axes(custom: CustomModel, has_attention: bool) -> list[str]:
    """The axes besides data parallelism that can serve a model."""
    spec = custom.spec
    several_blocks = any(spec.block_patterns) and len(find_blocks(custom.module, spec)) > 1
    served = {
        "tensor": bool(spec.tp_plan()),
        "pipeline": several_blocks,
        "context": has_attention and bool(spec.positions),
        "expert": bool(spec.experts),
    }
    return ["shard", *(axis for axis, is_served in served.items() if is_served)]
