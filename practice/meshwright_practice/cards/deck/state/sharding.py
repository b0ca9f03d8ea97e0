"""Cards on the sharding levels: DDP, ZeRO-1, ZeRO-2 and ZeRO-3."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.references import (
    DDP_DOCS,
    DISTRIBUTED_DOCS,
    FSDP2_DOCS,
    FSDP_PAPER,
    ZERO_PAPER,
    own_run,
)

CHAPTER = "handbook/sharding.md"


def shard_levels(accumulation: int, picture: str) -> Experiment:
    other = "wire" if picture == "memory" else "memory"
    return Experiment(
        "state.shard_levels:levels",
        ranks=4,
        knobs=(
            Knob("accumulation", (accumulation, 3 - accumulation, 4), "micro-batches per optimizer step"),
            Knob("ranks", (4, 2), "data-parallel ranks"),
            Knob("picture", (picture, other), "what is drawn: memory by class, or bytes by collective"),
        ),
    )


SAME_LOSS = Relation("the losses of all levels are equal to rounding", "loss_spread", "<=", 1e-10)
DDP_VOLUME = Relation("DDP sends 2 W (N - 1) / N", "wire_none", "==", 2.0)
ZERO_3_VOLUME = Relation("sharded parameters send 3 W (N - 1) / N", "wire_parameters", "==", 3.0)

CARDS = (
    Card(
        id="zero-levels",
        kind="state placement",
        question="What is sharded at ZeRO-1, ZeRO-2 and ZeRO-3, and what does each level cost?",
        answer=(
            "All levels are data parallelism: every rank reads other samples, and the update is the same. ZeRO-1 "
            "shards the optimizer state. ZeRO-2 also keeps only a shard of the gradients, which shows where gradients "
            "live long, as in accumulation. ZeRO-3 also shards the parameters, and gathers them unit by unit for "
            "forward and backward. Levels 1 and 2 send as many bytes as DDP per reduction; level 3 sends half as many "
            "again. The other prices are more collectives, checkpoints of shards, and with accumulation more "
            "reductions."
        ),
        notes=(
            "W: bytes of all parameters; N ranks; M micro-batches; Adam has two moments, so optimizer state is 2 W "
            "in the dtype of the parameters. Peak memory here: DDP W + W + 2 W. With sharded optimizer state 2 "
            "W / N, and gradients reduced once per step still need W while they accumulate. Meshwright builds "
            "levels 1 and 2 from FSDP2 with parameters that stay unsharded during the step, so the peak of the "
            "parameters is W + W / N: the full copy beside the shard that the optimizer updates. Wire bytes with M "
            "> 1: level 1 as DDP, 2 W; level 2 (M + 1) W; level 3 3 M W, each times (N - 1) / N."
        ),
        mistake=(
            "A common answer calls ZeRO another training algorithm. It changes where state lives, and the loss is the "
            "same."
        ),
        experiment=shard_levels(2, "memory"),
        predictions=(
            Prediction(
                "optimizer_optimizer",
                "On 4 ranks, what is the optimizer state of a rank at ZeRO-1, as a multiple of all parameter bytes?",
                "of the parameter bytes",
            ),
            Prediction(
                "wire_parameters",
                "With two micro-batches per step, what does a rank send at ZeRO-3, times N / (N - 1)?",
                "of the parameter bytes",
            ),
        ),
        relations=(
            Relation("DDP keeps two full moments", "optimizer_none", "==", 2.0, 0.001),
            Relation("ZeRO-1 shards the optimizer state by N", "optimizer_optimizer", "==", 0.5, 0.01),
            Relation("ZeRO-1 still has full gradients while they accumulate", "gradient_optimizer", ">=", 1.0),
            Relation("ZeRO-2 does not", "gradient_gradients", "<", "gradient_optimizer"),
            Relation("ZeRO-3 has the smallest peak of parameters", "parameter_parameters", "<", "parameter_none"),
            Relation("ZeRO-3 reduces and gathers for every micro-batch", "wire_parameters", "==", 6.0),
            SAME_LOSS,
        ),
        refuted=(
            Relation(
                "every level sends more than the one before",
                "wire_optimizer",
                ">",
                "wire_none",
            ),
        ),
        sources=(ZERO_PAPER, FSDP2_DOCS, own_run("zero-levels")),
        items=(27, 29, 30, 31, 32, 33, 34),
        chapter=CHAPTER,
    ),
    Card(
        id="ddp-or-fsdp",
        kind="state placement",
        question="How do you choose between DDP and FSDP for a model?",
        answer=(
            "First count the state: parameters, gradients and optimizer state, about 18 bytes per parameter in mixed "
            "precision with Adam, plus activations. If that fits with a useful micro-batch, DDP is the choice: fewest "
            "collectives, one all-reduce that hides behind backward, simple checkpoints. If replicated state is what "
            "does not fit, shard it with FSDP, and pay about one and a half times the bytes, gathers on the critical "
            "path, and sharded checkpoints. If activations are what does not fit, sharding state does not help; then "
            "recompute them or split the sequence."
        ),
        notes=(
            "18 bytes with bf16 weights: 2 weight, 4 gradient, 12 optimizer; 16 with float32 weights: 4, 4 and 8. "
            "DDP has all of them on each of N ranks; FSDP keeps 1 / N and the unsharded units in use. W: bytes of all "
            "parameters. The experiment runs both on the same ranks and the same samples: peak state falls, "
            "activations do not change, bytes rise from 2 W to 3 W times (N - 1) / N. With M micro-batches the "
            "ratio is 3 M to 2. meshwright plan MODEL --cluster CLUSTER compares both for a real model."
        ),
        mistake=(
            "Some choose FSDP because it sounds more advanced. Where DDP fits and scales, it is simpler to run and "
            "often faster."
        ),
        experiment=Experiment(
            "state.fsdp_units:lifecycle",
            ranks=4,
            knobs=(
                Knob("layers", (4, 2, 8), "blocks of the model, each an FSDP unit"),
                Knob("ranks", (4, 2), "data-parallel ranks"),
            ),
        ),
        predictions=(
            Prediction(
                "wire",
                "FSDP2 with resharding, 4 ranks: what does a rank send per step, times N / (N - 1)?",
                "of the parameter bytes",
            ),
            Prediction(
                "activation", "What is FSDP2's peak of activations, as a multiple of DDP's?", "of DDP's activations"
            ),
        ),
        relations=(
            Relation("FSDP2 sends 1.5 times the bytes of DDP", "wire", "==", 3.0),
            Relation("DDP sends 2 W", "wire_ddp", "==", 2.0),
            Relation("FSDP2 keeps a shard of the parameters between steps", "resident", "==", 0.25),
            Relation("its peak is below the full model", "peak", "<", "peak_ddp"),
            Relation("activations are the same", "activation", "==", "activation_ddp", 1e-9),
        ),
        refuted=(Relation("FSDP lowers the memory of activations", "activation", "<", "activation_ddp", 0.01),),
        sources=(DDP_DOCS, FSDP2_DOCS, own_run("ddp-or-fsdp")),
        items=(66, 67, 68),
        chapter=CHAPTER,
    ),
    Card(
        id="reduce-scatter-in-sharding",
        kind="communication",
        question=(
            "Which kind of parallelism synchronizes gradients by reduce-scatter, and why is that the right collective?"
        ),
        answer=(
            "Sharded data parallelism: from the level on where a rank updates only its own shard, it needs only that "
            "shard of the summed gradient. A reduce-scatter delivers exactly this, in half the bytes of an all-reduce. "
            "It runs during backward, unit by unit, not after it. The other half of the all-reduce is not saved but "
            "moved: the updated parameters must be gathered before they are used again, so the step sends as much as "
            "DDP, or more if parameters are gathered twice."
        ),
        notes=(
            "An all-reduce is a reduce-scatter followed by an all-gather. DDP gathers gradients; ZeRO gathers "
            "parameters. Per reduction and rank, with gradient bytes G: reduce-scatter (N - 1) / N G, all-gather "
            "of parameters the same. On Gloo a reduce-scatter moves the bytes of an all-reduce, so measurements of "
            "sockets on CPU show more than the algorithm needs."
        ),
        mistake="A common answer counts the reduce-scatter alone and concludes that ZeRO-2 communicates less than DDP.",
        experiment=shard_levels(1, "wire"),
        predictions=(
            Prediction(
                "reduce_scatter_gradients",
                "What does a rank send in the reduce-scatters of a ZeRO-2 step, times N / (N - 1)?",
                "of the parameter bytes",
            ),
            Prediction("all_gather_gradients", "And in the all-gathers of the same step?", "of the parameter bytes"),
        ),
        relations=(
            Relation("the reduce-scatter sends half of DDP's all-reduce", "reduce_scatter_gradients", "==", 1.0),
            Relation("the all-gather of parameters sends the other half", "all_gather_gradients", "==", 1.0),
            Relation("together they are DDP's bytes", "wire_gradients", "==", "wire_none"),
            Relation("DDP has no reduce-scatter", "reduce_scatter_none", "==", 0),
        ),
        refuted=(Relation("ZeRO-2 sends less than DDP", "wire_gradients", "<", "wire_none"),),
        sources=(ZERO_PAPER, FSDP_PAPER, DISTRIBUTED_DOCS, own_run("reduce-scatter-in-sharding")),
        items=(133,),
        chapter=CHAPTER,
    ),
    Card(
        id="communication-of-levels",
        kind="communication",
        question="Compare the communication of DDP, ZeRO-1, ZeRO-2 and FSDP per optimizer step.",
        answer=(
            "In units of the parameter bytes, per rank, for many ranks: DDP two, for one all-reduce. ZeRO-1 and ZeRO-2 "
            "also two: one reduce-scatter of gradients and one all-gather of parameters. FSDP with resharding three: "
            "parameters are gathered once more for backward. That is for one micro-batch per step. With M "
            "micro-batches, DDP with no_sync and ZeRO-1 stay at two, ZeRO-2 sends M plus one, and FSDP three M, unless "
            "it keeps parameters or gradients between micro-batches."
        ),
        notes=(
            "Exact for N ranks: each number times (N - 1) / N. The assumption is that gradients and parameters are "
            "communicated in the same dtype; bfloat16 gathers with float32 reduction weigh them 1 : 2. Real runtimes "
            "may differ from their paper: profile the collectives. Meshwright counts them by axis in every run "
            "(`communication` in its records), and its formulas are checked to the byte by meshwright prove."
        ),
        mistake="A common ranking puts ZeRO-2 below DDP. It forgets the all-gather of the updated parameters.",
        experiment=shard_levels(1, "wire"),
        claims=(
            claim("ZeRO-1 sends more than DDP.", "wire_optimizer", ">", "wire_none"),
            claim("ZeRO-2 sends as much as DDP.", "wire_gradients", "==", "wire_none"),
            claim("ZeRO-3 with resharding sends 1.5 times as much as DDP.", "wire_parameters", "==", 3.0),
            claim(
                "ZeRO-3 sends twice as many bytes in all-gathers as in reduce-scatters.",
                "all_gather_parameters",
                "==",
                2.0,
            ),
        ),
        relations=(
            DDP_VOLUME,
            Relation("so does a sharded optimizer", "wire_optimizer", "==", "wire_none"),
            Relation("so do sharded gradients", "wire_gradients", "==", "wire_none"),
            ZERO_3_VOLUME,
            Relation("two of the three are all-gathers", "all_gather_parameters", "==", 2.0),
        ),
        refuted=(Relation("ZeRO-2 < DDP", "wire_gradients", "<", "wire_none"),),
        sources=(ZERO_PAPER, FSDP_PAPER, own_run("communication-of-levels")),
        items=(141,),
        chapter=CHAPTER,
    ),
)
