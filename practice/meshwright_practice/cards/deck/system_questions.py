"""Cards of judgement: the questions that a design of a training system must answer, decided by runs and plans."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.references import (
    DATA_DOCS,
    DCP_DOCS,
    DDP_NOTES,
    ELASTIC_DOCS,
    FSDP2_DOCS,
    LARGE_BATCH_PAPER,
    LLAMA3_PAPER,
    RANDOMNESS_NOTES,
    own_run,
)

JUDGEMENT, DATA, FAILURE_PLANE = "handbook/judgement.md", "handbook/data-and-resume.md", "handbook/failure-plane.md"
STEP = Experiment(
    "batches:one_step", ranks=2, knobs=(Knob("accumulation", (4, 1, 2), "micro-batches per step and rank"),)
)
RESUME = Experiment(
    "streams:resume",
    ranks=2,
    knobs=(
        Knob("ranks_before", (2, 1), "data-parallel ranks before the kill"),
        Knob("ranks_after", (1, 2, 4), "data-parallel ranks after it"),
        Knob("stop", (3, 2), "steps before the kill"),
        Knob("steps", (6,), "steps of the run"),
    ),
)
DROP_ONE = Experiment("recovery:drop_one")
SIGNALS = Experiment("recovery:signals", knobs=(Knob("nan_every", (2, 4), "every so many steps is not finite"),))
SILENT = Experiment("recovery:silent_failure", ranks=2)
TEN_TIMES = Experiment(
    "plans:ten_times",
    knobs=(Knob("model", ("llama-8b", "llama-1b"), "preset"), Knob("nodes", (8, 16), "nodes of 8 H100 now")),
)
IDENTITY = Experiment("recovery:identity", ranks=2)

CARDS = (
    Card(
        id="what-is-one-step",
        kind="judgement",
        question="What is one training step, precisely?",
        answer=(
            "The unit that is done whole or not at all: fetch the samples of the global batch, copy them, one forward "
            "and one backward pass per micro-batch, sum gradients over ranks, and one update. It has a number, a "
            "defined set of samples, and a count of tokens by which the loss is divided once. Time, loss, checkpoints "
            "and restarts refer to it. Anything smaller, such as half an accumulation, is never saved."
        ),
        notes=(
            "Phases of Meshwright's step: fetch, copy, forward, backward, sync, update, each timed. Before any "
            "parameter changes, every rank has seen the summed step control vector: tokens, bad samples, stop signals, "
            "so that all ranks stop at the same step. With overlap, phases add up to the step time only if waits are "
            "counted as exposed."
        ),
        mistake="'backward and optimizer.step' leaves out the data and the synchronization, where most errors are.",
        experiment=STEP,
        claims=(
            claim("With accumulation 4, a step fetches its samples once.", "fetch_phases", "==", 1),
            claim("With accumulation 4, a step updates the parameters 4 times.", "update_phases", "==", "accumulation"),
            claim("With accumulation 4, a step has 4 forward passes.", "forward_phases", "==", 4),
            claim(
                "Under DDP, gradients are all-reduced once per micro-batch.",
                "ddp_gradient_collectives",
                "==",
                "accumulation",
            ),
            claim("A step has small control messages besides gradients.", "ddp_control_collectives", ">=", 1),
        ),
        relations=(
            Relation("one fetch", "fetch_phases", "==", 1),
            Relation("a forward pass per micro-batch", "forward_phases", "==", "accumulation"),
            Relation("one update", "update_phases", "==", 1),
            Relation("one reduction of gradients under DDP", "ddp_gradient_collectives", "==", 1),
            Relation("control messages besides", "ddp_control_collectives", ">=", 1),
        ),
        refuted=(Relation("every micro-batch updates", "update_phases", "==", "accumulation"),),
        sources=(DDP_NOTES, own_run("what-is-one-step")),
        items=(100, 106),
        chapter=JUDGEMENT,
    ),
    Card(
        id="how-is-data-partitioned",
        kind="judgement",
        question="How is the input partitioned across ranks, and how would you prove it?",
        answer=(
            "By a rule, not by an object: the sample at a global position is a function of seed and position, a step "
            "owns a range of positions, and each data-parallel rank takes its part of the range. Then the union of the "
            "ranks is the range, ranks do not overlap, and a restart is one integer, on any number of ranks. The proof "
            "is set algebra on sample ids: union, overlap, missing, repeated, also across a kill."
        ),
        notes=(
            "The run kills a job on 2 ranks, resumes it on 1, and compares ids and float64 losses with an undisturbed "
            "run. DistributedSampler in the same situation starts its epoch again: it replays everything that was "
            "consumed, and the samples after it are not reached in the remaining steps."
        ),
        mistake="'The sampler splits the data' names the object and not the contract.",
        experiment=RESUME,
        claims=(
            claim(
                "After a kill and a resume on half of the ranks, the stream replays samples.", "replayed_stream", ">", 0
            ),
            claim("The resumed losses equal those of an undisturbed run to 1e-10.", "loss_difference", "<=", 1e-10),
            claim(
                "DistributedSampler replays all samples of the 3 steps before the kill.", "replayed_sampler", "==", 24
            ),
            claim(
                "With DistributedSampler, the 6 steps read all samples that they should.", "missing_sampler", "==", 0
            ),
        ),
        relations=(
            Relation("the union is exact", "union", "==", "expected_union"),
            Relation("nothing is replayed", "replayed_stream", "==", 0),
            Relation("nothing is missing", "missing_stream", "==", 0),
            Relation("losses agree", "loss_difference", "<=", 1e-10),
            Relation("the sampler replays", "replayed_sampler", ">", 0),
            Relation("and misses as many", "missing_sampler", "==", "replayed_sampler"),
        ),
        refuted=(Relation("a sampler without a cursor resumes", "replayed_sampler", "==", 0),),
        sources=(DATA_DOCS, own_run("how-is-data-partitioned")),
        items=(101, 107),
        chapter=DATA,
    ),
    Card(
        id="what-survives-a-restart",
        kind="judgement",
        question="Which state must survive a restart, and how do you know that the list is complete?",
        answer=(
            "Parameters, optimizer state, schedule, loss scale, stream position, random seeds, counters, and the "
            "identity that decides whether the checkpoint belongs to this run. The list is complete if a resumed run "
            "ends with the bits of an undisturbed one; it is minimal if leaving out any field is noticed. Both are "
            "tests: kill and compare, and drop one field at a time."
        ),
        notes=(
            "On the same layout the comparison is bitwise; on another one, float64 losses agree to about 1e-10. "
            "Meshwright validates every field before a tensor is copied in, and says both values."
        ),
        mistake="The list is recited, and no test would notice a missing entry.",
        experiment=DROP_ONE,
        claims=(
            claim(
                "A resume from the intact checkpoint ends with the bits of an undisturbed run.",
                "intact_same_bits",
                "==",
                1,
            ),
            claim(
                "A resume without optimizer moments continues with fresh ones.", "refused_without_optimizer", "==", 0
            ),
            claim("A checkpoint without the identity of the run is refused.", "refused_without_identity", "==", 1),
            claim("A checkpoint without random seeds is refused.", "refused_without_rng", "==", 1),
            claim("At least one of the five fields may be missing.", "refused", "<", "fields"),
        ),
        relations=(
            Relation("each of the fields is missed", "refused", "==", "fields"),
            Relation("the intact checkpoint is complete", "intact_same_bits", "==", 1),
        ),
        refuted=(Relation("moments may be left out", "refused_without_optimizer", "==", 0),),
        sources=(DCP_DOCS, RANDOMNESS_NOTES, own_run("what-survives-a-restart")),
        items=(102, 108),
        chapter=DATA,
    ),
    Card(
        id="one-metric-of-health",
        kind="judgement",
        question="Which single metric tells you that the job is unhealthy?",
        answer=(
            "Goodput: samples that became part of the model, counted once, per second of wall time. It falls when "
            "ranks "
            "hang, when steps slow down, when updates are skipped, and when work is replayed. Steps per second and "
            "utilization miss the last two. Beside it, one number for communication and one for recovery: the exposed "
            "share, and the age of the newest verified checkpoint."
        ),
        notes=(
            "The account of a run divides every nanosecond of wall time: productive, data, exposed communication, "
            "bubble, straggler, checkpoint, restart, lost work, skipped and others. An alarm needs a rate over a "
            "window, "
            "and a floor derived from the run's own recent steps."
        ),
        mistake="'The process is up and the GPUs are allocated' is monitored. Both stay true while nothing advances.",
        experiment=SIGNALS,
        claims=(
            claim(
                "A run that skips every second update completes as many steps as a healthy one.",
                "skipping_steps",
                "==",
                "healthy_steps",
            ),
            claim("Its goodput is that of the healthy run.", "skipping_goodput", "==", "healthy_goodput"),
            claim(
                "A run that replays steps completes fewer steps than a healthy one.",
                "replaying_steps",
                "<",
                "healthy_steps",
            ),
            claim(
                "The replaying run processes more samples than it uses.",
                "replaying_samples",
                ">",
                "replaying_useful_samples",
            ),
        ),
        relations=(
            Relation("steps do not show skipped updates", "skipping_steps", "==", "healthy_steps"),
            Relation("goodput does", "skipping_goodput", "<", "healthy_goodput"),
            Relation("steps show replay as more work", "replaying_steps", ">", "healthy_steps"),
            Relation("goodput shows it as less", "replaying_goodput", "<", "healthy_goodput"),
        ),
        refuted=(
            Relation("samples processed are samples used", "replaying_samples", "==", "replaying_useful_samples"),
        ),
        sources=(LLAMA3_PAPER, own_run("one-metric-of-health")),
        items=(103, 109),
        chapter=FAILURE_PLANE,
    ),
    Card(
        id="where-is-the-synchronization-boundary",
        kind="judgement",
        question="Where is the synchronization boundary of your design?",
        answer=(
            "Before the update: no rank changes a parameter until every gradient is the sum over all ranks, and until "
            "all ranks have agreed on tokens, bad samples and stop signals. Under DDP the sum runs during the last "
            "backward pass; under FSDP it is spread over the step, with gathers before every unit. So the boundary is "
            "a condition on the update, not a barrier in time."
        ),
        notes=(
            "Meshwright: trainer/step.py divides the loss by the global token count in one place; sums happen in "
            "parallel/data_parallel. With FSDP2, 2 all-gathers and 1 reduce-scatter per unit and micro-batch; with "
            "gradient accumulation DDP synchronizes the last micro-batch only."
        ),
        mistake="A barrier is placed there 'to be safe'. It costs time and enforces nothing about the gradients.",
        experiment=STEP,
        claims=(
            claim(
                "Under FSDP2 there are more gathers than reduce-scatters.",
                "fsdp_all_gathers",
                ">",
                "fsdp_reduce_scatters",
            ),
            claim("Under FSDP2 a step synchronizes once.", "fsdp_collectives", "==", 1),
            claim(
                "Under DDP with accumulation 4, one all-reduce carries the gradients of this small model.",
                "ddp_gradient_collectives",
                "==",
                1,
            ),
            claim("A step enters the phase update more than once.", "update_phases", ">", 1),
        ),
        relations=(
            Relation("one update", "update_phases", "==", 1),
            Relation("FSDP2 gathers more often than it reduces", "fsdp_all_gathers", ">", "fsdp_reduce_scatters"),
            Relation("DDP reduces once", "ddp_gradient_collectives", "==", 1),
        ),
        refuted=(Relation("FSDP2 has one point of synchronization", "fsdp_collectives", "==", 1),),
        sources=(DDP_NOTES, FSDP2_DOCS, own_run("where-is-the-synchronization-boundary")),
        items=(104,),
        chapter=JUDGEMENT,
    ),
    Card(
        id="most-dangerous-silent-failure",
        kind="judgement",
        question="What is the most dangerous silent failure of your design?",
        answer=(
            "Replicas that differ. A flipped bit, a kernel that is wrong on one device, or a rank that read other "
            "samples changes the parameters of one rank; the averaged gradients hide it, the loss stays plausible, and "
            "the checkpoint saves one of the versions. Neither loss nor throughput shows it. Compare parameters "
            "bitwise between replicas from time to time, and before each checkpoint."
        ),
        notes=(
            "The run flips one bit of a parameter on rank 1. Without comparisons it completes, with a loss that agrees "
            "to many digits and with other bits. numerics.compare_every hashes the parameters of all replicas; a "
            "difference names the parameter, and both ranks if two differ: it cannot tell which one is right. Others "
            "of "
            "this kind: replayed samples, unequal normalization, a stale shard."
        ),
        mistake="A crash is named. It is loud, and the job restarts.",
        experiment=SILENT,
        claims=(
            claim("With a flipped bit on one rank and no comparison, the run fails.", "blind_run_completes", "==", 0),
            claim("The loss shows the flipped bit: it differs by more than 1 %.", "blind_loss_gap", ">", 0.04),
            claim("The final parameters have other bits than those of an undisturbed run.", "blind_same_bits", "==", 0),
            claim(
                "A bitwise comparison of replicas stops the run before its end.",
                "steps_before_the_comparison_stops",
                "<",
                "steps",
            ),
        ),
        relations=(
            Relation("without a comparison nobody notices", "blind_run_completes", "==", 1),
            Relation("the loss agrees to six digits", "blind_loss_gap", "<=", 1e-6),
            Relation("the bits do not", "blind_same_bits", "==", 0),
            Relation("a comparison stops the run", "compared_run_stops", "==", 1),
        ),
        refuted=(Relation("the loss would show it", "blind_loss_gap", ">", 0.04),),
        sources=(LLAMA3_PAPER, DDP_NOTES, own_run("most-dangerous-silent-failure")),
        items=(104,),
        chapter=FAILURE_PLANE,
    ),
    Card(
        id="what-breaks-at-ten-times-the-scale",
        kind="judgement",
        question="Which assumption breaks first at ten times the scale?",
        answer=(
            "Usually the batch. Data parallelism needs at least one sample per rank and step: 512 samples do not "
            "divide over 640 ranks. Either the batch grows, and optimization changes, or another axis takes the "
            "ranks. Memory becomes easier, since the sharded state shrinks; activations per rank do not. Then come "
            "failures: ten times the devices fail ten times as often, so checkpoints and restarts must be cheaper."
        ),
        notes=(
            "Plan of an 8 B model with FSDP: state per rank falls to a tenth, exposed communication grows a little. "
            "Mean time between failures falls as 1/N; the best checkpoint interval falls as its square root. Latency "
            "terms of collectives grow with the number of ranks."
        ),
        mistake="'The network' is named without a figure.",
        experiment=TEN_TIMES,
        claims=(
            claim("On ten times the ranks, the same global batch still divides.", "same_batch_is_refused", "==", 0),
            claim("The sharded state per rank falls to a tenth.", "state_then", "<", "state_now", 0.89),
            claim("Activations per rank fall as well.", "activations_ratio", "<", 1),
            claim(
                "With ten times the batch, exposed communication exceeds 10 % of the step.", "exposed_then", ">", 0.1
            ),
            claim("With ten times the batch, a step takes at most 5 % longer.", "step_ratio_weak", "<=", 1.05),
        ),
        relations=(
            Relation("the same batch does not divide", "same_batch_is_refused", "==", 1),
            Relation("there is less than one sample per rank", "samples_per_rank_then", "<", 1),
            Relation("state shrinks", "state_then", "<", "state_now", 0.89),
            Relation("activations stay", "activations_ratio", "==", 1, 1e-6),
            Relation("exposed communication grows", "exposed_then", ">", "exposed_now"),
            Relation("but not to a tenth of the step", "exposed_then", "<=", 0.1),
        ),
        refuted=(Relation("memory per rank is what breaks", "state_then", ">=", "state_now"),),
        sources=(LARGE_BATCH_PAPER, LLAMA3_PAPER, own_run("what-breaks-at-ten-times-the-scale")),
        items=(104,),
        chapter=JUDGEMENT,
    ),
    Card(
        id="what-was-left-abstract",
        kind="judgement",
        question="What did you leave abstract on purpose, and what may never be left out?",
        answer=(
            "What does not change the numbers may stay abstract: the launcher, the number of ranks, the size of "
            "micro-batches, the store behind a path, the exporter of metrics. They are placement. What changes the "
            "numbers is part of the contract and has to be explicit: seed, data, global batch, optimizer, precision. "
            "A good simplification keeps the contract visible; a weak one, such as no sampler or only weights, removes "
            "it."
        ),
        notes=(
            "Meshwright marks every setting as identity or placement. A resume with another placement continues, with "
            "float64 losses that agree to 1e-10; a resume with another identity is refused with both values, unless "
            "the user forks the run."
        ),
        mistake="The sampler is left out as a detail, and the launcher is written in full.",
        experiment=IDENTITY,
        claims=(
            claim("A killed run resumes on another number of ranks.", "accepted_ranks", "==", 1),
            claim("It resumes with another micro-batch.", "accepted_micro_batch", "==", 1),
            claim("It resumes with another seed.", "accepted_seed", "==", 1),
            claim("It resumes with another global batch.", "accepted_global_batch", "==", 1),
            claim(
                "Where it resumes, its losses are those of the undisturbed run to 1e-10.",
                "loss_difference_accepted",
                "<=",
                1e-10,
            ),
        ),
        relations=(
            Relation("ranks are placement", "accepted_ranks", "==", 1),
            Relation("so is the micro-batch", "accepted_micro_batch", "==", 1),
            Relation("the seed is identity", "accepted_seed", "==", 0),
            Relation("so is the global batch", "accepted_global_batch", "==", 0),
            Relation("and the optimizer", "accepted_optimizer", "==", 0),
            Relation("placement does not change losses", "loss_difference_accepted", "<=", 1e-10),
        ),
        refuted=(Relation("a seed may change on resume", "accepted_seed", "==", 1),),
        sources=(ELASTIC_DOCS, RANDOMNESS_NOTES, own_run("what-was-left-abstract")),
        items=(104, 98, 99),
        chapter=JUDGEMENT,
    ),
)
