"""Placeholder until merged."""

from torch import nn


def banks_of(module: nn.Module) -> list[nn.Module]:
    return []
