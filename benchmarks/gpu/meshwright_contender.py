"""Meshwright as a contender: the trainer of a rank with everything that a run records, on a token file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.shapes import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Shape
from benchmarks.gpu.timing import WARMUP
from benchmarks.gpu.token_batches import TokenSamples, write_token_file
from benchmarks.gpu.transformers_contenders import build_transformers_model
from meshwright.base.config import RunConfig, load_config
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.hardware.cluster import NODE_TYPES
from meshwright.base.records.heartbeat import Heartbeat
from meshwright.base.records.phases import STEP_PHASES
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.user_code.user_code import NO_USER_CODE, UserCode
from meshwright.core.launch.job import make_job
from meshwright.core.parallel.mesh import Meshes, init_mesh
from meshwright.core.parallel.world import World
from meshwright.core.trainer.job import TrainingObserver
from meshwright.core.trainer.loop import Training
from meshwright.core.trainer.step import StepOutcome
from meshwright.planner.calibration.run_prediction import predict_run

SETTINGS = (
    "steps=1000000",
    "precision.compute=bf16",
    "schedule.kind=constant",
    "schedule.warmup=0",
    "eval.every=0",
    "eval.holdout=0",
    "checkpoint.mode=off",
    f"optimizer.lr={LR}",
    f"optimizer.beta1={BETAS[0]}",
    f"optimizer.beta2={BETAS[1]}",
    f"optimizer.eps={EPS}",
    f"optimizer.weight_decay={WEIGHT_DECAY}",
    f"optimizer.clip={CLIP}",
)
"""The contenders' settings. Nothing else is set: all observation is on, and the fast path is what CUDA gets."""


def run_config(shape: Shape, device: torch.device, tokens: tuple[Path, str], settings: Sequence[str]) -> RunConfig:
    own = (f"batch.global={shape.batch}", f"data.sequence={shape.sequence}", f"launch.device={device.type}")
    source = ("data.kind=tokens", f"data.path={tokens[0]}", f"data.dtype={tokens[1]}")
    config = load_config(overrides=[*SETTINGS, *own, *source, *settings], ranks=1)
    return replace(config, model=shape.model_config())


class MeshwrightLoop:
    """The `Training` that `train_rank` runs. `settings` are further settings of the run file."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        settings: Sequence[str] = (),
        observer: TrainingObserver | None = None,
        transformers: bool = False,
        heartbeat: Heartbeat | None = None,
        process_group: AbstractContextManager[None] | None = None,
    ) -> None:
        with ExitStack() as resources:
            resources.enter_context(process_group or nullcontext())
            self.folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="meshwright-bench-")))
            config = run_config(shape, device, write_token_file(shape, self.folder), settings)
            user = NO_USER_CODE
            if transformers:
                user = UserCode(model=build_transformers_model(shape, device), source=TokenSamples(shape))
            (run := self.folder / "run").mkdir()
            job = make_job(config, RunFolder(run), user)
            job = replace(job, observer=observer or job.observer)
            with patch("meshwright.core.trainer.build.init_shard", init_on_device):
                heartbeat = heartbeat or Heartbeat(self.folder / "heartbeat")
                self.training = Training(job, World(device=device, heartbeat=heartbeat))
            resources.callback(self.training.signals.close)
            if transformers:  # the trainer trains a copy, and the user's own model need not be on the device
                user.model.to_empty(device="meta")
            self.device, self.resources = device, resources.pop_all()

    def step(self) -> None:
        """What the loop of `train_rank` does in every step."""
        self.training.run_step()
        if self.training.evaluation_is_due():
            self.training.evaluate()
        self.training.save_if_due()

    def loss(self) -> float:
        self.training.recorder.flush()
        return self.training.recorder.loss or 0.0

    def details(self) -> dict[str, Any]:
        """The share of fetch and copy in a step, and what the run chose by measurement."""
        self.training.recorder.flush()
        records = [json.loads(line) for line in self.training.job.folder.events(0).read_text().splitlines()]
        steps = [record["phases"] for record in records if record["kind"] == "step"][WARMUP:]
        loading, total = (sum(sum(row[p] for p in names) for row in steps) for names in (LOADING, STEP_PHASES))
        result: dict[str, Any] = {"fetch_and_copy_share": round(loading / total, 5)} if total else {}
        choices = [record["summary"] for record in records if record["kind"] == "choices"]
        return result | ({"choices": choices[-1]} if choices else {})

    def close(self) -> None:
        self.training.saver.close()
        self.training.log.close()
        self.training.spans.close()
        del self.training
        self.resources.close()


LOADING = ("fetch", "copy")


def predict(shape: Shape, settings: Sequence[str], device: str) -> dict[str, float] | None:
    """The step time and the peak memory that the planner predicts on a GPU; None for one that it does not know."""
    node = next((name for name in NODE_TYPES if name.upper() in device.upper()), None)
    if node is None:
        return None
    config = run_config(shape, torch.device("cuda"), (Path("tokens"), "uint32"), settings)
    record = predict_run(with_device_defaults(config, "cuda"), 0, device, f"{node}:1").record
    return {"step_ms": round(record["seconds"] * 1e3, 3), "peak_gib": round(record["memory"]["tensors"] / 2**30, 3)}


def init_on_device(local: Tensor, name: str, *_: object) -> None:
    """Draws initial values on the device. Meshwright draws the same bits on every device and layout, on the CPU, which
    takes seconds per billion parameters once per run.
    """
    if local.ndim > 1:
        local.normal_(0, 0.02)
    else:
        local.fill_(0.0 if name.endswith("bias") else 1.0)


@contextmanager
def process_group_of_one(device: torch.device) -> Iterator[None]:
    """The default process group of a single rank, which DDP and FSDP2 need."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class WrappedLoop(MeshwrightLoop):
    """Meshwright with DDP, or with FSDP2, on a single rank, where the trainer would wrap nothing."""

    def __init__(self, shape: Shape, device: torch.device, shard: bool, settings: Sequence[str] = ()) -> None:
        settings = (*settings, "layout.shard=parameters") if shard else settings
        with ExitStack() as patches:
            patches.enter_context(
                patch("meshwright.core.parallel.parallelize.wraps_data_parallel", lambda _layout: True)
            )
            if shard:
                meshes = partial(mesh_of_one, device)
                patches.enter_context(patch("meshwright.core.parallel.parallelize.build_meshes", meshes))
            super().__init__(shape, device, settings, process_group=process_group_of_one(device))


def mesh_of_one(device: torch.device, *_: object, **__: object) -> Meshes:
    return Meshes(init_mesh({"shard": 1}, device.type))


class UnobservedLoop(MeshwrightLoop):
    """Meshwright without step records, spans, phases and heartbeat."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__(shape, device, heartbeat=Heartbeat())
        self.numbers = torch.zeros(5)
        self.training.recorder.add = self.keep_numbers  # type: ignore[method-assign]

    def keep_numbers(self, outcome: StepOutcome) -> None:
        self.numbers = outcome.numbers

    def step(self) -> None:
        with patch("meshwright.core.trainer.step.StepClock", SilentClock):
            super().step()

    def loss(self) -> float:
        return float(self.numbers[0])


class SilentClock:
    """A step clock that stamps nothing."""

    def __init__(self, *_: object) -> None:
        self.waits = self.outside = None

    def enter(self, _phase: str) -> str:
        return ""

    def close(self) -> None:
        pass
