"""Lab: all-reduce as a ring of sends and receives."""

from meshwright_practice.labs.lab import Lab, LabFunction

LAB = Lab(
    id="ring_all_reduce",
    title="Ring all-reduce on send and receive",
    problem=(
        "Every rank has a tensor, and every rank needs the sum. If each rank sends its whole tensor to all others, it "
        "sends (N - 1) D bytes. A ring needs 2 (N - 1) / N D bytes, which hardly grows with N: the tensor is divided "
        "into N chunks, and in every step each rank sends one chunk to its right neighbour and receives one from its "
        "left neighbour. After N - 1 steps of a reduce-scatter, each rank has the sum of one chunk; after N - 1 steps "
        "of an all-gather, it has all of them."
    ),
    functions=(
        LabFunction(
            "ring_reduce_scatter",
            ("chunks",),
            "int",
            "sums chunk by chunk around the ring, in place, and returns the index of the chunk that is complete here",
        ),
        LabFunction(
            "ring_all_gather",
            ("chunks", "complete"),
            "None",
            "passes complete chunks around the ring, in place, until every rank has all of them",
        ),
        LabFunction("ring_all_reduce", ("tensor",), "None", "replaces the tensor by the sum over all ranks, in place"),
    ),
    checks=(
        "4 ranks return",
        "reduce-scatter",
        "all-gather",
        "sum",
        "any length",
        "same bits on all ranks",
        "bytes",
        "messages",
        "memory",
        "3 ranks return",
        "sum on 3 ranks",
    ),
    hints=(
        "Write down, for 4 ranks, which chunk each rank sends in step 0, 1 and 2 of the reduce-scatter: rank r starts "
        "with chunk r, and then always sends the chunk that it has just received and added to.",
        "In step s, rank r sends chunk (r - s) % N and receives chunk (r - s - 1) % N. After the last step, chunk "
        "(r + 1) % N is complete on rank r.",
        "If all ranks call dist.send first, all of them wait for a receive that nobody has started. Start the send "
        "with dist.isend, receive, and then wait for the send.",
        "The all-gather is the same loop without the addition: in step s, rank r sends chunk (complete - s) % N and "
        "receives into chunk (complete - s - 1) % N.",
        "tensor.view(-1).tensor_split(N) returns N views of nearly equal length for any length, so the sum lands in "
        "the tensor itself.",
    ),
    items=(64, 131, 132, 156),
    chapter="handbook/collectives.md",
)
