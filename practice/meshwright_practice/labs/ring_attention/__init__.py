"""Lab: causal attention over a sequence that is divided among ranks."""

from meshwright_practice.labs.lab import Lab, LabFunction

LAB = Lab(
    id="ring_attention",
    title="Ring attention with an online softmax",
    problem=(
        "Context parallelism divides each sequence into chunks, one per rank, so that activations of long sequences "
        "fit. Attention needs all keys and values: they travel around a ring, one chunk per step, and every rank "
        "merges the attention of its queries over the chunk at hand into its result. The softmax over chunks is exact "
        "if the log-sum-exp of each part is kept. Only the forward pass is asked for; the backward pass is a "
        "second ring."
    ),
    functions=(
        LabFunction(
            "chunk_attention",
            ("q", "k", "v", "mask"),
            "tuple[Tensor, Tensor]",
            "attends to one chunk: returns the output and the log-sum-exp of the scores of each query",
        ),
        LabFunction(
            "merge",
            ("out_a", "lse_a", "out_b", "lse_b"),
            "tuple[Tensor, Tensor]",
            "merges the attention over two sets of keys into that over both",
        ),
        LabFunction(
            "ring_attention",
            ("q", "k", "v"),
            "Tensor",
            "causal attention of this rank's queries over the whole sequence",
        ),
    ),
    checks=(
        "functions return",
        "chunk",
        "large scores",
        "merge",
        "merge of nothing",
        "4 ranks return",
        "attention",
        "messages",
        "bytes",
        "overlap",
        "memory",
    ),
    hints=(
        "softmax(s) v = sum(exp(s - m) v) / sum(exp(s - m)), for any m; with m = max(s) nothing overflows. The "
        "log-sum-exp of the scores is m + log(sum(exp(s - m))): torch.logsumexp computes it.",
        "With lse = logaddexp(lse_a, lse_b), the merged output is out_a exp(lse_a - lse) + out_b exp(lse_b - lse).",
        "A chunk that is wholly in the future has the log-sum-exp -inf for every query. Skip it, or make sure that "
        "-inf minus -inf is never computed.",
        "After s steps, rank r has the chunk of rank (r - s) % N. It lies before r's own (no mask), is r's own (causal "
        "mask), or lies behind it (nothing to attend to).",
        "Start the send and the receive of the next chunk, then compute with the chunk at hand, then wait: the "
        "transfer is hidden behind the compute.",
    ),
    items=(46, 47, 48),
    chapter="handbook/tensor-and-sequence.md",
)
