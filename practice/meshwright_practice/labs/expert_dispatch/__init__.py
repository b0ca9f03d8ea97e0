"""Lab: the experts of a layer on several ranks, and the all-to-all that brings tokens to them."""

from meshwright_practice.labs.lab import Lab, LabFunction

LAB = Lab(
    id="expert_dispatch",
    title="Dispatch tokens to experts, and combine what they return",
    problem=(
        "A router has chosen two experts per token. The experts are divided among the ranks: rank r has experts r E / "
        "N to (r + 1) E / N - 1. Each token goes to the ranks of its experts by an all-to-all, is processed there, and "
        "comes back by a second one, where the outputs are weighted by the gates and added. Only rows that were chosen "
        "may travel, the number of rows per expert is never the same, and gradients must flow back the same way."
    ),
    functions=(
        LabFunction(
            "route",
            ("chosen", "experts"),
            "tuple[Tensor, Tensor]",
            "returns the order that sorts all choices by expert, and the number of choices per expert",
        ),
        LabFunction(
            "moe",
            ("tokens", "chosen", "gates", "local_experts", "experts"),
            "Tensor",
            "sends tokens to their experts, and returns the weighted sum of what comes back",
        ),
    ),
    checks=(
        "route returns",
        "order",
        "counts",
        "2 ranks return",
        "outputs",
        "gradients",
        "uneven load",
        "collectives",
        "bytes",
    ),
    hints=(
        "chosen.flatten() has two entries per token; argsort(stable=True) of it is the order in which rows are sent, "
        "and order // 2 is the token of each row.",
        "The receiver does not know how many rows come. Exchange the counts first, with an all-to-all of integers: "
        "each rank sends its E counts, E / N per rank.",
        "torch.distributed.nn.functional.all_to_all_single has a gradient: it takes an output of the right size, the "
        "input, and the sizes of both by rank.",
        "Received rows are sorted by source rank and then by expert. Cut them with the counts that you have received, "
        "and apply to each piece the expert that it is for.",
        "On the way back sizes are swapped. Then the row i of the result belongs to the choice order[i]: weight it by "
        "its gate and add it to its token with index_add.",
    ),
    items=(49, 50, 51),
    chapter="handbook/experts.md",
)
