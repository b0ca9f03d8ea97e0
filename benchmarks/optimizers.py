"""Muon against AdamW: the held-out loss after 300 steps at each one's best of five learning rates.

`small` in full takes two minutes on a GPU and hours on two CPU cores, where `tiny` is trained instead.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.base.config import RunConfig, load_config
from meshwright.base.models.registry import run_spec
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.sample_lookup import build_stream
from meshwright.core.models.init import build_model
from meshwright.core.optim.build import build_optimizer
from meshwright.core.optim.schedule import learning_rate

KINDS = ("adamw", "muon")
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
STEPS = 300
EVALUATED = 64
"""Held-out samples of the last evaluation."""
CURVE_EVERY = 25
MAX_RATIO = 1.0
"""The loss of Muon is at most that of AdamW."""

Samples = list[Tensor]
"""tokens and labels"""


def measure() -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    preset = "small" if device.type == "cuda" else "tiny"
    config = load_config(overrides=[f"--preset={preset}"])
    batches, held_out = load_samples(config, device)
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        for lr in RATES:
            loss, curve = train(config, kind, lr, batches, held_out, device)
            runs[kind].append({"lr": lr, "held_out_loss": round(loss, 4), "training_losses": curve})
            print(f"{preset}: {kind} at lr = {lr:g}: held-out loss {loss:.4f}", file=sys.stderr)
    best = {kind: min(runs[kind], key=lambda run: run["held_out_loss"]) for kind in KINDS}
    ratio = best["muon"]["held_out_loss"] / best["adamw"]["held_out_loss"]
    return {"preset": preset, "steps": STEPS, "runs": runs, "best": best, "muon_over_adamw": round(ratio, 3)}


def load_samples(config: RunConfig, device: torch.device) -> tuple[list[Samples], Samples]:
    """The batches of all steps, and the held-out samples."""
    [source] = open_sources(config.data, config.model.vocab, config.model.separator)
    stream = build_stream(config, [source])

    def read(ids: Any) -> Samples:
        columns = zip(*(source[int(sample)] for sample in ids), strict=True)
        return [torch.from_numpy(np.stack(column).astype(np.int64)).to(device) for column in columns]

    return [read(stream.step(step)) for step in range(STEPS)], read(stream.held_out_samples(EVALUATED))


def train(
    config: RunConfig, kind: str, lr: float, batches: list[Samples], held_out: Samples, device: torch.device
) -> tuple[float, list[float]]:
    """(held-out loss after the last step, training losses of some steps), with schedule and clipping of the preset."""
    model = build_model(config.model, config.seed).to(device)
    blocks = (run_spec(config).block_pattern,)
    optimizer = build_optimizer(
        dict(model.named_parameters()), replace(config.optimizer, kind=kind, lr=lr), blocks=blocks
    )
    one, losses = torch.ones((), device=device), []
    for step, batch in enumerate(batches):
        total, count = model(*batch)
        loss = total / count
        loss.backward()
        norm = optimizer.gradient_norm()
        optimizer.update(learning_rate(step, STEPS, lr, config.schedule), norm, one, torch.isfinite(norm))
        optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        total, count = model(*held_out)
    return float(total / count), [round(float(loss), 3) for loss in losses[::CURVE_EVERY]]
