"""Cards on pipeline schedules: bubble, micro-batches in flight, and what crosses a stage boundary."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.references import (
    GPIPE_PAPER,
    MEGATRON_3D_PAPER,
    PIPEDREAM_PAPER,
    PIPELINE_DOCS,
    ZERO_BUBBLE_PAPER,
    own_run,
)

CHAPTER = "handbook/pipeline.md"
RANKS = Knob("ranks", (4, 2, 8), "pipeline ranks P")
MICRO_BATCHES = Knob("micro_batches", (8, 16, 32), "micro-batches per step M")
BUBBLE = Experiment("schedules:bubble", knobs=(RANKS, MICRO_BATCHES))
RUN = Experiment(
    "schedules:pipeline_run",
    ranks=2,
    knobs=(
        Knob("ranks", (2, 4), "pipeline ranks P"),
        Knob("micro_batches", (8, 4), "micro-batches per step M"),
        Knob("layers", (4, 8), "blocks of the model L"),
    ),
)

CARDS = (
    Card(
        id="pipeline-parallelism",
        kind="schedule",
        question="Which problem does pipeline parallelism solve, and what does it cost?",
        answer=(
            "It divides the layers of a model into stages on different ranks, so that every rank has only the "
            "parameters, gradients and optimizer state of its stage. A batch is cut into micro-batches, so that stages "
            "work at the same time on different ones. It costs idle time while the pipeline fills and drains, a "
            "point-to-point message per boundary and micro-batch, and a step that is as slow as its slowest stage. "
            "The speedup is therefore smaller than the number of stages."
        ),
        notes=(
            "P ranks, M micro-batches, stages of equal cost: all ranks together idle (P-1)/(M+P-1) of the time, so the "
            "speedup is P M/(M+P-1). State falls to about 1/P per rank; the first and the last stage also have the "
            "embedding and the head. Activations of the first stage do not fall under 1F1B. torch.distributed."
            "pipelining has these schedules; Meshwright runs them and counts micro-batches in flight."
        ),
        mistake="Four stages are expected to be four times as fast. Fill, drain and imbalance take their share first.",
        experiment=BUBBLE,
        predictions=(
            Prediction(
                "speedup", "4 equal stages, 8 micro-batches, 1F1B: how many times as fast as one rank?", "times"
            ),
        ),
        relations=(
            Relation("four stages are less than four times as fast", "speedup", "<", "ranks"),
            Relation("twice the stages leave a larger bubble", "twice_the_ranks", ">", "1f1b"),
            Relation("twice the micro-batches leave a smaller one", "twice_the_micro_batches", "<", "1f1b"),
        ),
        refuted=(Relation("the speedup is the number of stages", "speedup", "==", "ranks"),),
        sources=(PIPELINE_DOCS, GPIPE_PAPER, own_run("pipeline-parallelism")),
        items=(43, 44, 45),
        chapter=CHAPTER,
    ),
    Card(
        id="bubble-fraction",
        kind="schedule",
        question="Which fraction of the time does a pipeline of P stages idle with M micro-batches?",
        answer=(
            "(P-1)/(M+P-1), for GPipe and for 1F1B alike: each rank works for M passes in each direction, and the "
            "first micro-batch needs P-1 more to reach the last stage and come back. More stages make it worse, more "
            "micro-batches make it better. With 4 stages, 8 micro-batches leave 27 %, 16 leave 16 %, 32 leave 9 %."
        ),
        notes=(
            "The formula counts idle rank-time over all rank-time, with equal stages, free communication and a flush "
            "at the end of the step. Relative to the useful time the bubble is (P-1)/M, which some papers print. The "
            "run executes the action order of every rank and counts the ticks in which it has nothing to do."
        ),
        mistake="(P-1)/M is taken for the share of the step. It is the share of the useful time, and can exceed 1.",
        experiment=BUBBLE,
        predictions=(
            Prediction("1f1b", "4 stages, 8 micro-batches, 1F1B: which share of the time is idle?", "share"),
            Prediction("twice_the_micro_batches", "And with 16 micro-batches?", "share"),
        ),
        relations=(
            Relation("1F1B idles as the formula says", "1f1b", "==", "formula", 1e-12),
            Relation("GPipe idles as long as 1F1B", "gpipe", "==", "1f1b", 1e-12),
        ),
        refuted=(Relation("1F1B has a smaller bubble than GPipe", "1f1b", "<", "gpipe"),),
        sources=(GPIPE_PAPER, MEGATRON_3D_PAPER, own_run("bubble-fraction")),
        items=(149,),
        chapter=CHAPTER,
    ),
    Card(
        id="what-crosses-a-stage-boundary",
        kind="schedule",
        question="What do two neighbouring pipeline stages send to each other, and how many bytes?",
        answer=(
            "In forward the hidden states of one micro-batch, a tensor of shape [b, s, d]; in backward the gradient of "
            "the same tensor, in the other direction. Both are point-to-point messages between neighbours, no "
            "collective. Per step and boundary that is M times b s d elements each way, whatever the size of the "
            "layers. No parameter and no parameter gradient crosses a boundary."
        ),
        notes=(
            "b: samples per micro-batch, s: tokens per sample, d: width, M: micro-batches per step. With tensor "
            "parallelism and sequence parallelism each rank sends its part of s. The first stage receives no hidden "
            "states and sends no gradient; the last one the reverse. The counter sees sends only, so that each message "
            "counts once. Data-parallel reduction of gradients happens within a stage, on another group."
        ),
        mistake="Stages are said to exchange weights or weight gradients. Each stage alone owns and updates its own.",
        experiment=RUN,
        predictions=(
            Prediction(
                "sent_by_first",
                "2 stages, 8 micro-batches of 1 sample, 8 tokens, width 16, float64: bytes that stage 0 sends per "
                "step?",
                "B",
            ),
            Prediction("messages_of_first", "In how many messages?", "messages"),
        ),
        relations=(
            Relation("the first stage sends one message per micro-batch", "messages_of_first", "==", "micro_batches"),
            Relation("the gradients that come back are as large", "sent_by_last", "==", "sent_by_first"),
            Relation("one [b, s, d] tensor is less than all that is sent", "tensor_bytes", "<", "sent_by_first"),
            Relation("the loss is that of a run without a pipeline", "loss_difference", "<=", 1e-10),
        ),
        refuted=(Relation("the traffic of a step is one [b, s, d] tensor", "sent_by_first", "==", "tensor_bytes"),),
        sources=(PIPELINE_DOCS, MEGATRON_3D_PAPER, own_run("what-crosses-a-stage-boundary")),
        items=(154,),
        chapter=CHAPTER,
    ),
    Card(
        id="1f1b-against-gpipe",
        kind="schedule",
        question="GPipe and 1F1B have the same bubble. What differs?",
        answer=(
            "The activations that are alive. GPipe runs all forward passes first, so every stage keeps all M "
            "micro-batches. 1F1B starts a backward pass as soon as it can, so stage i of P keeps at most P - i "
            "micro-batches: P on the first stage, 1 on the last. The gradients are the same. The advantage exists only "
            "where M is larger than P."
        ),
        notes=(
            "Stage index i from 0: peak in flight min(P - i, M) under 1F1B, M under GPipe on every stage. torch "
            "requires M >= P for 1F1B. The trainer's stages count a micro-batch from its forward pass to the end of "
            "its backward pass; the figures come from real ranks, not from the schedule."
        ),
        mistake="1F1B is praised for a smaller bubble. It reorders the same passes; only memory changes.",
        experiment=RUN,
        predictions=(
            Prediction(
                "gpipe_first", "2 stages, 8 micro-batches: how many are in flight on stage 0 under GPipe?", "count"
            ),
            Prediction("1f1b_first", "And under 1F1B?", "count"),
        ),
        relations=(
            Relation("GPipe keeps all micro-batches on the first stage", "gpipe_first", "==", "micro_batches"),
            Relation("and on the last stage", "gpipe_last", "==", "micro_batches"),
            Relation("1F1B keeps as many as there are stages on the first", "1f1b_first", "==", "ranks"),
            Relation("and one on the last", "1f1b_last", "==", 1),
            Relation("both give the loss of a run without a pipeline", "loss_difference", "<=", 1e-10),
        ),
        refuted=(Relation("both schedules keep the same activations", "1f1b_first", "==", "gpipe_first"),),
        sources=(PIPEDREAM_PAPER, GPIPE_PAPER, own_run("1f1b-against-gpipe")),
        items=(155,),
        chapter=CHAPTER,
    ),
    Card(
        id="trap-pipeline-halves-activations",
        kind="schedule",
        question=(
            "'Two pipeline stages halve the memory of every rank: parameters, optimizer state and activations.' "
            "What is right?"
        ),
        answer=(
            "State falls to about a half, activations of the first stage do not. Under 1F1B it keeps P micro-batches "
            "of L/P layers, which is as many layers as one rank without a pipeline keeps for one micro-batch. GPipe "
            "keeps M of them, which is more. Against activations use checkpointing, smaller micro-batches, or sequence "
            "or context parallelism."
        ),
        notes=(
            "Layers kept on stage 0: min(P, M) L/P = L under 1F1B for M >= P; M L/P under GPipe. The comparison is a "
            "run with gradient accumulation over the same micro-batches. The last stage keeps one micro-batch, so the "
            "average over ranks does fall; the job needs the rank with the peak, and the head adds logits at the end."
        ),
        mistake="Memory is divided by P as a whole. Only what belongs to layers is divided, not what is in flight.",
        experiment=RUN,
        predictions=(
            Prediction(
                "layers_kept_first_1f1b",
                "4 layers in 2 stages, 8 micro-batches, 1F1B: of how many layers (times micro-batches) does stage 0 "
                "keep "
                "activations?",
                "layers",
            ),
        ),
        relations=(
            Relation("1F1B keeps as many layers as no pipeline", "layers_kept_first_1f1b", "==", "layers"),
            Relation("GPipe keeps more", "layers_kept_first_gpipe", ">", "layers"),
            Relation("the optimizer state of stage 0 is about a half", "parameter_share_first", "<=", 0.55),
            Relation("its peak of activations hardly falls", "activation_share_first", ">=", 0.8),
        ),
        refuted=(Relation("activations of stage 0 are halved, too", "activation_share_first", "<=", 0.55),),
        sources=(MEGATRON_3D_PAPER, own_run("trap-pipeline-halves-activations")),
        items=(44, 116),
        chapter=CHAPTER,
    ),
    Card(
        id="trap-one-bubble-formula",
        kind="schedule",
        question=(
            "'Every pipeline schedule idles (P-1)/(M+P-1) of the time; only more micro-batches help.' What is right?"
        ),
        answer=(
            "The formula is that of GPipe and 1F1B, with equal stages, free communication and a flush every step. "
            "Interleaving V stages per rank divides the fill by V: (P-1)/(V M+P-1). Schedules that split backward fill "
            "the gaps with weight gradients and idle still less. Unequal stages idle more than any formula says. And "
            "smaller micro-batches make each pass less efficient, so M is no free dial."
        ),
        notes=(
            "V: stages per rank. Interleaved 1F1B: more messages, more micro-batches in flight. Zero bubble (ZB-H1 "
            "with one stage per rank): backward is split into input gradients, which the previous stage waits for, and "
            "weight gradients, which nobody waits for; with passes of equal length about (P-1)/(3 M+P-1). The formula "
            "also assumes that the optimizer waits for the flush."
        ),
        mistake="One formula is quoted for all schedules, without its assumptions.",
        experiment=BUBBLE,
        predictions=(
            Prediction("interleaved", "4 ranks, 8 micro-batches, 2 stages per rank, interleaved: idle share?", "share"),
        ),
        relations=(
            Relation("1F1B idles as the formula says", "1f1b", "==", "formula", 1e-12),
            Relation("interleaving idles less", "interleaved", "<", "formula"),
            Relation("a split backward with one stage per rank idles still less", "zero_bubble", "<", "interleaved"),
        ),
        refuted=(
            Relation("interleaved schedules idle as long as 1F1B", "interleaved", "==", "formula", 1e-12),
            Relation("a split backward changes nothing", "zero_bubble", "==", "formula", 1e-12),
        ),
        sources=(MEGATRON_3D_PAPER, ZERO_BUBBLE_PAPER, own_run("trap-one-bubble-formula")),
        items=(149,),
        chapter=CHAPTER,
    ),
)
