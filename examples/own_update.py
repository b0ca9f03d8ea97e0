"""An optimizer and a schedule of your own: any elementwise torch.optim.Optimizer, and a function of the step.

Run it with: PYTHONPATH=examples meshwright train --optimizer own_update:rmsprop --schedule own_update:one_cycle
"""

import math

import torch


def rmsprop(groups):
    """Makes the optimizer of the parameter groups that it gets; the learning rate is that of the run."""
    return torch.optim.RMSprop(groups, alpha=0.95, momentum=0.9)


def one_cycle(step, steps):
    """The learning rate of a step as a multiple of optimizer.lr: up in the first third of the run, then down."""
    peak = max(1, steps // 3)
    if step < peak:
        return (step + 1) / peak
    return 0.5 * (1 + math.cos(math.pi * (step - peak) / max(1, steps - peak)))
