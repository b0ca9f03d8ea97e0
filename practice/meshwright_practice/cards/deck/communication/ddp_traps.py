"""Plausible wrong statements about DDP, and the runs that refute them."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.cards.deck.communication.ddp import (
    CHAPTER,
    STARTS_EARLY,
    UPDATE_MODES,
    WAITS_FOR_ALL,
    bucket_order,
)
from meshwright_practice.references import DDP_DOCS, DDP_NOTES, DDP_PAPER, FSDP2_DOCS, LOCAL_SGD_PAPER, own_run

BATCH_GROWTH = Experiment(
    "communication.axis_traffic:batch_dependence",
    ranks=2,
    knobs=(Knob("factor", (2, 4), "how many times as large the micro-batch becomes"),),
)

CARDS = (
    Card(
        id="trap-parameter-broadcast",
        kind="communication",
        question=(
            "A colleague says: to broadcast parameters after every step also keeps replicas in sync, so it is the same "
            "training as with summed gradients, only without the overlap. What is right?"
        ),
        answer=(
            "Replicas are in sync in both cases, but the training differs. A broadcast keeps the update of one rank "
            "and throws away the gradients of all others, so the batch is that of one rank. To average parameters "
            "instead uses all data, but with Adam it is another algorithm, a form of local SGD: each rank normalizes "
            "by its own gradient before the mean. Only the sum of gradients gives the update of the global batch."
        ),
        notes=(
            "Let u be the update rule. Summed gradients give u(mean g_r), averaged parameters mean u(g_r), a broadcast "
            "u(g_0). They agree only if u is linear, as plain SGD is for the first two. Adam divides by the root of a "
            "moving mean of squares, so it is not. The moments of the ranks differ as well unless they are sent, too."
        ),
        mistake="Equal replicas are taken for a right update. A check of replicas passes in all three cases.",
        experiment=UPDATE_MODES,
        claims=(
            claim(
                "Broadcasting rank 0's parameters gives the update of the global batch.",
                "error_broadcast_adamw",
                "<=",
                1e-9,
            ),
            claim("After a broadcast the replicas are equal.", "spread_broadcast_adamw", "==", 0),
            claim(
                "Averaging parameters under AdamW gives the update of the global batch.",
                "error_parameters_adamw",
                "<=",
                1e-9,
            ),
            claim(
                "Averaging parameters leaves different moments on the ranks.", "moment_spread_parameters_adamw", ">", 0
            ),
        ),
        relations=(
            Relation("a broadcast makes the replicas equal", "spread_broadcast_adamw", "==", 0),
            Relation("its update is not that of the global batch", "error_broadcast_adamw", ">", 0.01),
            Relation("averaged parameters are not, either, under AdamW", "error_parameters_adamw", ">", 0.01),
            Relation("summed gradients are", "error_gradients_adamw", "<=", 1e-9),
            Relation("averaged parameters leave different moments", "moment_spread_parameters_adamw", ">", 0),
        ),
        refuted=(
            Relation("a parameter broadcast gives the update of the global batch", "error_broadcast_adamw", "<=", 1e-9),
        ),
        sources=(DDP_NOTES, LOCAL_SGD_PAPER, own_run("trap-parameter-broadcast")),
        items=(20,),
        chapter=CHAPTER,
    ),
    Card(
        id="trap-no-overlap-without-buckets",
        kind="communication",
        question="True or not: without buckets, gradient synchronization would have to wait until backward is over.",
        answer=(
            "Not true. Overlap comes from hooks that fire when a gradient is ready, and from asynchronous collectives. "
            "Without buckets one can reduce every parameter by itself, and the first all-reduce starts even earlier. "
            "What buckets buy is fewer, larger messages: they amortize the latency of a collective. The case that "
            "waits for the end is the opposite one, a single bucket."
        ),
        notes=(
            "A usual exercise builds DDP in this order: one all-reduce per parameter from a hook, then a flat buffer, "
            "then buckets. The number of collectives k multiplies the latency alpha; the bytes stay the same. On NCCL "
            "small messages also run below the bandwidth that large ones reach."
        ),
        mistake="Buckets are named as the cause of overlap. They are the cause of efficiency at a given overlap.",
        experiment=bucket_order("parameter"),
        claims=(
            claim(
                "With one all-reduce per parameter, the first starts when all gradients exist.",
                "gradients_after_start_parameter",
                "==",
                0,
            ),
            claim(
                "With one all-reduce per parameter, the first starts earlier than with buckets.",
                "first_start_parameter",
                "<",
                "first_start_bucket",
            ),
            claim(
                "One bucket for the whole model starts when all gradients exist.",
                "gradients_after_start_model",
                "==",
                0,
            ),
            claim("Buckets lower the number of collectives.", "all_reduces_bucket", "<", "all_reduces_parameter"),
        ),
        relations=(
            Relation(
                "without buckets, the first all-reduce starts after one gradient", "first_start_parameter", "==", 1
            ),
            Relation("buckets lower the number of collectives", "all_reduces_bucket", "<", "all_reduces_parameter"),
            WAITS_FOR_ALL,
        ),
        refuted=(
            Relation(
                "without buckets, synchronization begins after the last gradient",
                "gradients_after_start_parameter",
                "==",
                0,
            ),
        ),
        sources=(DDP_NOTES, DDP_PAPER, own_run("trap-no-overlap-without-buckets")),
        items=(24,),
        chapter=CHAPTER,
    ),
    Card(
        id="trap-all-reduce-after-backward",
        kind="communication",
        question=(
            "A diagram of DDP shows: forward, backward, then all-reduce gradients, then optimizer step. What is wrong?"
        ),
        answer=(
            "The box after backward. DDP reduces bucket by bucket while backward runs; in a real step most all-reduces "
            "have begun before the last gradient exists, and only the wait for the last ones comes after. The diagram "
            "describes the sum that is computed, not when it is communicated, and so it cannot explain why bucket size "
            "and exposed communication matter."
        ),
        notes=(
            "What remains after backward is a wait: exposed communication. In Meshwright's records it is the phase "
            "`sync`, which begins when DDP hands over the last bucket. The update must wait, since clipping needs the "
            "norm of all reduced gradients."
        ),
        mistake="Phases are drawn as boxes in a row, and their times are added. Overlapped phases do not add up.",
        experiment=bucket_order("bucket"),
        claims=(
            claim("The first all-reduce begins after the last gradient.", "gradients_after_start_bucket", "==", 0),
            claim(
                "Some all-reduce begins after the last gradient.",
                "buckets_before_end_bucket",
                "<",
                "all_reduces_bucket",
            ),
            claim("Most all-reduces begin before the last gradient.", "buckets_before_end_bucket", ">=", 3),
        ),
        relations=(
            STARTS_EARLY,
            Relation("only the last bucket starts after the last gradient", "buckets_before_end_bucket", "==", 3),
        ),
        refuted=(Relation("the all-reduce begins after backward", "gradients_after_start_bucket", "==", 0),),
        sources=(DDP_NOTES, own_run("trap-all-reduce-after-backward")),
        items=(112, 113),
        chapter=CHAPTER,
    ),
    Card(
        id="trap-batch-raises-gradient-bytes",
        kind="communication",
        question="True or not: a larger batch raises the communication payload of data parallelism.",
        answer=(
            "Not true for data parallelism. A gradient has the size of the model, whatever the batch is, so the bytes "
            "of a step stay the same and the bytes per sample fall. What does grow with the micro-batch is every axis "
            "that sends activations: tensor, context, pipeline and expert parallelism. And what careless accumulation "
            "multiplies is the number of all-reduces, where no_sync is missing."
        ),
        notes=(
            "G: gradient bytes; N ranks; M micro-batches. DDP with no_sync sends 2 (N - 1) / N G per step for any "
            "micro-batch and any M; without no_sync it sends M times that. Tensor parallelism sends about 8 messages "
            "of b s d elements per block (b samples, s tokens, d width), so it is linear in b. The small rest of "
            "tensor parallelism that does not grow is the sum of the gradients of norms."
        ),
        mistake="One concludes 'more data, more traffic' without naming the tensor that is sent.",
        experiment=BATCH_GROWTH,
        claims=(
            claim("Gradient bytes of DDP grow with the micro-batch.", "data_growth", ">", 1),
            claim("Tensor-parallel bytes grow with the micro-batch.", "tensor_growth", ">", 1.9),
            claim("Context-parallel bytes grow with the micro-batch.", "context_growth", "==", "factor"),
            claim("Accumulation with no_sync multiplies the gradient bytes.", "accumulation_growth", ">", 1),
        ),
        relations=(
            Relation("gradient bytes of a step stay the same", "data_growth", "==", 1),
            Relation("gradient bytes per sample fall", "data_per_sample_growth", "==", 0.5),
            Relation("activation bytes of pipelines grow with the micro-batch", "pipeline_growth", "==", "factor"),
            Relation("activation bytes of context parallelism grow, too", "context_growth", "==", "factor"),
            Relation("nearly all bytes of tensor parallelism do", "tensor_growth", ">", 1.9),
            Relation("accumulation with no_sync adds no bytes", "accumulation_growth", "==", 1),
        ),
        refuted=(Relation("a larger batch raises the gradient payload", "data_growth", ">", 1),),
        sources=(DDP_DOCS, DDP_PAPER, own_run("trap-batch-raises-gradient-bytes")),
        items=(127,),
        chapter=CHAPTER,
    ),
    Card(
        id="trap-split-pressure",
        kind="communication",
        question=(
            "The gradient all-reduce dominates the step. The proposal says 'reduce model/data split pressure'; a "
            "colleague adds that the bytes per token are fixed by the model, so only a faster network helps. What "
            "would you do?"
        ),
        answer=(
            "Name concrete moves, each with its factor. Reduce in bfloat16: half the bytes. Accumulate more "
            "micro-batches with no_sync, or use larger ones: bytes per token fall by that factor, as far as the batch "
            "may grow. Shard inside a node and replicate across nodes, so that only a shard crosses the slow link. Use "
            "fewer data-parallel ranks with another axis inside the node, and place ranks so that the heavy axis has "
            "the fast links."
        ),
        notes=(
            "Per rank and step, with gradient bytes G and N replicas: float32 DDP sends 2 (N - 1) / N G; "
            "bf16_compress half of it, with another rounding; M micro-batches divide it per token by M. Hybrid "
            "sharding (HSDP) with S ranks per shard group all-reduces G / S between replicas; the gathers and "
            "scatters inside the group remain. A larger global batch is a change of the optimization, and needs its "
            "own check."
        ),
        mistake="The phrase names no tensor, no axis and no factor.",
        experiment=Experiment(
            "state.shard_levels:remedies",
            ranks=4,
            knobs=(Knob("accumulation", (4, 2, 8), "micro-batches per step, or the factor of the micro-batch"),),
        ),
        predictions=(
            Prediction(
                "hybrid_sharding",
                "Four ranks become two replicas of two shards. What part of DDP's bytes does the axis between replicas "
                "carry?",
                "of DDP's bytes",
            ),
            Prediction("bf16_reduction", "What part is left if gradients are reduced in bfloat16?", "of DDP's bytes"),
        ),
        relations=(
            Relation("reduction in bfloat16 halves the bytes", "bf16_reduction", "==", 0.5, 1e-9),
            Relation(
                "four micro-batches per step divide the bytes per token by four", "accumulation", "==", 0.25, 1e-9
            ),
            Relation("a micro-batch four times as large does, too", "larger_micro_batch", "==", 0.25, 1e-9),
            Relation("hybrid sharding sends a third between replicas", "hybrid_sharding", "==", 1 / 3, 0.01),
        ),
        refuted=(Relation("the bytes per token are fixed by the model", "accumulation", ">=", "baseline"),),
        sources=(DDP_DOCS, FSDP2_DOCS, own_run("trap-split-pressure")),
        items=(115,),
        chapter=CHAPTER,
    ),
)
