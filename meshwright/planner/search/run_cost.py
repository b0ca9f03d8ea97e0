"""What a token budget costs with a plan: time, GPU-hours, money and energy; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import ConfigError
from meshwright.planner.cost.estimate import Estimate

SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
MAX_TOKENS = 1e18
MAX_PRICE = 1e9
"""Limit of the price of a GPU-hour: the cost of every token budget is finite."""


@dataclass(frozen=True)
class RunCost:
    """A training run of a number of tokens; goodput and failures are not counted."""

    tokens: float
    steps: float
    days: float
    gpu_hours: float
    gpu_hours_low: float
    gpu_hours_high: float
    """the ends of the 80 % interval"""
    price: float | None
    """price of a GPU-hour"""
    watts: float | None
    """power limit of a device, near which training stays; None if it is unknown"""

    @property
    def money(self) -> float | None:
        return None if self.price is None else self.gpu_hours * self.price

    @property
    def megawatt_hours(self) -> float | None:
        """Energy of the devices alone, at their power limit: host, network and cooling come on top."""
        return None if self.watts is None else self.gpu_hours * self.watts / 1e6


def run_cost(plan: Estimate, tokens: float, price: float | None) -> RunCost:
    steps, devices = tokens / plan.job.tokens_per_step, plan.job.layout.ranks
    hours = steps * plan.seconds / 3600
    return RunCost(
        tokens,
        steps,
        hours / 24,
        hours * devices,
        hours * devices * plan.interval_low / plan.seconds,
        hours * devices * plan.interval_high / plan.seconds,
        price,
        plan.job.cluster.device.power or None,
    )


def parse_tokens(text: str) -> float:
    """Parses a number of tokens such as 15T, 300B or 2e12."""
    number, factor = text.strip(), 1.0
    if number[-1:].upper() in SUFFIXES:
        number, factor = number[:-1], SUFFIXES[number[-1].upper()]
    try:
        tokens = float(number) * factor
    except ValueError:
        tokens = 0.0
    if not 0 < tokens <= MAX_TOKENS:
        raise ConfigError(f"--tokens {text[:24]} is not a number of tokens", "expected a number such as 15T or 300B")
    return tokens
