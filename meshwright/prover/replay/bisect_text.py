"""Describes where two runs part, as text for people. Torch-free."""

from __future__ import annotations

from meshwright.prover.replay.run_difference import QUANTITIES, RunDifference

SHOWN_SETTINGS = 12


def describe_difference(difference: RunDifference, names: tuple[str, str]) -> str:
    """The verdict, then the settings that differ and the evidence."""
    lines = [verdict(difference)]
    if difference.parameter:
        lines.append(
            f"first parameter: {difference.parameter}; {difference.elements:,} elements differ, the largest difference "
            f"is {difference.largest:.6g}, {difference.relative:.3g} of the largest value"
        )
    lines += explanation(difference, names)
    settings = list(difference.settings.items())
    if settings:
        lines.append("what differs between the runs:")
        lines += [f"  {key}: {one} and {other}" for key, (one, other) in settings[:SHOWN_SETTINGS]]
        lines += [f"  and {len(settings) - SHOWN_SETTINGS} more" for _ in settings[SHOWN_SETTINGS:][:1]]
    else:
        lines.append("the runs have the same settings, data and machine")
    if difference.recorded_step is not None:
        pairs = (f"{key} {one} and {other}" for key, (one, other) in difference.recorded.items())
        lines.append(f"records differ first at step {difference.recorded_step}: {', '.join(pairs)}")
    if difference.equal_checkpoint is not None:
        lines.append(f"checkpoints are equal up to {difference.equal_checkpoint} steps")
    if difference.different_checkpoint is not None:
        lines.append(f"checkpoints differ after {difference.different_checkpoint} steps")
    return "\n".join(lines)


def verdict(difference: RunDifference) -> str:
    if difference.agree:
        return f"the runs agree on all {difference.common_steps:,} common steps"
    first = difference.first
    if first is None:
        begin, end = difference.steps or (0, 0)
        where = f"at step {end}" if begin == end else f"between steps {begin} and {end}"
        return f"the runs part {where}, and their replays agree"
    if first.quantity == "state":
        when = "in their initial parameters" if not first.step else f"before step {first.step}: no older state is left"
        return f"the runs part {when}"
    return f"the runs part at step {first.step}: {QUANTITIES[first.quantity]}"


def explanation(difference: RunDifference, names: tuple[str, str]) -> list[str]:
    """What it means that a replay is, or is not, bitwise equal to the records."""
    if difference.reproduced is None or all(difference.reproduced):
        return []
    broken = [name for name, equal in zip(names, difference.reproduced, strict=True) if not equal]
    return [
        f"the replay of {' and of '.join(broken)} is not equal to what the run recorded: its steps depended on "
        "something else, such as memory that was corrupted, or an operation that is not deterministic (on CUDA, "
        "precision.deterministic is off by default)"
    ]
