"""Lab: ZeRO-1, ZeRO-2 and ZeRO-3 on raw collectives."""

from meshwright_practice.labs.lab import Lab, LabFunction

LAB = Lab(
    id="zero_stages",
    title="ZeRO-1, ZeRO-2 and ZeRO-3 on raw collectives",
    problem=(
        "Data-parallel ranks keep the same optimizer state, gradients and weights. ZeRO-1 divides the optimizer state: "
        "each rank updates its shard of every weight and gathers the rest. ZeRO-2 also divides gradients: each one is "
        "reduce-scattered during backward and freed. ZeRO-3 also divides weights: each is gathered just before its "
        "use, in forward and again in backward. The first two move as many bytes as an all-reduce of the gradients, "
        "2 (N - 1) / N of the weights; ZeRO-3 moves 3 (N - 1) / N."
    ),
    functions=(
        LabFunction(
            "zero1_step",
            ("weights", "gradients", "moments", "lr"),
            "None",
            "reduce-scatters the local gradients to their mean, updates the shards, and gathers the weights, in place",
        ),
        LabFunction(
            "zero2_attach",
            ("weights", "gradient_shards"),
            "None",
            "registers hooks: a gradient that is ready is reduce-scattered into its shard, and the full one is freed",
        ),
        LabFunction(
            "zero2_step",
            ("weights", "gradient_shards", "moments", "lr"),
            "None",
            "updates the shards with gradients that are reduced already, and gathers the weights, in place",
        ),
        LabFunction(
            "zero3_linear",
            ("x", "shard", "out_features"),
            "Tensor",
            "is x @ weight.T, where the weight is gathered from the shards of all ranks, and freed after each use",
        ),
    ),
    checks=(
        "ZeRO-1: 2 ranks return",
        "ZeRO-1: weights",
        "ZeRO-1: bytes",
        "ZeRO-1: memory",
        "ZeRO-2: 2 ranks return",
        "ZeRO-2: gradient shards",
        "ZeRO-2: weights",
        "ZeRO-2: order",
        "ZeRO-2: bytes",
        "ZeRO-2: memory",
        "ZeRO-3: 2 ranks return",
        "ZeRO-3: output",
        "ZeRO-3: gradients",
        "ZeRO-3: bytes",
        "ZeRO-3: saved tensors",
        "ZeRO-3: memory",
    ),
    hints=(
        "The shard of rank r is weight.view(-1).chunk(N)[r]. It is a view, so an update of it changes the weight, "
        "and dist.all_gather_into_tensor(weight.view(-1), shard) fills in the shards of the others.",
        "dist.reduce_scatter_tensor(shard, full) sums over ranks and gives rank r the chunk r. Divide the shard by N: "
        "that costs less than to divide the full gradient.",
        "zero2_attach registers weight.register_post_accumulate_grad_hook. The hook reduce-scatters weight.grad, then "
        "sets weight.grad to None.",
        "zero3_linear is a torch.autograd.Function. Forward saves x and the shard, not the gathered weight; backward "
        "gathers the weight again.",
        "With y = x @ W.T: the gradient of x is grad_y @ W, and that of W is grad_y.T @ x. It is reduce-scattered "
        "to the shard, and divided by N.",
    ),
    items=(27, 28, 29, 30, 31, 34, 64, 65, 133, 137, 140, 141),
    chapter="handbook/sharding.md",
)
