"""Lab: a design review in five parts, compared with the figures of the planner."""

from meshwright_practice.labs.lab import Lab

LAB = Lab(
    id="five_part_scenario",
    title="Answer a design review in five parts",
    problem=(
        "A review is convincing if it names the problem, the mechanism (which state moves, and where), the "
        "communication (which collective, how many bytes), the tradeoff (what it costs) and the measurement that would "
        "prove it wrong. Framework names without numbers are not an answer. The file describes a job that does not "
        "fit; write the five parts below their headings. `meshwright plan` gives every figure that you need."
    ),
    functions=(),
    checks=(
        "five parts",
        "problem.limit",
        "problem.figure",
        "mechanism.strategy",
        "mechanism.state",
        "communication.collective",
        "communication.bytes",
        "tradeoff.price",
        "tradeoff.figure",
        "measurement.metric",
        "no wrong statement",
    ),
    hints=(
        "Mixed precision with AdamW has 18 bytes of state per parameter here: 2 of weights, 4 of gradients and 12 of "
        "master weights and moments. Multiply by 8.03 billion and compare with the device.",
        "meshwright plan llama-8b --cluster h100:8 --explain prints the best layout with its memory, its collectives "
        "and what was rejected.",
        "Say which of parameters, gradients and optimizer state are divided by 8, and which stay whole on every rank.",
        "A rank reduce-scatters the gradients of every micro-batch, 4 bytes per parameter, and all-gathers the "
        "parameters, 2 bytes per parameter.",
        "The measurement names a metric that a run prints: peak memory, step time, exposed communication, tokens/s.",
    ),
    items=(1, 3, 4, 5, 6, 8, 9, 10, 12, 114),
    chapter="handbook/judgement.md",
    suffix=".md",
)
