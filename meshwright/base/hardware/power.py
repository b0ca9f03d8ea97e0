"""The rate that a power limit leaves: sustained clocks against burst clocks; torch-free.

A device that runs large matmuls sits at its power limit, and lowers its clock until it keeps it. One H200 reaches 808
TFLOP/s in a burst of bf16 matmuls and sustains 671 (1,640 of 1,980 MHz at 700 W); 8-bit matmuls reach 1,538 and sustain
1,314. `Device.sustained_fraction` is by precision and for the data sheet's power. Under another limit the rate follows

    rate(watts) = rate(data sheet) (watts / data sheet watts) ^ 0.7

from H100s of 500 W and 700 W, which sustain 0.52 and 0.66 of the same peak in published runs: (500 / 700)^0.7 = 0.79.
That is two fitted fractions of two trainers, with other memory. In 8 bits the same boards were fitted with 0.5 and 0.6,
a ratio of 0.83 instead of 0.79, so that the law is less certain there. Power grows faster than the clock, because a
higher clock needs a higher voltage, and part of it does not depend on it.
"""

from __future__ import annotations

POWER_EXPONENT = 0.7


def power_limited_fraction(sustained_fraction: float, watts: float, data_sheet_watts: float) -> float:
    """The fraction of the peak that matmuls sustain under a limit of `watts`."""
    if not watts or not data_sheet_watts:
        return sustained_fraction
    return float(sustained_fraction * min(1.0, watts / data_sheet_watts) ** POWER_EXPONENT)
