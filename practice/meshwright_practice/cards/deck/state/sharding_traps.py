"""Plausible wrong statements about sharded state, and the runs that refute them."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.cards.deck.state.fsdp import CHAPTER, GATHERED_TWICE, SEVEN_BILLION, UNIT_LIFECYCLE
from meshwright_practice.cards.deck.state.sharding import DDP_VOLUME, SAME_LOSS, ZERO_3_VOLUME, shard_levels
from meshwright_practice.references import (
    DDP_DOCS,
    FSDP1_DOCS,
    FSDP2_DOCS,
    FSDP2_TUTORIAL,
    FSDP_PAPER,
    ZERO_PAPER,
    own_run,
)

CARDS = (
    Card(
        id="trap-zero-2-halves-bytes",
        kind="communication",
        question=(
            "A table says: DDP 2N bytes per rank, ZeRO-2 only N because a reduce-scatter is half an all-reduce, FSDP "
            "3N. What is right?"
        ),
        answer=(
            "ZeRO-2 is two N, as DDP is. The reduce-scatter of gradients is half an all-reduce, but each rank then has "
            "only its shard of the new parameters, and everybody needs all of them: the all-gather after the update is "
            "the other half. ZeRO-1 is two N for the same reason. ZeRO-3 is three N, one and a half times DDP. And all "
            "of this is per reduction: with accumulation the levels part, since ZeRO-2 and ZeRO-3 reduce in every "
            "micro-batch."
        ),
        notes=(
            "Per rank and optimizer step, times (N - 1) / N, with W bytes of parameters and M micro-batches: DDP with "
            "no_sync 2 W; ZeRO-1 2 W; ZeRO-2 (M + 1) W; ZeRO-3 3 M W, or (2 M + 1) W if gradients are "
            "reduced in the last micro-batch only. At M = 16 ZeRO-3 sends 24 times the bytes of DDP, not 1.5 times. "
            "Change the knob to see M = 2 and M = 4."
        ),
        mistake="The table counts the collective of the gradients, and forgets that of the parameters.",
        experiment=shard_levels(1, "wire"),
        claims=(
            claim("ZeRO-2 sends half of what DDP sends.", "wire_gradients", "==", 1.0),
            claim("ZeRO-2 gathers parameters in every step.", "all_gather_gradients", "==", 1.0),
            claim("ZeRO-1, ZeRO-2 and DDP send the same.", "wire_gradients", "==", "wire_none"),
            claim("ZeRO-3 sends 1.5 times as much as DDP.", "wire_parameters", "==", 3.0),
        ),
        relations=(
            DDP_VOLUME,
            Relation("ZeRO-1 sends as much as DDP", "wire_optimizer", "==", "wire_none"),
            Relation("ZeRO-2 sends as much as DDP", "wire_gradients", "==", "wire_none"),
            ZERO_3_VOLUME,
            SAME_LOSS,
        ),
        refuted=(
            Relation("ZeRO-2 sends half of what DDP sends", "wire_gradients", "==", 1.0),
            Relation(
                "ZeRO-2 needs more backward communication than ZeRO-1",
                "reduce_scatter_gradients",
                ">",
                "reduce_scatter_optimizer",
            ),
        ),
        sources=(ZERO_PAPER, own_run("trap-zero-2-halves-bytes")),
        items=(28, 30, 133, 141),
        chapter=CHAPTER,
    ),
    Card(
        id="trap-auto-wrap-units",
        kind="state placement",
        question=(
            "A notebook wraps a small model by FSDP with size_based_auto_wrap_policy and says that weights are "
            "gathered layer by layer. Is that so?"
        ),
        answer=(
            "No. The policy of FSDP1 wraps modules of at least 100 million parameters by default. In a model of "
            "notebook size nothing reaches that, so the whole model becomes one unit: it is gathered at once, its full "
            "gradient exists before the one reduce-scatter, and the saving at the peak is gone. Layer by layer needs a "
            "unit per block. In FSDP2 that is explicit: call fully_shard on every block, then on the root. FSDP1 "
            "itself is deprecated."
        ),
        notes=(
            "min_num_params of torch.distributed.fsdp.wrap.size_based_auto_wrap_policy is 1e8 (read from the signature "
            "in this run). Peak of parameters with one unit: W + W / N; by block: W / N + u, with W the bytes of all "
            "parameters and u those of the largest unit. The same notebook passes device_ids=[local_rank] to DDP, "
            "which raises ValueError for a module on CPU; leave device_ids out there."
        ),
        mistake="The name FSDP is taken for a guarantee. The memory follows from the units, so count them.",
        experiment=Experiment(
            "state.fsdp_units:granularity",
            ranks=4,
            knobs=(
                Knob("layers", (4, 2, 8), "blocks of the model"),
                Knob("ranks", (4, 2), "ranks that share the parameters"),
            ),
        ),
        predictions=(
            Prediction(
                "auto_wrapped_units",
                "How many FSDP units does the default size policy make of a model of 39,200 parameters?",
                "units",
            ),
            Prediction(
                "peak_as_one",
                "With the whole model as one unit on 4 ranks, what is the peak of the parameters?",
                "of the parameters",
            ),
        ),
        relations=(
            Relation("the default size policy makes one unit", "auto_wrapped_units", "==", 1),
            Relation("one unit means the full model beside the shards", "peak_as_one", "==", 1.25),
            Relation("a unit per block has a lower peak", "peak_by_block", "<", 0.5),
            Relation("one unit has full gradients, too", "gradient_as_one", "==", 1.0),
            Relation("DDP refuses device_ids for a module on CPU", "device_ids_refused", "==", 1),
            Relation("the loss does not depend on the units", "loss_difference", "<=", 1e-10),
        ),
        refuted=(Relation("the policy gathers such a model layer by layer", "auto_wrapped_units", ">", 1),),
        sources=(FSDP1_DOCS, FSDP2_DOCS, FSDP2_TUTORIAL, DDP_DOCS, own_run("trap-auto-wrap-units")),
        items=(118, 120, 124, 125),
        chapter=CHAPTER,
    ),
    Card(
        id="trap-weights-only-memory",
        kind="state placement",
        question="A slide says: a 7B model needs 14 GB with DDP and 2.2 GB with FSDP on 8 GPUs. What is missing?",
        answer=(
            "Everything but bfloat16 weights. Training with Adam in mixed precision has 18 bytes of state per "
            "parameter with bfloat16 weights (2 weight, 4 gradient, 12 optimizer), and 16 with float32 weights (4, 4 "
            "and 8). With float32 weights that is 108 GB per rank with DDP, and about 14.5 GB with FSDP on 8 ranks, "
            "still without activations. So the DDP run does not fit an 80 GB device at all, and the FSDP run is far "
            "from 2.2 GB. Prefetch, float32 shards, unsharded gradients of a unit, and large embedding units belong to "
            "the count."
        ),
        notes=(
            "Here 6.74 billion parameters: DDP 4 + 4 + 8 bytes each, 107.8 GB. Sharded by 8: weights 3.4 GB and one "
            "unit, gradients 3.4 GB and one unit, moments 6.7 GB. The largest unit is the embedding, 0.5 GB in "
            "float32. Meshwright's levels 1 and 2 keep a full bfloat16 copy of the weights. The run compares the "
            "formulas with the real step of two blocks on fake tensors; meshwright simulate runs all of a model that "
            "way."
        ),
        mistake="The slide multiplies 7 billion by 2 bytes and calls the result the memory of training.",
        experiment=SEVEN_BILLION,
        predictions=(
            Prediction(
                "state_none",
                "State of one DDP rank: float32 weights and gradients, Adam, 6.74 billion parameters?",
                "GB",
            ),
            Prediction("state_parameters", "Peak state of one of 8 ranks with sharded parameters?", "GB", 0.05),
        ),
        relations=(
            Relation("DDP needs 16 bytes per parameter", "state_none", "==", 107.8, 0.001),
            Relation("sharded by 8, the state is still 14.5 GB", "state_parameters", "==", 14.53, 0.001),
            Relation("ZeRO-1 is between the two", "state_optimizer", "<", "state_none"),
            *(
                Relation(
                    f"the {name} of two blocks on fake tensors agree with the formula",
                    f"simulated_{name}_of_two_blocks",
                    "==",
                    f"{name}_of_two_blocks",
                    1e-9,
                )
                for name in ("weights", "gradients", "moments")
            ),
        ),
        refuted=(Relation("a rank trains the sharded model in 2.2 GB", "state_parameters", "<=", 2.2),),
        sources=(ZERO_PAPER, FSDP_PAPER, own_run("trap-weights-only-memory")),
        items=(138,),
        chapter="handbook/memory.md",
    ),
    Card(
        id="trap-must-gather-twice",
        kind="communication",
        question="True or not: FSDP must all-gather every weight twice per step.",
        answer=(
            "Not true. It gathers twice because it reshards after forward, and that is a setting. With "
            "reshard_after_forward=False the weights stay until backward: one gather, the bytes of DDP, and a peak "
            "with the full model. In between, an integer reshards to smaller groups, so that the second gather stays "
            "inside a node. Which is right depends on whether memory or the network is the limit."
        ),
        notes=(
            "fully_shard(module, reshard_after_forward=True | False | int); the default of None means True for all "
            "modules but the root. W: bytes of all parameters. Per rank and step, times (N - 1) / N: True 3 W, False 2 "
            "W. Memory between forward and backward: W / N, or W. A pipeline schedule with many micro-batches often "
            "keeps weights, since each micro-batch would gather again."
        ),
        mistake="A default is presented as a law of the method.",
        experiment=UNIT_LIFECYCLE,
        claims=(
            claim(
                "Every FSDP step gathers each unit twice, whatever the setting.", "all_gathers_per_unit_keep", "==", 2
            ),
            claim("Without resharding, FSDP sends as much as DDP.", "wire_keep", "==", "wire_ddp"),
            claim("Without resharding, the peak contains the full model.", "peak_keep", ">=", 1.0),
            claim("Resharding costs 1.5 times the bytes of keeping.", "wire", "==", 3.0),
        ),
        relations=(
            GATHERED_TWICE,
            Relation("without resharding, a unit is gathered once", "all_gathers_per_unit_keep", "==", 1),
            Relation("that sends as much as DDP", "wire_keep", "==", "wire_ddp"),
            Relation("and needs more memory", "peak_keep", ">", "peak"),
        ),
        refuted=(Relation("FSDP must gather every weight twice", "all_gathers_per_unit_keep", "==", 2),),
        sources=(FSDP2_DOCS, FSDP_PAPER, own_run("trap-must-gather-twice")),
        items=(140,),
        chapter=CHAPTER,
    ),
)
