"""Imbalance of experts: tokens that go to few of them, and ranks that compute more than others. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.base.history.run_history import RunHistory
from meshwright.insight.diagnose.finding import Change, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.timed_steps import LIMITING_SHARE, TimedSteps, timed_steps

IDLE_LOAD = 0.1
"""An expert with less than this multiple of an even share is idle."""
COLLAPSED = 0.5
"""Share of idle experts above which routing has collapsed: those parameters are not trained."""
SKEWED = 2.0
"""Largest load of an expert, as a multiple of an even share, that is not reported."""
MAX_BIAS_RATE, MAX_AUX_LOSS = 0.1, 0.1
"""Load balancing above these rates works against the loss."""
EXPERT_COMPUTE = 0.5
"""Assumed share of the passes that experts compute; the rest of a block is equal on all ranks."""


def find(history: RunHistory) -> Iterator[Finding]:
    steps, event = timed_steps(history), history.expert_loads
    if steps is None or event is None or not event["loads"] or len(event["loads"][0]) < 2:
        return
    loads = np.array(event["loads"], dtype=float)
    even = np.maximum(1.0, loads.mean(axis=1, keepdims=True))
    relative = loads / even
    block, expert = np.unravel_index(int(np.argmax(relative)), relative.shape)
    imbalance, idle = float(relative.max()), float((relative[block] < IDLE_LOAD).mean())
    share = lost_share(steps, loads)
    collapsed = idle >= COLLAPSED
    if not collapsed and (imbalance < SKEWED or share < LIMITING_SHARE):
        return
    unused = round(idle * loads.shape[1])
    yield Finding(
        "experts",
        "collapsed routing" if collapsed else "skewed routing",
        f"expert {expert} of block {block} receives {imbalance:.1f} times an even share of the tokens at step "
        f"{event['step']}" + (f", and {unused} of {loads.shape[1]} experts almost none" if unused else ""),
        share,
        "high",
        step=int(event["step"]),
        axis="expert" if steps.layout.expert > 1 else "",
        evidence=(
            MeasuredFigure(
                f"tokens of expert {expert}, block {block}",
                float(loads[block, expert]),
                "count",
                float(loads[block].mean()),
                "an even share",
            ),
            MeasuredFigure(f"idle experts, block {block}", idle, "share"),
        ),
        change=balance_change(steps),
        check="meshwright diagnose RUN",
    )


def lost_share(steps: TimedSteps, loads: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    """The share of the step time in which ranks wait for the rank with the most tokens for its experts."""
    ranks, experts = steps.layout.expert, loads.shape[1]
    if ranks == 1 or experts % ranks:
        return 0.0
    by_rank = loads.reshape(len(loads), ranks, experts // ranks).sum(axis=2)
    mean = by_rank.mean()
    worst = float(by_rank.max(axis=1).mean() / mean) if mean > 0 else 1.0
    passes = float(np.median(steps.local_seconds("forward", "backward").max(axis=0)))
    return EXPERT_COMPUTE * (1 - 1 / worst) * passes / steps.duration


def balance_change(steps: TimedSteps) -> Change:
    """Turns load balancing on, or makes it stronger; both change the numbers."""
    model = steps.config.model
    strengths = (
        ("router_bias_rate", model.router_bias_rate or 0.001, MAX_BIAS_RATE),
        ("router_aux_loss", model.router_aux_loss or 0.0001, MAX_AUX_LOSS),
    )
    settings = (*(f"model.{key} = {min(10 * now, most):g}" for key, now, most in strengths if now < most),)
    return Change(
        settings, "balance the load of the experts; if samples are nearly equal to each other, look at the data"
    )
