"""Checks log-probabilities: what a generator records is what the forward pass of the learner computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.base.config import IGNORE_INDEX, RunConfig
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shards import uses_fsdp
from meshwright.core.trainer.job import TrainingObserver
from meshwright.core.trainer.loop import Training
from meshwright.prover.claims import Claim, cuda_devices, describe_settings, proof_folder
from meshwright.prover.policy.recorded_run import PolicyRun
from meshwright.prover.shrink.policy_runs import scored_policy_run
from meshwright.rl.policy_head import PolicyHead
from meshwright.rl.rows import OLD_LOGPROB

LARGEST_DIFFERENCE = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.25, "fp16": 0.25}
"""Where the learner computes in another order than a generator, the difference of a log-probability that rounding
explains: beyond it, the importance weights would correct an error.
"""


class LogProbRecorder(TrainingObserver):
    """Compares, on every rank that has the head, the log-probabilities of each micro-batch with the recorded ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_start(self, training: Training) -> None:
        self.path = self.folder / f"logprobs-{training.world.rank:05d}.jsonl"
        for module in training.module.modules():
            if isinstance(module, PolicyHead):
                module.register_forward_pre_hook(self.compare, with_kwargs=True)

    @torch.no_grad()
    def compare(self, head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The head computes the loss from the same hidden state and the same function of it."""
        assert isinstance(head, PolicyHead)
        named = dict(zip(("hidden", "labels", "values"), args, strict=False)) | kwargs
        labels, values = named["labels"], named.get("values")
        if not head.training or values is None:
            return
        new = head.logprobs(named["hidden"], labels)
        self.write(new, values[..., OLD_LOGPROB], labels != IGNORE_INDEX)

    def write(self, new: Tensor, old: Tensor, valid: Tensor) -> None:
        new, old = new.to(old.dtype)[valid], old[valid]
        record = {
            "tokens": int(valid.sum()),
            "equal": int((new == old).sum()),
            "difference": float((new - old).abs().max()) if len(new) else 0.0,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def check_logprobs(user: RunConfig) -> Iterator[Claim]:
    """Trains some synchronous steps: the weights that train on a rollout are those that generated it."""
    config = scored_policy_run(user)
    with proof_folder() as base:
        yield compare_logprobs(PolicyRun(user, config, base / "cpu"))
        if cuda_devices(user.launch):
            on_device = replace(config, launch=replace(config.launch, device=user.launch.device))
            yield compare_logprobs(PolicyRun(user, on_device, base / "device"), on_cpu=False)


def compare_logprobs(run: PolicyRun, on_cpu: bool = True) -> Claim:
    config = run.config
    layout = Layout.from_config(config.layout)
    exact = on_cpu and is_exact(config, layout)
    precision = config.precision.compute
    largest = LARGEST_DIFFERENCE.get(precision, LARGEST_DIFFERENCE["bf16"])
    what = (
        "bitwise those of the learner's forward pass"
        if exact
        else f"those of the learner's forward pass, up to rounding (at most {largest:g})"
    )
    claim = (
        f"{layout}{describe_settings(config)}, {precision}, {'CPU' if on_cpu else 'CUDA'}: the log-probabilities that "
        f"a generator records are {what}, with the same weights and micro-batches of one group"
    )
    run.root.mkdir(parents=True)
    problem = run.train(observer=LogProbRecorder(run.root))
    records = [json.loads(line) for path in run.root.glob("logprobs-*.jsonl") for line in path.read_text().splitlines()]
    tokens, equal = (sum(record[name] for record in records) for name in ("tokens", "equal"))
    difference = max((record["difference"] for record in records), default=0.0)
    right = equal == tokens if exact else difference <= largest
    measured = f"{equal} of {tokens} tokens are equal bitwise, largest difference {difference:.1e}"
    return Claim(claim, not problem and tokens > 0 and right, "; ".join(filter(None, [problem, measured])), run.changes)


def is_exact(config: RunConfig, layout: Layout) -> bool:
    """Whether the learner's ranks compute every row in the same order as one process does."""
    rounds_units = uses_fsdp(layout) and config.precision.compute not in ("fp32", "fp64")
    divided = layout.tensor * layout.context * layout.expert > 1
    return not (divided or rounds_units or config.compile.enabled or config.precision.float8)
