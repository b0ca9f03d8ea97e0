"""Checks the optimizer on gradients of many sizes with the user's settings.

The gradients of a proof run have norms of about one. Here they are from far below epsilon to far above any clip norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from meshwright.base.config import RunConfig
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.optim.build import build_optimizer
from meshwright.core.parallel.world import World
from meshwright.prover.claims import Claim
from meshwright.prover.compare.updates import is_update
from meshwright.prover.oracle.optimizer import clip_factor, global_norm
from meshwright.prover.oracle.update_rules import ReferenceOptimizer, State

SIZES = (1e-12, 1e-6, 1e-3, 1.0, 1e3, 1e6)
"""The size of each element of the gradients."""
UPDATES = 3
SHAPES = {
    "matrix": (5, 3),
    "vector": (7,),
    "decoder.blocks.0.matrix": (4, 6),
    "decoder.blocks.0.experts": (2, 5, 3),
    "decoder.blocks.0.norm": (6,),
}
BLOCKS = ("decoder.blocks.*",)


def check_optimizer(config: RunConfig) -> Iterator[Claim]:
    """Yields whether the package updates parameters by the definition of the optimizer, and skips steps that are not
    finite.
    """
    [wrong] = run_ranks(wrong_updates, 1, config, launch=replace(config.launch, device="cpu"))
    settings = config.optimizer
    claim = (
        f"updates follow the definition of {settings.kind} for gradients of any size ({settings.implementation}, "
        f"clip = {settings.clip:g}, eps = {settings.eps:g}, float64)"
    )
    measured = f"{len(SIZES) - len(wrong)} of {len(SIZES)} sizes of gradients, {UPDATES} updates and a skipped one each"
    yield Claim(claim, not wrong, measured + (f"; {wrong[0]}" if wrong else ""))


def wrong_updates(_world: World, config: RunConfig) -> list[str]:
    """Runs in a process of its own: torch's optimizers initialize CUDA, which does not survive the fork of ranks."""
    return [found for size in SIZES if (found := first_wrong_update(config, size))]


def first_wrong_update(config: RunConfig, size: float) -> str:
    """The first update with gradients of this size that differs from the definition; '' if none does."""
    generator = torch.Generator().manual_seed(0)

    def draw(scale: float) -> dict[str, Tensor]:
        return {n: scale * torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}

    parameters = {name: nn.Parameter(value) for name, value in draw(1.0).items()}
    optimizer = build_optimizer(parameters, config.optimizer, blocks=BLOCKS)
    reference = ReferenceOptimizer(config.optimizer, BLOCKS)
    expected = {name: value.detach().clone() for name, value in parameters.items()}
    states: dict[str, State] = {name: {} for name in expected}
    one, lr = torch.ones((), dtype=torch.float64), config.optimizer.lr or 1.0
    for number in range(UPDATES + 1):
        gradients, skipped = draw(size), number == 1
        factor = clip_factor(norm := global_norm(gradients), config.optimizer.clip)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name] * (torch.nan if skipped else 1.0)
        before = dict(expected)
        for name, gradient in gradients.items() if not skipped else ():
            clipped = gradient * factor
            expected[name], states[name] = reference.update(name, expected[name], clipped, states[name], lr)
        found = optimizer.gradient_norm()
        optimizer.update(lr, found, one, torch.isfinite(found))
        optimizer.zero_grad()
        for name, parameter in parameters.items():
            if not is_update(before[name], parameter.detach(), expected[name]):
                what = "a skipped step changes" if skipped else "the definition does not give"
                return f"gradients of norm {norm:.1e}: {what} the {name} after update {number}"
    return ""
