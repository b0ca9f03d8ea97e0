"""The choices that a run makes by measurement at its start on CUDA: the attention backend, and what is compiled.

Each candidate is timed on the first micro-batch of the run. The choices are kept in identity.json and in the manifests
of checkpoints, and a run that continues uses them again: another choice would change the last bits of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.core.data.loader import MicroBatch
from meshwright.core.kernels.cudnn_attention import has_cudnn_frontend, use_cudnn_backward
from meshwright.core.parallel.compile import compile_whole
from meshwright.core.parallel.parallel_model import unchanged_module
from meshwright.core.parallel.world import World
from meshwright.core.torch_private import use_attention_backends
from meshwright.core.trainer.first_batch.attention_calls import BACKENDS, MEASURED, AttentionCalls
from meshwright.core.trainer.job import Job
from meshwright.core.trainer.records.start_record import device_name, parameter_count
from meshwright.core.trainer.step import Step

SCOPES = ("block", "model")
MIN_GAIN = 0.01
"""Share of the time by which the whole model must be faster than its blocks to be compiled as a whole."""
EXPECTED_GAIN = 0.03
"""Share of the time that compiling a small model as a whole usually saves."""
COMPILE_SECONDS = 60.0
"""Seconds that compiling a whole model takes: a run must be so long that it can save more."""
MAX_PARAMETERS = 1_000_000_000
"""Parameters up to which the whole model is tried: in larger ones, time between blocks does not show."""
WARMUP, REPEATS = 2, 5


@dataclass(frozen=True)
class Choices:
    """What a run uses, and the milliseconds of every candidate; a candidate that does not run has none."""

    attention: str | None = None
    """None: the backend that torch prefers"""
    scope: str | None = None
    """None: nothing is compiled"""
    milliseconds: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """choice -> candidate -> forward and backward of the first micro-batch"""
    reused: bool = False
    """whether an earlier attempt of the run has made them"""

    @property
    def summary(self) -> str:
        """One line, such as `attention cudnn 2.4 ms (flash 3.8, efficient 9.4), compile per block`."""
        attention = (
            f"attention {self.attention or 'by torch'}{describe_times(self.milliseconds, 'attention', self.attention)}"
        )
        scopes = {None: "not compiled", "block": "compile per block", "model": "compile of the whole model"}
        scope = f"{scopes[self.scope]}{describe_times(self.milliseconds, 'scope', self.scope)}"
        return f"{attention}, {scope}" + ("; chosen by an earlier attempt" if self.reused else "")

    def to_record(self) -> dict[str, str | None]:
        """What the manifests of checkpoints keep."""
        return {"attention": self.attention, "scope": self.scope}

    def to_json(self) -> dict[str, Any]:
        """The fields of the `choices` event."""
        times = {key: dict(candidates) for key, candidates in self.milliseconds.items()}
        fields = {"attention": self.attention, "scope": self.scope, "milliseconds": times, "reused": self.reused}
        return fields | {"summary": self.summary}


def describe_times(milliseconds: Mapping[str, Mapping[str, float | None]], key: str, chosen: str | None) -> str:
    """The milliseconds of the chosen candidate, and in parentheses those of the others."""
    times = {name: time for name, time in milliseconds.get(key, {}).items() if time is not None}
    if chosen not in times:
        return ""
    others = ", ".join(f"{name} {time:.1f}" for name, time in times.items() if name != chosen)
    return f" {times[chosen]:.1f} ms" + (f" ({others})" if others else "")


def recorded_choices(record: Any, device: str) -> dict[str, str | None]:
    """The choices in identity.json, an untrusted file, if they were made on the same kind of device."""
    if not isinstance(record, dict) or record.get("device") != device:
        return {}
    known = {"attention": (None, *BACKENDS), "scope": SCOPES}
    return {key: record[key] for key, values in known.items() if key in record and record[key] in values}


def make_choices(job: Job, step: Step, identity: dict[str, Any], first: Callable[[], MicroBatch]) -> Choices:
    """Makes and applies the choices that the config leaves open: those that the identity record of the run has, or the
    fastest candidates. On CUDA it adds them to the record. Every rank makes the same choices.
    """
    device, settings, on_cuda = device_name(step.world.device), job.config, step.world.device.type == "cuda"
    if on_cuda:  # ranks may have different devices, and either all of them measure or none does
        device = step.world.broadcast_object(device, "device of the choices")
    recorded, times = recorded_choices(identity["choices"], device), dict[str, dict[str, float | None]]()
    is_open = {"attention": settings.kernels.attention is None, "scope": settings.compile.scope is None}
    # A measurement may choose otherwise in the next run, so that a deterministic run chooses by rule.
    deterministic = on_cuda and torch.are_deterministic_algorithms_enabled()
    measures = on_cuda and not deterministic
    to_measure = {key for key, open_ in is_open.items() if measures and open_ and key not in recorded}
    inputs = step.load_first(first) if to_measure else None

    attention = settings.kernels.attention or recorded.get("attention")
    if "attention" in to_measure and inputs is not None:
        times["attention"] = slowest_ranks(step.world, time_attention(step, inputs))
        attention = fastest(times["attention"])
    if deterministic:
        attention = attention or ("cudnn" if has_cudnn_frontend() else "flash")
        use_cudnn_backward(attention == "cudnn")
    if attention is not None:
        use_attention_backends([BACKENDS[attention], *BACKENDS.values()])

    scope: str | None = settings.compile.scope
    if settings.compile.enabled and scope is None:
        scope = "block"
        if "scope" in to_measure and inputs is not None and may_compile_whole(job) and step.world.size == 1:
            times["scope"] = time_scopes(job, step, inputs)
            scope = faster_scope(times["scope"])
        elif recorded.get("scope") == "model" and may_compile_whole(job):
            scope = "model"
            compile_whole(step.parallel_model.module, settings.activation_checkpoint.memory_budget)
    choices = Choices(attention, scope if settings.compile.enabled else None, times, bool(recorded))
    if on_cuda:
        made = {key: value for key, value in choices.to_record().items() if is_open[key] and value is not None}
        identity["choices"] = {"device": device} | recorded | made
    return choices


def slowest_ranks(world: World, milliseconds: Mapping[str, float | None]) -> dict[str, float | None]:
    """The times of the slowest rank, which every rank waits for; None for what some rank cannot run."""
    own = [-1 if time is None else round(1000 * time) for time in milliseconds.values()]
    rows = world.all_gather_ints(*own, name="choices")
    columns = dict(zip(milliseconds, zip(*rows, strict=True), strict=True))
    return {name: None if min(column) < 0 else max(column) / 1000 for name, column in columns.items()}


def fastest(milliseconds: Mapping[str, float | None]) -> str | None:
    """The fastest candidate; None if none was measured, as of a model without attention."""
    measured = {name: time for name, time in milliseconds.items() if time}
    return min(measured, key=measured.__getitem__) if measured else None


def faster_scope(milliseconds: Mapping[str, float | None]) -> str:
    """The whole model if it is faster than its blocks by more than the noise of the measurement."""
    block, model = milliseconds.get("block"), milliseconds.get("model")
    return "model" if block and model and model < (1 - MIN_GAIN) * block else "block"


def may_compile_whole(job: Job) -> bool:
    """Whether one graph can contain the model, and is likely to be faster than one per block."""
    if (
        job.custom is not None
        or job.config.activation_checkpoint.offload
        or set(job.layout.active_axes) - {"replicate"}
    ):
        return False
    return parameter_count(job) < MAX_PARAMETERS


def pays(steps: int, step_seconds: float) -> bool:
    """Whether so many steps are likely to save more time than compiling the whole model takes."""
    return steps * step_seconds * EXPECTED_GAIN > COMPILE_SECONDS


def time_attention(step: Step, inputs: tuple[Tensor, ...]) -> dict[str, float | None]:
    """The milliseconds that the attention of a micro-batch takes by each backend, forward and backward."""
    model, autocast, calls = step.parallel_model, step.precision.autocast, AttentionCalls()
    with (
        torch.no_grad(),
        unchanged_module(model.module),
        torch.compiler.set_stance("force_eager"),
        autocast(),
        model.micro_step(last=True),
        calls,
    ):
        model.forward_loss(*inputs)
    model.reshard()
    step.discard_pass()
    return {name: calls.time(name, autocast) for name in MEASURED}


def time_scopes(job: Job, step: Step, inputs: tuple[Tensor, ...]) -> dict[str, float | None]:
    """The milliseconds of forward and backward of a micro-batch, with compiled blocks and, if the run is long enough,
    with the whole model compiled; the model is left as the faster one.
    """
    module = step.parallel_model.module
    with_blocks = module.forward
    times: dict[str, float | None] = {"block": time_passes(step, inputs)}
    steps = (job.config.steps - job.first_step) * job.batch.accumulation
    if not pays(steps, (times["block"] or 0.0) / 1000):
        return times
    compile_whole(module, job.config.activation_checkpoint.memory_budget)
    try:
        times["model"] = time_passes(step, inputs)
    except Exception:  # noqa: BLE001  the graph cannot be compiled or needs more memory, and blocks work
        times["model"] = None
    if faster_scope(times) == "block":
        module.forward = with_blocks
        torch.cuda.empty_cache()
    return times


def time_passes(step: Step, inputs: tuple[Tensor, ...]) -> float:
    """The milliseconds of forward and backward of a micro-batch; its gradients are discarded."""
    model = step.parallel_model
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    try:
        with unchanged_module(model.module):
            for repeat in range(WARMUP + REPEATS):
                step.world.heartbeat.beat()
                if repeat == WARMUP:
                    events[0].record()
                with model.micro_step(last=True):
                    with step.precision.autocast():
                        losses, _ = model(*inputs)
                    losses.backward()
                step.optimizer.zero_grad()
            events[1].record()
            events[1].synchronize()
    finally:
        step.discard_pass()
    return float(events[0].elapsed_time(events[1])) / REPEATS
