"""The interval between checkpoints that wastes the least time, and the goodput that follows. Torch-free.

Young, "A first order approximation to the optimum checkpoint interval", 1974: the interval is the square root of twice
the stall times the mean time between failures. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", 2006: the same formula, exact to first order whatever the restart takes.
"""

from __future__ import annotations

import math


def best_checkpoint_interval(mtbf: float, stall: float) -> float:
    """Seconds of training between two checkpoints, from the mean time between failures of the whole job and the seconds
    for which a save stops the training.
    """
    if not (mtbf > 0 and stall > 0):
        raise ValueError(f"expected positive seconds, found mtbf = {mtbf:g} and stall = {stall:g}")
    return math.sqrt(2.0 * mtbf * stall)


def goodput(mtbf: float, stall: float, interval: float, outage: float) -> float:
    """The share of time that trains steps which are kept. Each failure costs its `outage` (seconds from the failure to
    the first new step) and, on average, half of an interval of training that is repeated.
    """
    training = interval / (interval + stall)
    return training * max(0.0, 1.0 - (outage + interval / 2.0) / (mtbf + outage))
