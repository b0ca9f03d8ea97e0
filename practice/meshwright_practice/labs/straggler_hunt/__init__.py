"""Lab: the rank, the phase and the step of a straggler, from the records of a run."""

from meshwright_practice.labs.lab import Lab, LabFunction

LAB = Lab(
    id="straggler_hunt",
    title="Find the straggler in the records of a run",
    problem=(
        "In a synchronous step everybody waits for the slowest rank, so all ranks have the same step time, and the "
        "rank that waits the longest is a victim. The records of a run have, for every rank and step, the seconds of "
        "each phase, and `waits`: the seconds of a phase in which the rank waited for others inside a collective. Name "
        "the rank that does more than its share of work, the phase, and the step since which it does. A healthy run "
        "has no straggler, and one slow step does not make one."
    ),
    functions=(
        LabFunction(
            "local_seconds",
            ("record",),
            "dict[str, float]",
            "returns the seconds that a rank has worked in each phase, without what it waited for others",
        ),
        LabFunction(
            "find_straggler",
            ("records",),
            "dict | None",
            'returns {"rank": R, "phase": P, "since": S}, or None if no rank is a straggler',
        ),
    ),
    checks=(
        "functions return",
        "local seconds",
        "slow forward",
        "slow loader",
        "waits inside collectives",
        "since",
        "first step",
        "one stall",
        "healthy run",
        "every rank",
    ),
    hints=(
        "The phase `sync` is nothing but waiting. In the other phases, subtract `waits`.",
        "Compare a rank with the others in the same phase, not with itself: the median of all ranks is what the phase "
        "normally takes.",
        "Leave out step 0, which compiles and allocates. Use the median over steps: one stall must not decide.",
        "A rank is a straggler if its excess over the median of the ranks is at least a tenth of the step time, in the "
        "median over the steps since it began.",
        "`since` is the first step from which on the rank is behind in most steps.",
    ),
    items=(50, 55, 60, 95),
    chapter="handbook/failure-plane.md",
)
