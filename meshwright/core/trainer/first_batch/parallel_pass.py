"""Before the first step: the parallelized model computes of the first samples what the plain model does.

All data-parallel ranks read the same samples, so that the sum of their gradients is a multiple of the plain ones.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from fnmatch import fnmatch

import torch
from torch import Tensor

from meshwright.core.parallel.context_parallel.start_check import evaluation_mode
from meshwright.core.parallel.data_parallel.rank_agreement import ModelUse, use_error
from meshwright.core.parallel.local_shard import full_tensor
from meshwright.core.parallel.parallel_model import PassHooks, unchanged_module
from meshwright.core.trainer.custom_model import MODEL_PREFIX
from meshwright.core.trainer.first_batch.gradient_sketch import GradientSketch, PlainPass
from meshwright.core.trainer.job import Job
from meshwright.core.trainer.step import Step
from meshwright.errors import ConfigError

TOLERANCES = {"fp64": 1e-5, "fp32": 5e-2, "tf32": 5e-2, "fp16": 0.25, "bf16": 0.25}
"""Relative error of a gradient or the loss from which it is another value. A wrong plan changes gradients by their own
size; kernels of a device, routers and another order of sums by much less."""
NOTHING = {"fp64": 1e-9, "fp32": 1e-4, "tf32": 1e-2, "fp16": 3e-2, "bf16": 3e-2}
"""Share of the norm of all gradients that a gradient which should be zero may have, such as that of a bias of keys or
before a batch norm; and of the change of the loss to first order, if all weights are doubled."""
ROUNDING = {"fp64": 8.0, "fp32": 8.0, "tf32": 8.0 * 2**13, "fp16": 8.0, "bf16": 8.0}
"""How much larger errors may be than those that the precision of the run has in one process, on a CPU, which has no
TF32."""
MAX_ROWS = 4
"""Rows of a tensor-parallel plan that an error lists."""


def compare_with_plain_pass(job: Job, step: Step) -> None:
    """Raises a ConfigError on every rank if a loss or gradient of the parallelized model is another one."""
    plain = job.custom.plain_pass if job.custom is not None else None
    sizes = (0, 0) if plain is None else (len(plain.flat[0]), plain.training)
    rows = step.world.all_gather_ints(*sizes, name="plain pass") if job.custom is not None else []
    if plain is None or any(row != list(sizes) for row in rows):  # under torchrun, every rank has made its own
        return
    loss, gradients = run_parallel_pass(job, step, plain)
    calls = step.parallel_model.pop_block_calls()
    compute: str = "bf16" if job.config.ddp.comm_hook != "none" else job.config.precision.compute
    if compute == "fp32" and job.config.precision.tf32 and step.world.device.type == "cuda":
        compute = "tf32"
    tolerance, more, names = TOLERANCES[compute], ROUNDING[compute], list(plain.gradients)
    # The error of a small tensor in one process may be small by chance, so that of all gradients counts as well.
    floor = max(NOTHING[compute] * plain.norm, more * plain.error)
    rounding = plain.error / max(plain.norm, 1e-300)
    worst, name = 0.0, ""
    for candidate, expected in plain.gradients.items():
        if candidate in gradients:
            if compute == "fp16" and not math.isfinite(gradients[candidate].norm):
                continue  # partial sums of ranks may overflow; steps halve the loss scale then
            allowed = tolerance + more * max(rounding, expected.rounding)
            error = expected.error(gradients[candidate], floor) / allowed
            worst, name = max((worst, name), (error if math.isfinite(error) else 1e9, candidate))
    found = step.world.all_gather_ints(
        int(min(worst, 1e9) * 1e6), names.index(name) if name else -1, name="parallel pass"
    )
    rank = max(range(len(found)), key=lambda rank: (found[rank][0], -rank))
    norm = step.world.broadcast_object(gradients[name].norm if name else 0.0, "norm of a gradient", src=rank)
    size = abs(plain.loss) + NOTHING[compute] * plain.weights * plain.norm  # the loss may be zero, as of advantages
    differs = not abs(loss - plain.loss) <= (tolerance + more * plain.rounding) * size
    if found[rank][0] > 1e6 or differs:
        uses = step.world.all_gather_ints(step.context.pipeline_rank, 0, calls, name="use of the model")
        other_use = use_error([ModelUse(*use) for _, *use in uses], [stage for stage, *_ in uses], 0)
        if other_use is not None:
            raise other_use
        raise parallel_error(job, plain, loss, names[found[rank][1]], norm)


def run_parallel_pass(job: Job, step: Step, plain: PlainPass) -> tuple[float, dict[str, GradientSketch]]:
    """The loss and the gradients of this rank's parameters, and leaves nothing behind. Every rank must call it."""
    step.world.heartbeat.enter("warmup")
    model, world = step.parallel_model, step.world
    micro_batches = job.batch.accumulation if job.layout.pipeline > 1 else 1
    copies = micro_batches * job.layout.data_degree
    total = torch.zeros((), device=world.device, dtype=torch.float64)

    def scale_loss(losses: Tensor) -> Tensor:
        if step.context.reports_loss:
            total.add_(losses.detach())
        return losses / copies * plain.scale

    model.pop_block_calls()
    hooks = PassHooks(lambda _phase: None, step.precision.autocast, scale_loss, lambda: None)
    inputs = tuple(map(world.to_device, model.shard_inputs(plain.flat)))
    step.expert_balancer.begin_step(torch.tensor(plain.scale, device=world.device), step.precision.parameters)
    mode = nullcontext() if plain.training else evaluation_mode(model.module)
    with torch.compiler.set_stance("force_eager"), unchanged_module(model.module), mode:
        model.forward_backward([inputs] * micro_batches, hooks)
    gradients = model.gradients()
    sketches = {}
    for name, parameter in model.parameters().items():
        if name in plain.gradients:
            gradient = gradients.get(name)
            sketches[name] = GradientSketch.of(
                torch.zeros_like(full_tensor(parameter)) if gradient is None else full_tensor(gradient),
                scale=plain.scale,
            )
    model.reshard()
    step.discard_pass()
    if step.objective is not None:
        step.objective.pop_measured(world.device)
    return float(world.all_reduce(total.cpu(), "loss of the parallel pass").wait()) / copies, sketches


def parallel_error(job: Job, plain: PlainPass, loss: float, name: str, norm: float) -> ConfigError:
    """The error, with both losses and both norms of the gradient that differs most, and the likely cause."""
    assert job.custom is not None
    layout, own_name = job.layout, name.removeprefix(MODEL_PREFIX)
    causes = []
    if layout.tensor > 1:
        module = own_name.rpartition(".")[0]
        parent = module.rpartition(".")[0]
        rows = [row for row in job.custom.spec.tp_plan() if fnmatch(parent, row.rpartition(".")[0])]
        row = f"{', '.join(rows[:MAX_ROWS])} in ParallelSpec.tp_plan" if rows else "ParallelSpec.tp_plan"
        causes.append(f"{row}, such as ColwiseParallel of a fused projection that is cut into parts")
    if layout.pipeline > 1:
        causes.append("what the module computes outside of its blocks (pipeline)")
    if layout.expert > 1:
        causes.append("ParallelSpec.experts")
    causes.append("what forward, the loss or a hook read of the rank or of local shards")
    axes = [axis for axis in layout.active_mesh_axes if axis != "replicate"] or ["replicate"]
    return ConfigError(
        f"the first samples have the loss {plain.loss:.6g} and a gradient of {own_name} of norm "
        f"{plain.gradients[name].norm:.4g} in one plain process, and {loss:.6g} and {norm:.4g} on the layout {layout}: "
        f"look at {'; or at '.join(causes)}",
        f"try {' and '.join(f'layout.{axis} = 1' for axis in axes)}, or meshwright prove, which names the axis",
    )
