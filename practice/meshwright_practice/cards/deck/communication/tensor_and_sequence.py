"""Cards on tensor, sequence and context parallelism."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.references import (
    FSDP2_DOCS,
    MEGATRON_3D_PAPER,
    MEGATRON_PAPER,
    RING_ATTENTION_PAPER,
    SEQUENCE_PAPER,
    TENSOR_PARALLEL_DOCS,
    ULYSSES_PAPER,
    own_run,
)

CHAPTER = "handbook/tensor-and-sequence.md"
TENSOR_STEP = Experiment(
    "communication.axis_traffic:tensor_parallel",
    ranks=2,
    knobs=(
        Knob("layers", (2, 4), "blocks of the model"),
        Knob("ranks", (2, 4), "ranks: tensor-parallel, or data-parallel in the layouts beside it"),
    ),
)
DIVIDED_SEQUENCE = Experiment(
    "communication.sequence_axes:divide",
    ranks=2,
    knobs=(
        Knob("sequence", (32, 64), "tokens of a sequence"),
        Knob("kv_heads", (4, 2), "key and value heads, of 4 query heads"),
    ),
)
SAME_LOSS = Relation("the losses of all layouts are equal to rounding", "loss_difference", "<=", 1e-10)

CARDS = (
    Card(
        id="when-tensor-parallelism",
        kind="communication",
        question="When do you choose tensor parallelism, and what does it cost?",
        answer=(
            "When one layer is too large or too slow for one device, or when more data-parallel ranks would make the "
            "batch too large. It divides the matrix products inside a layer, so parameters, their state and most "
            "activations of the layer fall by the degree, and each product gets faster. The cost is communication "
            "inside forward and backward: per block four all-reduces of the activations, or as many all-gather and "
            "reduce-scatter pairs. It belongs on the fastest links, and it is not the first thing to try: DDP is "
            "simpler where the model fits."
        ),
        notes=(
            "A block divides its first matrices by columns and its last by rows, for attention (by heads) and "
            "feed-forward: one all-reduce each in forward, one each in backward. Message: b s d elements (b samples, s "
            "tokens, d width). With sequence parallelism between the products, each all-reduce becomes an all-gather "
            "and a reduce-scatter: here 4 and 4 per block, with the same bytes. The degree must divide the heads. "
            "Matrices become narrower with the degree, and their products less efficient."
        ),
        mistake="Tensor parallelism is proposed first for every job on several GPUs.",
        experiment=TENSOR_STEP,
        predictions=(
            Prediction(
                "all_reduce_equivalents_per_block",
                "How many all-reduces of activations, or pairs of gather and scatter, has a block per step?",
                "per block",
            ),
            Prediction(
                "parameter_tensor",
                "Two tensor-parallel ranks: which share of the parameters has each?",
                "of the parameters",
                0.05,
            ),
        ),
        relations=(
            Relation("a block has four all-gathers", "all_gathers_per_block", "==", 4),
            Relation("and four reduce-scatters", "reduce_scatters_per_block", "==", 4),
            Relation("each message is the activations of the micro-batch", "message_per_collective", "==", 1.0, 1e-9),
            Relation("parameters are divided", "parameter_tensor", "==", 0.5, 0.02),
            Relation("so are most activations", "activation_tensor", "<", 0.7),
            SAME_LOSS,
        ),
        refuted=(
            Relation(
                "tensor parallelism synchronizes once per step, as DDP does",
                "all_gathers_per_block",
                "<=",
                "ddp_all_reduces",
            ),
        ),
        sources=(MEGATRON_PAPER, SEQUENCE_PAPER, TENSOR_PARALLEL_DOCS, own_run("when-tensor-parallelism")),
        items=(38, 39, 40),
        chapter=CHAPTER,
    ),
    Card(
        id="tensor-parallelism-needs-fast-links",
        kind="communication",
        question="Why should tensor parallelism usually stay inside a fast interconnect domain?",
        answer=(
            "Its collectives sit on the critical path: the next matrix product needs their result, in forward as well "
            "as in backward, so hardly anything can hide them. There are four per block and step, with "
            "activation-sized messages. Data parallelism sends gradients once per step, in the background of backward. "
            "So the axis that waits most gets the fastest links: tensor-parallel groups inside the NVLink domain, data "
            "parallelism across nodes. The same number of GPUs in another order can be several times slower."
        ),
        notes=(
            "The experiment counts collectives that begin in the forward phase on two ranks: with tensor parallelism "
            "there are some per block, with DDP none. The times are the planner's estimates for 32 blocks of width "
            "4,096 and 4,096 tokens in bfloat16 on two nodes of eight GPUs: degree 8 inside a node, and with one rank "
            "per node across nodes. Frameworks overlap a part of it by splitting products, which does not change the "
            "order of magnitude."
        ),
        mistake="GPUs are counted, and their placement is left to chance.",
        experiment=Experiment(
            "communication.links:tensor_placement",
            ranks=2,
            knobs=(
                Knob("device", ("h100", "a100-80", "b200"), "the node type of the planner"),
                Knob("tensor", (8, 4, 2), "tensor-parallel degree"),
            ),
        ),
        claims=(
            claim("DDP's gradient all-reduce begins in the forward phase.", "in_forward_data", ">", 0),
            claim("Tensor-parallel collectives begin in the forward phase.", "in_forward_tensor", ">", 0),
            claim(
                "Across nodes, the tensor-parallel collectives take more than three times as long.", "slowdown", ">", 3
            ),
            claim(
                "Across nodes, they take longer than the gradient all-reduce of the same model.",
                "tensor_across",
                ">",
                "data_across",
            ),
        ),
        relations=(
            Relation("a forward pass of tensor parallelism has collectives", "in_forward_tensor", ">", 0),
            Relation("one of DDP has none", "in_forward_data", "==", 0),
            Relation("across nodes they take several times as long", "slowdown", ">", 3),
            Relation("inside a node they stay inside", "nodes_inside", "==", 1),
        ),
        refuted=(
            Relation(
                "the same number of GPUs costs the same wherever they are", "tensor_across", "<=", "tensor_inside"
            ),
        ),
        sources=(MEGATRON_3D_PAPER, own_run("tensor-parallelism-needs-fast-links")),
        items=(41, 42),
        chapter=CHAPTER,
    ),
    Card(
        id="sequence-and-context-parallelism",
        kind="state placement",
        question=(
            "What are sequence parallelism and context parallelism for, and how do they differ from data parallelism?"
        ),
        answer=(
            "All three divide tokens. Data parallelism divides the samples: each rank has other sequences. The other "
            "two divide one sequence, to lower activation memory when sequences are long. Sequence parallelism is the "
            "companion of tensor parallelism: norms and residuals work on a part of the tokens, while attention still "
            "sees all tokens with a part of the heads. Context parallelism keeps the sequence divided in attention as "
            "well, with all heads and full weights; keys and values travel around a ring, or an all-to-all swaps "
            "tokens for heads."
        ),
        notes=(
            "S tokens, C context ranks, H query heads, K key and value heads, D head size, e bytes. Ring: C - 1 sends "
            "of 2 B K (S / C) D e in forward, twice that in backward; it can hide behind attention and gains from few "
            "key heads. All-to-all (Ulysses): (2 H + 2 K) B (S / C) D e out and back, needs heads divisible by C. "
            "Parameters are replicated, so context ranks take part in the gradient sum. Causal masks make chunks "
            "unequal; two chunks per rank, one early and one late, balance them."
        ),
        mistake="They are confused with data parallelism. Ranks of a context group read the same samples.",
        experiment=DIVIDED_SEQUENCE,
        predictions=(
            Prediction(
                "attention_tokens_ring",
                "2 context-parallel ranks, 32 tokens: how many queries of a sequence has a rank in attention?",
                "tokens",
            ),
            Prediction(
                "attention_tokens_tensor", "And with sequence parallelism of tensor parallelism over 2 ranks?", "tokens"
            ),
        ),
        relations=(
            Relation("context parallelism divides the queries", "attention_tokens_ring", "==", 16),
            Relation("and keeps all heads", "attention_heads_ring", "==", "heads"),
            Relation("its ranks read the same samples", "same_samples_ring", "==", 1),
            Relation("data-parallel ranks do not", "same_samples_data", "==", 0),
            Relation("it lowers activations", "activation_ring", "<", 0.6),
            Relation("the ring sends what its formula says", "ring_bytes", "==", "ring_formula"),
            SAME_LOSS,
        ),
        refuted=(Relation("context parallelism divides the parameters", "parameter_ring", "<", 0.9),),
        sources=(SEQUENCE_PAPER, RING_ATTENTION_PAPER, ULYSSES_PAPER, own_run("sequence-and-context-parallelism")),
        items=(46, 47, 48),
        chapter=CHAPTER,
    ),
    Card(
        id="fsdp-or-tensor-parallelism",
        kind="state placement",
        question="FSDP and tensor parallelism both help when a model does not fit. How do they differ?",
        answer=(
            "FSDP divides what is stored; tensor parallelism divides what is computed. With FSDP every rank gathers "
            "the full weights of a unit and computes all of it for its own samples, so activations are not divided, "
            "and the bytes follow the parameters. With tensor parallelism the ranks of a group work on the same "
            "samples, each with a part of every matrix; weights are never gathered, activations are divided, and the "
            "bytes follow the batch. So FSDP wants large batches and tolerates slower links; tensor parallelism "
            "shrinks a single layer and wants fast ones."
        ),
        notes=(
            "N ranks, W bytes of all parameters, b s d activation elements of a micro-batch. FSDP: 3 W (N - 1) / N per "
            "micro-batch, peak parameters W / N + a unit. Tensor: about 8 b s d elements per block and micro-batch, "
            "forward and backward together, times (N - 1) / N; parameters W / N throughout. They combine: tensor "
            "parallelism inside a node, FSDP over the other ranks. Same samples per step in this run: two per rank "
            "with FSDP, four for the group of two with tensor parallelism."
        ),
        mistake="Both are called model parallelism, and the difference in activations and in batch is lost.",
        experiment=TENSOR_STEP,
        claims=(
            claim("FSDP lowers the activations of a sample on a rank.", "activation_fsdp", "<", 0.95),
            claim("Tensor parallelism lowers the activations of a sample on a rank.", "activation_tensor", "<", 0.7),
            claim(
                "FSDP has some full unit of parameters in memory; tensor parallelism has none.",
                "parameter_fsdp",
                ">",
                "parameter_tensor",
            ),
            claim("Ranks of a tensor-parallel group read different samples.", "data_degree_tensor", ">", 1),
        ),
        relations=(
            Relation("FSDP keeps the activations of data parallelism", "activation_fsdp", "==", "activation_ddp", 1e-9),
            Relation("tensor parallelism divides them", "activation_tensor", "<", 0.7),
            Relation("its peak of parameters has no gathered unit", "parameter_tensor", "<", "parameter_fsdp"),
            Relation("a tensor-parallel group reads the same samples", "data_degree_tensor", "==", 1),
            Relation("FSDP ranks read different ones", "data_degree_fsdp", "==", 2),
            SAME_LOSS,
        ),
        refuted=(Relation("both divide activations", "activation_fsdp", "<", 0.95),),
        sources=(FSDP2_DOCS, TENSOR_PARALLEL_DOCS, MEGATRON_PAPER, own_run("fsdp-or-tensor-parallelism")),
        items=(147,),
        chapter=CHAPTER,
    ),
    Card(
        id="trap-sequence-equals-context",
        kind="state placement",
        question="True or not: sequence parallelism and context parallelism are two names for splitting the sequence.",
        answer=(
            "Not true. In the Megatron sense, sequence parallelism belongs to tensor parallelism: it divides the "
            "tokens only between the matrix products, in norms, dropout and residuals. Attention sees all tokens, with "
            "a part of the heads, and weights are divided. Context parallelism divides the tokens everywhere, "
            "attention included, and replicates the weights; attention then needs a ring or an all-to-all. One saves "
            "what tensor parallelism left replicated; the other makes sequences possible that no single device could "
            "attend to."
        ),
        notes=(
            "On two ranks with S tokens and H heads. Sequence with tensor: S / 2 tokens at the norm, S tokens and H / "
            "2 heads at attention, half of the parameters. Context: S / 2 tokens at the norm, S / 2 queries and H "
            "heads at attention, all parameters. DeepSpeed-Ulysses calls its all-to-all 'sequence parallelism', so ask "
            "which one is meant. They combine."
        ),
        mistake="'Split the sequence' is answered without saying what attention sees.",
        experiment=DIVIDED_SEQUENCE,
        claims=(
            claim(
                "In both, a rank has half of the tokens at attention.",
                "attention_tokens_tensor",
                "==",
                "attention_tokens_ring",
            ),
            claim(
                "In both, a rank has half of the tokens at the norm.", "norm_tokens_tensor", "==", "norm_tokens_ring"
            ),
            claim(
                "Context parallelism has all heads at attention, sequence parallelism a part.",
                "attention_heads_ring",
                ">",
                "attention_heads_tensor",
            ),
            claim("Both divide the parameters.", "parameter_ring", "==", "parameter_tensor", 0.05),
        ),
        relations=(
            Relation("both divide the tokens at the norm", "norm_tokens_tensor", "==", "norm_tokens_ring"),
            Relation("sequence parallelism has all tokens at attention", "attention_tokens_tensor", "==", "sequence"),
            Relation("context parallelism has half of them", "attention_tokens_ring", "==", 16),
            Relation("sequence parallelism has half of the heads", "attention_heads_tensor", "==", 2),
            Relation("context parallelism replicates the parameters", "parameter_ring", "==", 1.0),
            SAME_LOSS,
        ),
        refuted=(Relation("both split attention by tokens", "attention_tokens_tensor", "==", "attention_tokens_ring"),),
        sources=(SEQUENCE_PAPER, RING_ATTENTION_PAPER, ULYSSES_PAPER, own_run("trap-sequence-equals-context")),
        items=(46, 47),
        chapter=CHAPTER,
    ),
)
