"""Cards of judgement: symptoms and scenarios, decided by the figures of plans and of executed schedules."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.references import (
    CHECKPOINT_DOCS,
    DDP_DOCS,
    DDP_NOTES,
    FSDP2_DOCS,
    FSDP_PAPER,
    MEGATRON_3D_PAPER,
    PIPELINE_DOCS,
    SEQUENCE_PAPER,
    ZERO_PAPER,
    own_run,
)

PLAYBOOK = "handbook/playbook.md"


def fit(model: str, micro: int) -> Experiment:
    """DDP and FSDP, with and without checkpointing, of one model on 8 H100."""
    others = tuple(name for name in ("gpt2-124m", "llama-1b", "llama-8b") if name != model)
    return Experiment(
        "plans:fit",
        knobs=(
            Knob("model", (model, *others), "preset"),
            Knob("cluster", ("h100:8", "a100-80:8", "h200:8"), "cluster"),
            Knob("micro", (micro, 1 if micro > 1 else 2), "samples per micro-batch"),
        ),
    )


NETWORK = Experiment(
    "plans:slow_network",
    knobs=(
        Knob("model", ("gpt2-124m", "llama-1b"), "preset"),
        Knob("gigabits", (100.0, 40.0, 400.0), "Gbit/s per node of the slow network"),
    ),
)
REMEDIES = Experiment(
    "plans:activation_remedies",
    knobs=(Knob("model", ("llama-1b", "gpt2-124m"), "preset"), Knob("micro", (4, 2), "samples per micro-batch")),
)
UNEVEN = Experiment(
    "schedules:uneven_stages",
    knobs=(
        Knob("ranks", (4, 2), "pipeline ranks"),
        Knob("micro_batches", (8, 16, 32), "micro-batches per step"),
        Knob("head_cost", (3, 1, 6), "cost of the head, in blocks"),
        Knob("blocks_per_stage", (4, 8), "blocks per stage"),
    ),
)
LARGE = Experiment(
    "plans:large_model",
    knobs=(Knob("model", ("llama-405b", "llama-70b"), "preset"), Knob("nodes", (32, 64), "nodes of 8 H100")),
)

CARDS = (
    Card(
        id="scenario-model-does-not-fit",
        kind="judgement",
        question="8 B parameters do not fit into 80 GB under DDP. Which state is it, and what is the next move?",
        answer=(
            "Parameters, gradients and optimizer state: 135 GiB at 18 bytes per parameter, before any activation. The "
            "next move is to shard them over the data-parallel ranks with FSDP, since it needs no change of the model. "
            "On 8 ranks the state falls to 17 GiB per rank. The price is traffic: parameters are gathered for every "
            "unit and pass, so with accumulation far more bytes than DDP; on NVLink they hide behind computation."
        ),
        notes=(
            "State per rank: 18 Psi under DDP, 18 Psi / N with ZeRO-3, Psi parameters, N ranks. Optimizer sharding "
            "alone (ZeRO-1) leaves weights and gradients. Verify with the memory classes of a counted step, not with "
            "the total."
        ),
        mistake="The batch is reduced first. The state does not depend on it.",
        experiment=fit("llama-8b", 1),
        claims=(
            claim("The state alone exceeds the device under DDP.", "ddp_state", ">", "memory"),
            claim("FSDP makes the job fit without checkpointing.", "fsdp_needs", "<=", "memory"),
            claim("FSDP sends fewer bytes per step than DDP.", "fsdp_wire", "<", "ddp_wire"),
            claim(
                "FSDP is predicted to be more than 10 % slower on one node.", "fsdp_seconds", ">", "ddp_seconds", 0.1
            ),
        ),
        relations=(
            Relation("DDP does not fit", "ddp_needs", ">", "memory"),
            Relation("because of its state", "ddp_state", ">", "memory"),
            Relation("FSDP fits", "fsdp_needs", "<=", "memory"),
            Relation("with an eighth of the state", "fsdp_state", "<", "ddp_state", 0.8),
            Relation("and more traffic", "fsdp_wire", ">", "ddp_wire"),
        ),
        refuted=(Relation("activations alone are the excess", "ddp_state", "<=", "memory"),),
        sources=(ZERO_PAPER, FSDP2_DOCS, own_run("scenario-model-does-not-fit")),
        items=(114,),
        chapter=PLAYBOOK,
    ),
    Card(
        id="scenario-all-reduce-dominates",
        kind="judgement",
        question="All-reduce dominates the step of a DDP job on four nodes. What do you try, in which order?",
        answer=(
            "First the link: is the network what it should be, and are ranks placed so that the reduction uses it? "
            "Then overlap and buckets. Then more work per byte: accumulate with no_sync, since gradient bytes per step "
            "do not depend on the batch. Then fewer bytes: reduce in bf16, or hybrid sharding. Sharding parameters is "
            "no remedy, and neither is removing nodes: fewer data-parallel ranks reduce as many bytes per rank."
        ),
        notes=(
            "Ring all-reduce: 2 D (N-1)/N bytes per rank. Plan: 124 M parameters, 4 nodes with 100 Gbit/s, 2 samples "
            "per rank: four fifths of the step are exposed; with 4 times the samples per step it is little more than "
            "half. More samples per step change optimization, so check the loss per sample."
        ),
        mistake="FSDP is proposed, because it is 'more efficient'.",
        experiment=NETWORK,
        claims=(
            claim("A fast network leaves less than 10 % exposed.", "exposed_fast", "<", 0.1),
            claim(
                "Four times the samples per step nearly triple the samples per second.",
                "samples_per_second_more",
                ">",
                "samples_per_second_slow",
                1.5,
            ),
            claim("FSDP lowers the exposed share by at least a tenth.", "exposed_fsdp", "<", "exposed_slow", 0.1),
            claim("Half of the nodes halve the exposed share.", "exposed_half_the_nodes", "<=", 0.45),
        ),
        relations=(
            Relation("the slow network dominates", "exposed_slow", ">", 0.5),
            Relation("the fast one does not", "exposed_fast", "<", 0.1),
            Relation(
                "more samples per step raise the throughput",
                "samples_per_second_more",
                ">",
                "samples_per_second_slow",
                1.5,
            ),
            Relation("half of the nodes hardly help", "exposed_half_the_nodes", ">", 0.5),
            Relation("FSDP does not help", "exposed_fsdp", ">=", "exposed_slow", 0.1),
        ),
        refuted=(Relation("fewer nodes remove the bottleneck", "exposed_half_the_nodes", "<=", 0.1),),
        sources=(DDP_NOTES, DDP_DOCS, own_run("scenario-all-reduce-dominates")),
        items=(115,),
        chapter=PLAYBOOK,
    ),
    Card(
        id="scenario-activations-spike",
        kind="judgement",
        question="Activations exceed the memory of a rank. Which of the usual remedies help, and which does not?",
        answer=(
            "Checkpointing helps most and costs about a forward pass. A smaller micro-batch with accumulation helps in "
            "proportion, for free until kernels become small. Tensor parallelism with sequence parallelism and context "
            "parallelism divide activations by their degree and add collectives. Pipeline parallelism does not help: "
            "under 1F1B the first stage keeps as many layers times micro-batches as before, and GPipe keeps more."
        ),
        notes=(
            "Predicted for the rank that keeps most, relative to DDP: full checkpointing 0.11, tensor 2 0.55, context "
            "2 0.53, pipeline 2 with 1F1B 1.22, with GPipe 19 at 32 micro-batches. Two equal stages would give 2 / 2 = "
            "1 and 32 / 2 = 16. But stages are balanced by work and the head counts, so the first stage has 10 of 16 "
            "blocks: 2 x 10/16 = 1.25 and 32 x 10/16 = 20, relative to a peak of DDP that also has the temporaries of "
            "a backward pass. A pipeline lowers the state instead. The choice follows the price: time, exposed "
            "collectives, or complexity."
        ),
        mistake="'Split the model' is answered without asking what is split: layers, width, sequence or samples.",
        experiment=REMEDIES,
        claims=(
            claim(
                "Full checkpointing leaves less than a quarter of the activations.",
                "activations_checkpointing",
                "<",
                0.25,
            ),
            claim("Two pipeline stages with 1F1B leave about half of them.", "activations_pipeline_1f1b", "<", 0.7),
            claim("Context parallelism 2 leaves about half of them.", "activations_context", "<", 0.7),
            claim("GPipe keeps more than DDP does.", "activations_pipeline_gpipe", ">", 1),
            claim("Checkpointing lowers the state.", "state_checkpointing", "<", 1),
        ),
        relations=(
            Relation("checkpointing helps", "activations_checkpointing", "<", 0.25),
            Relation("half of the micro-batch helps", "activations_half_micro_batch", "<", 0.6),
            Relation("tensor parallelism helps", "activations_tensor", "<", 0.7),
            Relation("context parallelism helps", "activations_context", "<", 0.7),
            Relation("a pipeline does not", "activations_pipeline_1f1b", ">=", 0.9),
            Relation("it lowers the state", "state_pipeline", "<", 0.8),
            Relation("checkpointing costs time", "seconds_checkpointing", ">", 1.1),
        ),
        refuted=(Relation("two stages halve the activations", "activations_pipeline_1f1b", "<=", 0.6),),
        sources=(CHECKPOINT_DOCS, SEQUENCE_PAPER, own_run("scenario-activations-spike")),
        items=(116,),
        chapter=PLAYBOOK,
    ),
    Card(
        id="scenario-a-stage-idles",
        kind="judgement",
        question="One pipeline stage idles while another computes. What is the interpretation, and what helps?",
        answer=(
            "The stages have unequal cost: every rank waits for the slowest. Equal numbers of blocks are not equal "
            "work, since the last stage also has the head. Move blocks away from the expensive stage, by measured "
            "cost. More micro-batches do not help against imbalance; they only amortize fill and drain. If it cannot "
            "be balanced, use fewer stages."
        ),
        notes=(
            "With M micro-batches the step takes about M times the slowest stage. Here a head that costs 3 blocks on 4 "
            "stages of 4 blocks: 44 % idle, after partition_blocks 28 %, close to the 27 % of equal stages. Tell "
            "imbalance from a slow device: the same stage on another device is the test."
        ),
        mistake="Micro-batches are added. The idle share of an imbalance stays.",
        experiment=UNEVEN,
        claims=(
            claim(
                "With equal blocks per stage, the first stage idles more than the last.",
                "idle_first_stage",
                ">",
                "idle_last_stage",
            ),
            claim(
                "The formula (P-1)/(M+P-1) describes the idle share of the uneven pipeline.",
                "bubble_equal_blocks",
                "==",
                "formula",
                0.05,
            ),
            claim("Moving blocks by cost shortens the step.", "ticks_rebalanced", "<", "ticks_equal_blocks"),
            claim(
                "After that, the idle share is within 5 % of equal stages.",
                "bubble_rebalanced",
                "<=",
                "bubble_equal_cost",
                0.05,
            ),
        ),
        relations=(
            Relation("the uneven pipeline idles more than the formula says", "bubble_equal_blocks", ">", "formula"),
            Relation("a partition by cost idles less", "bubble_rebalanced", "<", "bubble_equal_blocks"),
            Relation("and shortens the step", "ticks_rebalanced", "<", "ticks_equal_blocks"),
            Relation("equal costs follow the formula", "bubble_equal_cost", "==", "formula", 1e-9),
        ),
        refuted=(Relation("equal blocks are equal work", "bubble_equal_blocks", "==", "bubble_equal_cost", 0.05),),
        sources=(PIPELINE_DOCS, MEGATRON_3D_PAPER, own_run("scenario-a-stage-idles")),
        items=(117, 45),
        chapter=PLAYBOOK,
    ),
    Card(
        id="scenario-medium-model",
        kind="judgement",
        question="A model of 124 M parameters on one node of 8 devices with 80 GB. Which strategy first?",
        answer=(
            "DDP. The state takes 2 GiB, everything together 8 of 80 GiB, and the reduction hides behind backward. "
            "FSDP would save memory that nobody needs, and send several times the bytes. Checkpointing would cost a "
            "fifth more time for the same reason. DDP also has the simplest failures and checkpoints. Spend the free "
            "memory on a larger micro-batch."
        ),
        notes=(
            "18 bytes per parameter x 124 M = 2 GiB. The rule: prefer fewer axes, and add one only against a named "
            "bottleneck. meshwright plan shows the ladder; for this model it ends at its first step."
        ),
        mistake="FSDP is chosen because it is newer.",
        experiment=fit("gpt2-124m", 12),
        claims=(
            claim("DDP uses less than a quarter of the memory.", "ddp_needs", "<", "memory", 0.75),
            claim("FSDP sends fewer bytes per step.", "fsdp_wire", "<", "ddp_wire"),
            claim("FSDP is predicted to be faster.", "fsdp_seconds", "<", "ddp_seconds"),
            claim(
                "Checkpointing would cost more than 10 % of time.", "ddp_checkpointed_seconds", ">", "ddp_seconds", 0.1
            ),
        ),
        relations=(
            Relation("DDP fits with room", "ddp_needs", "<", "memory", 0.75),
            Relation("FSDP sends more", "fsdp_wire", ">", "ddp_wire"),
            Relation("and is not faster", "fsdp_seconds", ">=", "ddp_seconds"),
            Relation("checkpointing costs time", "ddp_checkpointed_seconds", ">", "ddp_seconds", 0.1),
        ),
        refuted=(Relation("FSDP is the cheaper choice", "fsdp_seconds", "<", "ddp_seconds"),),
        sources=(DDP_DOCS, FSDP_PAPER, own_run("scenario-medium-model")),
        items=(126,),
        chapter=PLAYBOOK,
    ),
    Card(
        id="scenario-barely-exceeds",
        kind="judgement",
        question="A 1.2 B model with micro-batch 16 needs 104 GiB of 80 under DDP. Which strategy first?",
        answer=(
            "Look at the classes: 21 GiB of state, 78 GiB of activations. The excess is activations, so checkpointing "
            "resolves it: 33 GiB, for a quarter more time. A smaller micro-batch with accumulation resolves it as "
            "well, nearly for free, and should be tried first. FSDP does not resolve it: it shards 21 GiB and leaves "
            "the activations."
        ),
        notes=(
            "Activations grow with the micro-batch, the state does not. FSDP alone still needs 87 GiB here. If the "
            "state were the excess, the answer would be the reverse: that is the trap in 'barely exceeds'."
        ),
        mistake="The remedy is chosen by how large the excess is, and not by what it consists of.",
        experiment=fit("llama-1b", 16),
        claims=(
            claim("Activations are the largest class under DDP.", "ddp_activations", ">", "ddp_state"),
            claim("Checkpointing makes it fit.", "ddp_checkpointed_needs", "<=", "memory"),
            claim("FSDP without checkpointing makes it fit.", "fsdp_needs", "<=", "memory"),
            claim("Checkpointing lowers the state.", "ddp_checkpointed_state", "<", "ddp_state"),
        ),
        relations=(
            Relation("DDP does not fit", "ddp_needs", ">", "memory"),
            Relation("because of activations", "ddp_activations", ">", "ddp_state"),
            Relation("checkpointing resolves it", "ddp_checkpointed_needs", "<=", "memory"),
            Relation("FSDP alone does not", "fsdp_needs", ">", "memory"),
        ),
        refuted=(Relation("sharding is the first choice whenever memory is short", "fsdp_needs", "<=", "memory"),),
        sources=(CHECKPOINT_DOCS, own_run("scenario-barely-exceeds")),
        items=(126,),
        chapter=PLAYBOOK,
    ),
    Card(
        id="scenario-substantially-exceeds",
        kind="judgement",
        question="An 8 B model needs twice the memory of the device under DDP. Which strategy first?",
        answer=(
            "FSDP. Two thirds of the need is state, which neither checkpointing nor a smaller batch changes. Sharded "
            "over 8 ranks it takes 17 GiB, and the whole job 60 of 80 GiB, without another axis. Checkpointing on top "
            "would leave room for a larger micro-batch or a longer sequence. Tensor or pipeline parallelism would also "
            "fit, with more complexity than the problem asks for."
        ),
        notes=(
            "On one node with NVLink the gathers overlap with computation: the plan predicts 2 % more time than DDP "
            "would need if it fitted. Across slow networks use hybrid sharding, with gathers inside a node."
        ),
        mistake="A hybrid of all axes is proposed where one is enough.",
        experiment=fit("llama-8b", 1),
        claims=(
            claim("With checkpointing, DDP fits.", "ddp_checkpointed_needs", "<=", "memory"),
            claim("FSDP fits, even without checkpointing.", "fsdp_needs", "<=", "memory"),
            claim("State is larger than activations under DDP.", "ddp_state", ">", "ddp_activations"),
            claim(
                "FSDP with checkpointing needs less than half of the device.",
                "fsdp_checkpointed_needs",
                "<",
                "memory",
                0.5,
            ),
        ),
        relations=(
            Relation("DDP with checkpointing does not fit", "ddp_checkpointed_needs", ">", "memory"),
            Relation("FSDP fits", "fsdp_needs", "<=", "memory"),
            Relation("state is the largest class", "ddp_state", ">", "ddp_activations"),
            Relation("both leave half of the device", "fsdp_checkpointed_needs", "<", "memory", 0.5),
        ),
        refuted=(Relation("checkpointing is enough", "ddp_checkpointed_needs", "<=", "memory"),),
        sources=(FSDP_PAPER, FSDP2_DOCS, own_run("scenario-substantially-exceeds")),
        items=(126,),
        chapter=PLAYBOOK,
    ),
    Card(
        id="scenario-enormous-model",
        kind="judgement",
        question="405 B parameters on 256 devices with 80 GB. Which strategy first, and which axis next?",
        answer=(
            "FSDP with full checkpointing first: it needs 91 GiB, so it does not fit, although not by much. Add the "
            "one axis that removes the excess at the lowest price: tensor parallelism 2 inside a node halves the "
            "activations of a sample, needs 60 GiB, and exposes 3 % of the step. Tensor 8 saves memory that nobody "
            "uses. It leaves a quarter of the data-parallel ranks of tensor 2, so the same batch takes four times the "
            "micro-batches, and the FSDP gathers of each are exposed: about half of the step."
        ),
        notes=(
            "With one sample of 8,192 tokens per rank, activations cannot shrink by the micro-batch any more: only "
            "tensor, context or pipeline parallelism divide a sample or its layers. On 512 devices FSDP alone would "
            "just fit. Context parallelism is the alternative for longer sequences. With tensor 8, 284 s of a step of "
            "732 s are exposed communication of FSDP and 62 s of tensor parallelism."
        ),
        mistake="Tensor 8, because a node has 8 devices.",
        experiment=LARGE,
        claims=(
            claim("FSDP alone fits with full checkpointing.", "fsdp_needs", "<=", "memory"),
            claim("Tensor 2 exposes less than a tenth of the step.", "exposed_tp2", "<", 0.1),
            claim("Tensor 8 exposes less than a tenth of the step.", "exposed_tp8", "<", 0.1),
            claim("DDP would need more than 5,000 GiB of state per rank.", "ddp_state", ">", 5000),
        ),
        relations=(
            Relation("FSDP alone does not fit", "fsdp_needs", ">", "memory"),
            Relation("tensor 2 fits", "tp2_needs", "<=", "memory"),
            Relation("at a small price", "exposed_tp2", "<", 0.1),
            Relation("tensor 8 fits, too", "tp8_needs", "<=", "memory"),
            Relation("and is slower", "seconds_tp8", ">", "seconds_tp2"),
            Relation("it takes four times the micro-batches", "micro_batches_tp8_to_tp2", "==", 4),
            Relation("whose FSDP gathers expose most", "exposed_shard_tp8", ">", "exposed_tensor_tp8"),
        ),
        refuted=(Relation("the largest tensor degree is the best", "seconds_tp8", "<=", "seconds_tp2"),),
        sources=(MEGATRON_3D_PAPER, FSDP_PAPER, own_run("scenario-enormous-model")),
        items=(126,),
        chapter=PLAYBOOK,
    ),
)
