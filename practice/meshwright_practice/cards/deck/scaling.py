"""Cards on scaling: laws, the combination of axes, and answers that compare."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.references import (
    AMDAHL_PAPER,
    CHECKPOINT_DOCS,
    DEVICE_MESH_RECIPE,
    FSDP2_DOCS,
    GUSTAFSON_PAPER,
    KARP_FLATT_PAPER,
    MEGATRON_3D_PAPER,
    ZERO_PAPER,
    own_run,
)

PLAYBOOK, JUDGEMENT, MEMORY = "handbook/playbook.md", "handbook/judgement.md", "handbook/memory.md"
SCALING = Experiment(
    "plans:scaling",
    knobs=(
        Knob("serial", (0.01, 0.05, 0.001), "serial fraction of Amdahl's law"),
        Knob("model", ("llama-1b", "gpt2-124m"), "preset"),
        Knob("gigabits", (400.0, 100.0), "Gbit/s per node"),
    ),
)
LARGE = Experiment(
    "plans:large_model",
    knobs=(Knob("model", ("llama-405b", "llama-70b"), "preset"), Knob("nodes", (32, 64), "nodes of 8 H100")),
)
MODERATE = Experiment(
    "plans:fit",
    knobs=(
        Knob("model", ("llama-1b", "gpt2-124m", "llama-8b"), "preset"),
        Knob("cluster", ("h100:8", "a100-80:8"), "cluster"),
        Knob("micro", (4, 1), "samples per micro-batch"),
    ),
)
STATE_OVERFLOW = Experiment(
    "plans:fit",
    knobs=(
        Knob("model", ("llama-8b", "llama-1b"), "preset"),
        Knob("cluster", ("h100:8", "h200:8"), "cluster"),
        Knob("micro", (1, 2), "samples per micro-batch"),
    ),
)

CARDS = (
    Card(
        id="amdahls-law",
        kind="judgement",
        question="State Amdahl's law. What does it say about distributed training?",
        answer=(
            "The speedup on N processors is 1 / (s + (1 - s)/N), with s the share that does not become parallel. It "
            "can never exceed 1/s. With 1 % serial, 64 devices give 39 times, 1,024 give 91, and no number gives more "
            "than 100. In training, s is what every rank does or waits for in each step whatever N is: exposed "
            "communication, input, host overhead."
        ),
        notes=(
            "The law is about a fixed problem: strong scaling, with a constant global batch. Efficiency is speedup / "
            "N. If the batch grows with N, the problem grows and Gustafson's law applies: s + (1 - s) N. The run "
            "counts the ticks of 10,000 units of work, one unit per device and tick, and plans a model on 1 to 64 "
            "devices."
        ),
        mistake="1 % is called negligible. At 1,024 devices it costs 91 % of the machine.",
        experiment=SCALING,
        predictions=(
            Prediction("amdahl_64", "s = 1 %, 64 devices: speedup?", "times"),
            Prediction("amdahl_limit", "And with any number of devices, at most?", "times"),
        ),
        relations=(
            Relation("counted ticks on 64 devices agree with the law", "counted_64", "==", "amdahl_64", 0.01),
            Relation("so do those on 1,024", "counted_1024", "==", "amdahl_1024", 0.01),
            Relation("sixteen times the devices give less than three times as much", "counted_gain_of_16", "<", 3),
            Relation("the plan of a model loses efficiency, too", "strong_efficiency_64", "<", "strong_efficiency_8"),
            Relation("and stays below its own limit", "planned_speedup_64", "<=", "planned_limit_64"),
        ),
        refuted=(Relation("a serial share of 1 % costs 1 % of 64", "counted_64", ">=", 63),),
        sources=(AMDAHL_PAPER, own_run("amdahls-law")),
        items=(150,),
        chapter=JUDGEMENT,
    ),
    Card(
        id="trap-constant-serial-fraction",
        kind="judgement",
        question=(
            "'Measure the serial fraction on 8 devices, and Amdahl's law predicts 64.' The plan of a 1.2 B model "
            "speeds up 7.97 times on 8 devices of one node. What is right?"
        ),
        answer=(
            "The fraction is not a constant of the program. Inside a node the reduction hides behind backward, and the "
            "fraction is nearly zero; across nodes it does not, and the fraction is ten times larger. The law would "
            "promise 62 times, the plan says 46. And it is about a fixed batch: if every device keeps its samples, the "
            "efficiency stays higher, which is Gustafson's law."
        ),
        notes=(
            "Karp and Flatt: s = (1/S - 1/N) / (1 - 1/N) from a measured speedup S. Plot s over N: constant means a "
            "truly serial part, growing means communication or imbalance. Strong scaling keeps the global batch, weak "
            "scaling keeps the batch per device; weak scaling is limited by the critical batch instead."
        ),
        mistake="A single-node measurement is extrapolated to a cluster.",
        experiment=SCALING,
        claims=(
            claim(
                "The serial fraction that explains 64 devices is larger than that of 8.",
                "serial_fraction_64",
                ">",
                "serial_fraction_8",
            ),
            claim(
                "The law with the fraction of 8 devices predicts the speedup on 64 within 10 %.",
                "speedup_64_from_8",
                "<=",
                "planned_speedup_64",
                0.1,
            ),
            claim(
                "With a constant batch per device, 64 devices scale better than with a constant global batch.",
                "weak_speedup_64",
                ">",
                "planned_speedup_64",
            ),
            claim("With a constant batch per device, scaling is at least 63 of 64.", "weak_speedup_64", ">=", 63),
        ),
        relations=(
            Relation("the serial fraction grows", "serial_fraction_64", ">", "serial_fraction_8", 1),
            Relation("8 devices promise more than 64 keep", "speedup_64_from_8", ">", "planned_speedup_64", 0.1),
            Relation("weak scaling is better than strong", "weak_speedup_64", ">", "planned_speedup_64", 0.1),
        ),
        refuted=(Relation("the serial fraction is constant", "serial_fraction_64", "==", "serial_fraction_8", 0.1),),
        sources=(KARP_FLATT_PAPER, GUSTAFSON_PAPER, own_run("trap-constant-serial-fraction")),
        items=(150,),
        chapter=JUDGEMENT,
    ),
    Card(
        id="combining-parallelism-axes",
        kind="judgement",
        question="How do you combine data, tensor and pipeline parallelism for a model that is too large?",
        answer=(
            "Start from the constraint and add one axis at a time. Sharded data parallelism first, since it needs no "
            "other model. Tensor parallelism where a layer or the activations of a sample are too large, in the "
            "smallest degree that fits and inside the fastest links, because its collectives are on the critical "
            "path. Pipeline parallelism across nodes where its small messages pay. Every axis has a price, so each "
            "needs the bottleneck that it removes."
        ),
        notes=(
            "ranks = data x tensor x pipeline x context; a replica contains all stages and all tensor-parallel ranks. "
            "Order on the mesh: tensor innermost (NVLink), then context, then data or pipeline. Here 405 B parameters "
            "on 256 H100: FSDP alone needs 91 GiB of 80, tensor 2 fits with 3 % exposed. Tensor 8 leaves a quarter of "
            "the data-parallel ranks of tensor 2, so the same batch takes four times the micro-batches, and the FSDP "
            "gathers of each are exposed: about half of the step."
        ),
        mistake="All axes are stacked by default, at the largest degree that divides.",
        experiment=LARGE,
        claims=(
            claim("FSDP alone fits on 256 devices, with full checkpointing.", "fsdp_needs", "<=", "memory"),
            claim("Tensor parallelism 2 makes it fit.", "tp2_needs", "<=", "memory"),
            claim(
                "Tensor parallelism 8 is faster than 2, since it divides the work further.",
                "seconds_tp8",
                "<",
                "seconds_tp2",
            ),
            claim(
                "Tensor groups that cross nodes are slower than groups inside a node.",
                "seconds_tp8_across_nodes",
                ">",
                "seconds_tp8",
            ),
            claim(
                "With tensor 8 and pipeline 4, 256 ranks make 256 data-parallel ranks.", "data_degree_3d", "==", "ranks"
            ),
        ),
        relations=(
            Relation("FSDP alone does not fit", "fsdp_needs", ">", "memory"),
            Relation("tensor 2 does", "tp2_needs", "<=", "memory"),
            Relation("a larger tensor degree exposes more", "exposed_tp8", ">", "exposed_tp2"),
            Relation("most of it by FSDP, not by tensor parallelism", "exposed_shard_tp8", ">", "exposed_tensor_tp8"),
            Relation("and more still across nodes", "exposed_tp8_across_nodes", ">", "exposed_tp8"),
            Relation("the degrees multiply to the ranks", "axes_3d", "==", "ranks"),
            Relation("the data-parallel degree is what is left", "data_degree_3d", "==", 8),
        ),
        refuted=(Relation("more tensor parallelism is faster", "seconds_tp8", "<", "seconds_tp2"),),
        sources=(MEGATRON_3D_PAPER, DEVICE_MESH_RECIPE, own_run("combining-parallelism-axes")),
        items=(52, 53),
        chapter=PLAYBOOK,
    ),
    Card(
        id="comparison-by-axes",
        kind="judgement",
        question="You are asked to compare DDP, DDP with checkpointing, and FSDP. How do you structure the answer?",
        answer=(
            "Name the axes first, then fill a table: memory of the state, memory of activations, bytes on the wire, "
            "time, and what it costs to operate. DDP: full state, least traffic. Checkpointing: the same state and "
            "traffic, fewer activations, a quarter more time. FSDP: a fraction of the state, several times the "
            "traffic with accumulation. Close with the condition under which each is the choice."
        ),
        notes=(
            "One row per option, one column per axis, one number per cell: the plan of a 1.2 B model on 8 H100 gives "
            "20.7 GiB of state for DDP and 2.6 for FSDP, 8 GiB on the wire per step against 129. Without accumulation "
            "the ratio of the traffic is 1.5 in one precision. An answer without numbers is a list of names."
        ),
        mistake="Each option is described at length, one after the other, and nothing is comparable.",
        experiment=MODERATE,
        claims=(
            claim(
                "On the axis 'state', DDP with checkpointing needs less than DDP.",
                "ddp_checkpointed_state",
                "<",
                "ddp_state",
            ),
            claim(
                "On the axis 'state', FSDP on 8 ranks needs less than a fifth of DDP.",
                "fsdp_state",
                "<",
                "ddp_state",
                0.8,
            ),
            claim(
                "On the axis 'wire', FSDP with accumulation sends more than twice as much as DDP.",
                "fsdp_wire",
                ">",
                "ddp_wire",
                1.0,
            ),
            claim(
                "On the axis 'time', checkpointing costs more than 10 %.",
                "ddp_checkpointed_seconds",
                ">",
                "ddp_seconds",
                0.1,
            ),
            claim("On this model, DDP does not fit.", "ddp_needs", ">", "memory"),
        ),
        relations=(
            Relation("FSDP shards the state", "fsdp_state", "<", "ddp_state", 0.8),
            Relation("FSDP sends more", "fsdp_wire", ">", "ddp_wire", 1.0),
            Relation("checkpointing shrinks activations", "ddp_checkpointed_activations", "<", "ddp_activations", 0.5),
            Relation("checkpointing costs time", "ddp_checkpointed_seconds", ">", "ddp_seconds", 0.1),
            Relation("all fit here", "ddp_needs", "<=", "memory"),
        ),
        refuted=(Relation("FSDP and DDP send the same bytes", "fsdp_wire", "<=", "ddp_wire"),),
        sources=(ZERO_PAPER, FSDP2_DOCS, own_run("comparison-by-axes")),
        items=(151,),
        chapter=JUDGEMENT,
    ),
    Card(
        id="trap-checkpointing-fixes-any-overflow",
        kind="judgement",
        question=(
            "'The model does not fit under DDP: add activation checkpointing, the cheapest step.' 8 B parameters, 8 "
            "devices of 80 GB. What is right?"
        ),
        answer=(
            "Ask first which class overflows. Checkpointing shrinks activations only. Here parameters, gradients and "
            "optimizer state need 135 GiB, more than the device has, so no checkpointing can make it fit: the state "
            "has to be sharded. Had the activations been the excess, as with a long sequence or a large micro-batch, "
            "checkpointing would have been the right first step."
        ),
        notes=(
            "18 bytes per parameter for bf16 weights with fp32 master weights, gradients and AdamW's moments: 8.03 B x "
            "18 = 135 GiB. meshwright plan prints the classes of the rank with the peak."
        ),
        mistake="'Barely exceeds memory' is answered without asking what exceeds it.",
        experiment=STATE_OVERFLOW,
        predictions=(
            Prediction(
                "ddp_state", "8.03 B parameters at 18 bytes each under DDP: GiB of state per rank?", "GiB", 0.03
            ),
        ),
        relations=(
            Relation("the state alone exceeds the device", "ddp_state", ">", "memory"),
            Relation("checkpointing does not make it fit", "ddp_checkpointed_needs", ">", "memory"),
            Relation("although it shrinks activations", "ddp_checkpointed_activations", "<", "ddp_activations"),
            Relation("sharding makes it fit", "fsdp_needs", "<=", "memory"),
        ),
        refuted=(Relation("checkpointing makes it fit", "ddp_checkpointed_needs", "<=", "memory"),),
        sources=(CHECKPOINT_DOCS, ZERO_PAPER, own_run("trap-checkpointing-fixes-any-overflow")),
        items=(126,),
        chapter=MEMORY,
    ),
)
