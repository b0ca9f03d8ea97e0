"""Lab: column-parallel and row-parallel linear layers."""

from meshwright_practice.labs.lab import Lab, LabFunction

LAB = Lab(
    id="tensor_parallel_linear",
    title="Column-parallel and row-parallel linear layers",
    problem=(
        "Tensor parallelism divides the matrix products of one layer. A column-parallel linear layer gives each rank a "
        "part of the output features, a row-parallel one a part of the input features. In this order, with an "
        "elementwise activation between them, an MLP needs one all-reduce in forward and one in backward, each of the "
        "size of its input: the hidden features are never gathered. As in nn.Linear, a weight has the shape "
        "(out_features, in_features), and y = x @ weight.T + bias."
    ),
    functions=(
        LabFunction(
            "shard_column",
            ("weight", "rank", "ranks"),
            "Tensor",
            "returns this rank's part of the output features, consecutive ones",
        ),
        LabFunction(
            "shard_row",
            ("weight", "rank", "ranks"),
            "Tensor",
            "returns this rank's part of the input features, consecutive ones",
        ),
        LabFunction(
            "column_linear",
            ("x", "weight_shard"),
            "Tensor",
            "returns this rank's output features; the gradient of x is the sum over ranks",
        ),
        LabFunction(
            "row_linear",
            ("x_shard", "weight_shard", "bias"),
            "Tensor",
            "returns the full output on every rank, from this rank's input features",
        ),
        LabFunction(
            "mlp",
            ("x", "up_shard", "down_shard", "bias"),
            "Tensor",
            "is row_linear of the GELU of column_linear",
        ),
    ),
    checks=(
        "shards",
        "2 ranks return",
        "column output",
        "row output",
        "mlp output",
        "gradient of x",
        "gradients of weights",
        "gradient of bias",
        "messages in forward",
        "messages in backward",
        "saved tensors",
    ),
    hints=(
        "A weight has one row per output feature: the column-parallel shard is a part of its rows (chunk along dim 0), "
        "and the row-parallel shard is a part of its columns (dim 1).",
        "Every rank uses the same x, for other output features. So each rank computes only its part of the gradient of "
        "x, and the parts must be summed. The forward pass of that operator does nothing.",
        "Write two classes of torch.autograd.Function: one is the identity in forward and an all-reduce in backward; "
        "the other is an all-reduce in forward and the identity in backward.",
        "row_linear sums the products of all ranks with the second operator, and adds the bias after the sum: else it "
        "would be added once per rank.",
        "GELU acts on each hidden feature by itself, so it needs no other rank: mlp is "
        "row_linear(gelu(column_linear(x, up_shard)), down_shard, bias).",
    ),
    items=(37, 38, 39, 147),
    chapter="handbook/tensor-and-sequence.md",
)
