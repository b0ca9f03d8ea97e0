"""Cards on FSDP2: units, when they are gathered, and what that takes."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.references import FSDP2_DOCS, FSDP2_TUTORIAL, FSDP_PAPER, ZERO_PAPER, own_run

CHAPTER = "handbook/sharding.md"
UNIT_LIFECYCLE = Experiment(
    "state.fsdp_units:lifecycle",
    ranks=4,
    knobs=(
        Knob("layers", (4, 2, 8), "blocks of the model, each an FSDP unit"),
        Knob("ranks", (4, 2), "ranks that share the parameters"),
    ),
)
SEVEN_BILLION = Experiment(
    "state.fsdp_units:seven_billion", knobs=(Knob("ranks", (8, 16, 64), "simulated ranks that share the state"),)
)
PEAK = Relation("the peak is the shards and the largest unsharded unit", "peak", "==", "expected_peak", 1e-9)
GATHERED_TWICE = Relation("a unit is gathered twice per step", "all_gathers_per_unit", "==", 2)

CARDS = (
    Card(
        id="fsdp-in-one-minute",
        kind="state placement",
        question="Explain FSDP in one minute.",
        answer=(
            "FSDP is data parallelism whose state is sharded: every rank reads its own samples and runs the whole "
            "model, but between uses it keeps only one part in N of parameters, gradients and optimizer state. The "
            "model is divided into units, usually the blocks. Before a unit computes, its ranks all-gather its "
            "parameters; afterwards they free them. Backward gathers again, and reduce-scatters the gradients, so each "
            "rank gets the sum for its shard and updates it. Memory falls toward one part in N plus a unit or two; the "
            "price is half again the bytes of DDP, and gathers that must be prefetched to hide."
        ),
        notes=(
            "FSDP2 is torch.distributed.fsdp.fully_shard: parameters are DTensors, sharded per parameter along one "
            "dimension, and each call makes one unit. FSDP1, the FullyShardedDataParallel wrapper with flat "
            "parameters, is deprecated. Knobs: reshard_after_forward (gather once or twice), prefetch (units ahead of "
            "use), mixed precision of gather and reduction, and the mesh (a second dimension makes replicas of shards, "
            "HSDP). On CPU nothing is prefetched, so one unit is unsharded at a time."
        ),
        mistake=(
            "Some call FSDP a form of tensor parallelism. Tensor parallelism divides the matrix products; FSDP divides "
            "only what is stored."
        ),
        experiment=UNIT_LIFECYCLE,
        predictions=(
            Prediction(
                "all_gathers_per_unit",
                "How often is one unit all-gathered per step with reshard_after_forward?",
                "all-gathers",
            ),
            Prediction(
                "resident",
                "On 4 ranks, which share of the parameters does a rank keep between steps?",
                "of the parameters",
            ),
        ),
        relations=(
            GATHERED_TWICE,
            Relation("the gradients of a unit are reduce-scattered once", "reduce_scatters_per_unit", "==", 1),
            Relation("between steps a rank keeps its shard", "resident", "==", "shard"),
            PEAK,
            Relation("activations are those of data parallelism", "activation", "==", 1.0, 1e-9),
        ),
        refuted=(Relation("FSDP divides the computation, and so the activations", "activation", "<", 0.9),),
        sources=(FSDP2_DOCS, FSDP2_TUTORIAL, FSDP_PAPER, own_run("fsdp-in-one-minute")),
        items=(35, 36, 37),
        chapter=CHAPTER,
    ),
    Card(
        id="fsdp-saves-memory",
        kind="state placement",
        question="Every rank needs full weights to compute. How does FSDP save memory then?",
        answer=(
            "A rank needs full weights only for the unit that it computes right now, and units run one after the "
            "other. So it keeps its shard of everything, gathers one unit, uses it, and frees it before the next. The "
            "peak of the parameters is one part in N of the model plus the largest unit, or a few units where the next "
            "ones are prefetched. The saving is as good as the division into units: one unit for the whole model saves "
            "nothing at the peak."
        ),
        notes=(
            "W: bytes of all parameters; u: bytes of the largest unit; r: bytes of a root unit that stays unsharded; N "
            "ranks. Peak = W / N + u + r without prefetch, and one more unit for each that is prefetched. The same "
            "holds for gradients: the unsharded gradients of a unit exist until its reduce-scatter. With more blocks u "
            "/ W falls. Peak and formula agree to the byte in this run."
        ),
        mistake="It is often forgotten that embedding and head are units as well, and may be larger than a block.",
        experiment=UNIT_LIFECYCLE,
        predictions=(
            Prediction(
                "peak",
                "4 ranks; the largest of 6 units has 22.4 % of the parameters. What is the peak of a rank?",
                "of the parameters",
            ),
        ),
        relations=(
            PEAK,
            Relation("without resharding, the full model exists beside the shards", "peak_keep", "==", 1.25),
            Relation("DDP has the full model", "peak_ddp", "==", 1.0),
        ),
        refuted=(Relation("the full model is in memory at some moment", "peak", ">=", 1.0),),
        sources=(FSDP2_DOCS, FSDP_PAPER, own_run("fsdp-saves-memory")),
        items=(137, 139),
        chapter=CHAPTER,
    ),
    Card(
        id="fsdp-seven-billion",
        kind="state placement",
        question=(
            "A model of 7 billion parameters in 32 blocks on 8 ranks: how much weight memory has a rank with DDP and "
            "with FSDP?"
        ),
        answer=(
            "In bfloat16, DDP keeps all 13.5 GB of weights. FSDP keeps an eighth, 1.7 GB, and gathers one block of 0.4 "
            "GB at a time: 2.1 GB. That is the weight memory alone. In mixed precision the shards are float32, so 3.4 "
            "GB, and the embedding, not a block, may be the largest unit: 3.9 GB. Gradients and optimizer state come "
            "on top."
        ),
        notes=(
            "The model has the shape of Llama 7B: vocabulary 32,000, width 4,096, feed-forward 11,008, 6.74 billion "
            "parameters. Numbers are those of Meshwright's exact formulas; the run checks them on two blocks of the "
            "model, whose real step runs on fake tensors. A block has 4 d^2 + 3 d f = 202 million parameters (d width, "
            "f feed-forward width), 0.405 GB in bfloat16, not 7 / 32 billion; embedding and head have 131 million each "
            "and are gathered in float32 (embedding) and bfloat16 (head). GB is 10^9 bytes. Prefetch keeps at least "
            "one more block."
        ),
        mistake="Many divide all parameters by the number of blocks; embedding and head are not in the blocks.",
        experiment=SEVEN_BILLION,
        predictions=(
            Prediction("bf16_shard", "Weights in bfloat16, 6.74 billion parameters, 8 ranks: what is a shard?", "GB"),
            Prediction("block_unit", "What is one unsharded block in bfloat16?", "GB"),
            Prediction(
                "weights_parameters",
                "And the peak of the weights in mixed precision, with float32 shards and bfloat16 blocks?",
                "GB",
            ),
        ),
        relations=(
            Relation("DDP in bfloat16 keeps 13.5 GB", "bf16_weights", "==", 13.48, 0.001),
            Relation("a shard and a block in bfloat16 are 2.1 GB", "weights_only", "==", 2.089, 0.001),
            Relation("with float32 shards the peak of weights is larger", "weights_parameters", ">", "weights_only"),
            Relation("it is that of float32 shards and the largest unit", "weights_parameters", "==", 3.893, 0.001),
            Relation(
                "two blocks on fake tensors agree with the formula",
                "simulated_weights_of_two_blocks",
                "==",
                "weights_of_two_blocks",
                1e-9,
            ),
        ),
        refuted=(Relation("the largest unit is a block", "largest_unit", "==", "block_unit", 0.01),),
        sources=(FSDP_PAPER, ZERO_PAPER, own_run("fsdp-seven-billion")),
        items=(138,),
        chapter=CHAPTER,
    ),
    Card(
        id="fsdp-gathers-twice",
        kind="communication",
        question="Why does FSDP gather the weights of a block twice per step, and can it gather them once?",
        answer=(
            "Forward of a block and its backward are far apart in time: all other blocks run in between. To keep the "
            "gathered weights until backward would put the whole model in memory, so the default frees them after "
            "forward and gathers again. That is a choice: with reshard_after_forward=False they stay, the bytes fall "
            "from three to two times the parameters, and the peak rises to the full model. The last unit is used at "
            "once, so freeing it gains nothing."
        ),
        notes=(
            "W: bytes of all parameters. Per rank and step, times (N - 1) / N: gather twice and reduce-scatter, 3 W; "
            "gather once, 2 W, as DDP. An integer k for reshard_after_forward reshards to groups of k ranks, such as "
            "those of a node: the second gather then stays on fast links, and the memory between is W / k. With M "
            "micro-batches the gathers repeat M times; to keep weights over a whole step is ZeRO-1 or ZeRO-2."
        ),
        mistake="A common answer says that FSDP must gather twice. It may; the setting trades bytes for memory.",
        experiment=UNIT_LIFECYCLE,
        predictions=(
            Prediction(
                "wire", "What does a rank send per step with resharding, times N / (N - 1)?", "of the parameter bytes"
            ),
            Prediction("wire_keep", "And without resharding after forward?", "of the parameter bytes"),
        ),
        relations=(
            GATHERED_TWICE,
            Relation("without resharding, once", "all_gathers_per_unit_keep", "==", 1),
            Relation("resharding sends 3 W", "wire", "==", 3.0),
            Relation("keeping sends 2 W", "wire_keep", "==", 2.0),
            Relation("keeping has the larger peak", "peak_keep", ">", "peak"),
        ),
        sources=(FSDP2_DOCS, FSDP_PAPER, own_run("fsdp-gathers-twice")),
        items=(140,),
        chapter=CHAPTER,
    ),
)
