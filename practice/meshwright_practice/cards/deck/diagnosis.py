"""Cards on diagnosis: what limits a run, what breaks it, and which signal shows it."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.references import (
    DDP_NOTES,
    DISTRIBUTED_DOCS,
    ELASTIC_DOCS,
    LLAMA3_PAPER,
    NVML_DOCS,
    PROFILER_DOCS,
    own_run,
)

COLLECTIVES = "handbook/collectives.md"
FAILURE_PLANE = "handbook/failure-plane.md"
PLAYBOOK = "handbook/playbook.md"
SLOW_RUNS = Experiment("verdicts:slow_runs")
FAILURES = Experiment("verdicts:failures", ranks=2)
BUSY = Experiment(
    "verdicts:busy_device",
    knobs=(
        Knob("compute_us", (600, 900), "microseconds of matrix products per step"),
        Knob("all_reduce_us", (400, 100), "microseconds of the all-reduce kernel per step"),
        Knob("overlapped_us", (250, 50), "microseconds of it beside matrix products, in the second trace"),
    ),
)
NETWORK = Experiment(
    "plans:slow_network",
    knobs=(
        Knob("model", ("gpt2-124m", "llama-1b"), "preset"),
        Knob("gigabits", (100.0, 40.0, 400.0), "Gbit/s per node of the slow network"),
    ),
)
SIGNALS = Experiment("recovery:signals", knobs=(Knob("nan_every", (2, 4), "every so many steps is not finite"),))

CARDS = (
    Card(
        id="communication-bound-training",
        kind="diagnosis",
        question="How do you recognize a run that is bound by communication, and what do you change first?",
        answer=(
            "By exposed communication: the part of collectives that no computation covers, as a share of the step. "
            "Other signs: the run scales inside a node and not across nodes, and the share grows with ranks or falls "
            "with more samples per step. First check placement and links, then overlap and bucket sizes, then do more "
            "work per byte: larger micro-batches or accumulation with no_sync. Last, another layout."
        ),
        notes=(
            "Exposed seconds = time in which a rank waits for collectives, from host waits or from a profiler trace. "
            "Predicted DDP traffic does not depend on the batch, so four times the samples per step quarter the share "
            "of a fully exposed reduction. FSDP moves at least as many bytes as DDP: it is no remedy for a slow "
            "network. Hybrid sharding keeps gathers inside a node."
        ),
        mistake="The model is blamed before the timeline and the placement of ranks have been looked at.",
        experiment=NETWORK,
        claims=(
            claim("On one node, this model exposes more than 10 % of its step.", "exposed_one_node", ">", 0.1),
            claim(
                "On 4 nodes with 100 Gbit/s per node, more than half of the step is exposed.", "exposed_slow", ">", 0.5
            ),
            claim(
                "Four times the samples per step lower the exposed share.", "exposed_more_samples", "<", "exposed_slow"
            ),
            claim("Four times the samples per step make DDP send more bytes.", "wire_more_samples", ">", "wire_slow"),
            claim("FSDP lowers the exposed share by at least a tenth.", "exposed_fsdp", "<", "exposed_slow", 0.1),
        ),
        relations=(
            Relation("one node exposes nearly nothing", "exposed_one_node", "<=", 0.05),
            Relation("a slow network exposes most of the step", "exposed_slow", ">", 0.5),
            Relation("a fast one leaves little more than the last bucket exposed", "exposed_fast", "<=", 0.1),
            Relation("more samples per step help", "exposed_more_samples", "<", "exposed_slow", 0.1),
            Relation("at the same bytes per step", "wire_more_samples", "==", "wire_slow"),
            Relation("FSDP does not help", "exposed_fsdp", ">=", "exposed_slow", 0.1),
        ),
        refuted=(Relation("sharding parameters relieves the network", "exposed_fsdp", "<", "exposed_slow", 0.1),),
        sources=(PROFILER_DOCS, DDP_NOTES, own_run("communication-bound-training")),
        items=(55, 56, 57),
        chapter=COLLECTIVES,
    ),
    Card(
        id="trap-utilization-shows-communication",
        kind="diagnosis",
        question=(
            "'If a run were bound by communication, GPU utilization would be low during collectives.' A trace has 600 "
            "us of matrix products and 400 us in which only the all-reduce runs. What is right?"
        ),
        answer=(
            "Utilization would read 100 %. The counter asks whether any kernel is running, and a collective is a "
            "kernel that waits on the device. Look at exposed communication in a trace, here 40 %, or at the activity "
            "of the multiprocessors and tensor cores. High utilization says that the device is occupied, not that it "
            "computes."
        ),
        notes=(
            "NVML: percent of time over the sample period during which one or more kernels was executing. Breakdown of "
            "a step: compute + exposed communication + copies + idle. If 250 of the 400 us run beside matrix products, "
            "150 us are exposed. meshwright diagnose reads any Kineto trace and names the collective that is exposed; "
            "the two traces of this run are synthetic."
        ),
        mistake="A dashboard at 100 % is taken as the proof that nothing can be gained.",
        experiment=BUSY,
        predictions=(
            Prediction("utilization", "What does the utilization counter show, as a share of the time?", "share"),
            Prediction("exposed_share", "Which share of the time is exposed communication?", "share"),
        ),
        relations=(
            Relation("the counter shows a busy device", "utilization", ">=", 0.99),
            Relation("it computes for 60 % of the time", "compute_share", "==", 0.6, 1e-6),
            Relation("the rest is exposed", "exposed_share", "==", 0.4, 1e-6),
            Relation(
                "with 250 us beside matrix products, 150 us are exposed", "exposed_us_overlapped", "==", 150, 1e-6
            ),
            Relation("although the all-reduce is as long", "all_reduce_us_overlapped", "==", "all_reduce_us", 1e-6),
            Relation("diagnose names communication", "named_communication", "==", 1),
        ),
        refuted=(Relation("utilization is low", "utilization", "<", 0.9),),
        sources=(NVML_DOCS, PROFILER_DOCS, own_run("trap-utilization-shows-communication")),
        items=(55,),
        chapter=COLLECTIVES,
    ),
    Card(
        id="failures-of-multi-node-training",
        kind="diagnosis",
        question="Which failures are common in training on many ranks, and how do you tell them apart?",
        answer=(
            "Ranks that are launched with other settings, networks and firewalls, collectives that time out, one rank "
            "out of memory, slow storage, an uneven loader, damaged checkpoints. One failed rank stops all. Find the "
            "rank that failed first, then ask what repeats: the same step with the same samples points to program or "
            "data, changing steps to the infrastructure."
        ),
        notes=(
            "Replay decides: the same rank and data, another rank and the same data, the same rank and other data. The "
            "supervisor writes which rank failed first, its step, phase and samples, and restarts from the newest "
            "verified checkpoint; a failure that repeats at one place ends the restarts. Damaged shards are found by "
            "digests before they are loaded."
        ),
        mistake="Only the log of rank 0 is read. It shows a lost peer; the cause is elsewhere.",
        experiment=FAILURES,
        claims=(
            claim("The log of rank 0 names the out-of-memory error of rank 1.", "rank_0_log_names_memory", "==", 1),
            claim("After the failure of rank 1, rank 0 completes further steps.", "ranks_that_stop", "<", 2),
            claim("The diagnosis names rank 1.", "memory_rank", "==", 1),
            claim(
                "An error that repeats at one step is called a failure of the infrastructure.",
                "repeated_is_infrastructure",
                "==",
                1,
            ),
            claim(
                "A checkpoint with one flipped byte is skipped, and an older one is restored.",
                "corrupt_restored_step",
                "<",
                "corrupt_newest_step",
            ),
        ),
        relations=(
            Relation("the failing rank is named", "memory_rank", "==", 1),
            Relation("with its step", "memory_step", "==", 3),
            Relation("its own log has the cause", "rank_1_log_names_memory", "==", 1),
            Relation("both ranks stop", "ranks_that_stop", "==", 2),
            Relation("a SIGKILL is infrastructure", "killed_is_infrastructure", "==", 1),
            Relation("of the rank that was killed", "killed_rank", "==", 1),
            Relation("an error that repeats is not", "repeated_is_infrastructure", "==", 0),
            Relation("the damaged checkpoint is reported", "corrupt_reported", "==", 1),
            Relation("and not loaded", "corrupt_restored_step", "<", "corrupt_newest_step"),
        ),
        refuted=(Relation("the log of rank 0 tells the cause", "rank_0_log_names_memory", "==", 1),),
        sources=(ELASTIC_DOCS, DISTRIBUTED_DOCS, LLAMA3_PAPER, own_run("failures-of-multi-node-training")),
        items=(60, 61, 62, 63),
        chapter=FAILURE_PLANE,
    ),
    Card(
        id="why-more-devices-do-not-help",
        kind="diagnosis",
        question="More devices do not make the run faster. Which causes do you check?",
        answer=(
            "Communication that is exposed, pipeline bubbles, devices with too little work per kernel, and input that "
            "arrives too late. Then the ones that are often forgotten: one slow rank that all wait for, memory that is "
            "swapped or reallocated, and steps that wait for checkpoints. Each has its own signature in the phases of "
            "a step, so measure before you change a setting."
        ),
        notes=(
            "Signatures: sync long on all ranks (communication) or on all but one (straggler); fetch long (data); "
            "waits that the schedule predicts (bubble); forward and backward longer than their FLOPs need (device); "
            "page faults (memory); time between steps (checkpoint). diagnose orders causes by the share of the step "
            "that a change would win back."
        ),
        mistake="The list ends with the network, because distributed training is thought to be about the network.",
        experiment=SLOW_RUNS,
        claims=(
            claim("diagnose tells a slow rank from slow communication.", "named_straggler", "==", 1),
            claim("diagnose calls a pipeline with 2 micro-batches on 2 stages healthy.", "named_bubble", "==", 0),
            claim("diagnose names the loader if all ranks wait in fetch.", "named_data", "==", 1),
            claim("A run that nothing limits gets a cause nevertheless.", "named_healthy", "==", 0),
        ),
        relations=(
            Relation("communication is named", "named_communication", "==", 1),
            Relation("the bubble is named", "named_bubble", "==", 1),
            Relation("the loader is named", "named_data", "==", 1),
            Relation("small kernels are named", "named_device", "==", 1),
            Relation("a healthy run is called healthy", "named_healthy", "==", 1),
        ),
        refuted=(Relation("a run with small kernels looks healthy", "named_device", "==", 0),),
        sources=(PROFILER_DOCS, own_run("why-more-devices-do-not-help")),
        items=(148,),
        chapter=PLAYBOOK,
    ),
    Card(
        id="trap-four-bottlenecks",
        kind="diagnosis",
        question=(
            "'Communication, bubbles, under-used devices and input are the bottlenecks of scaling: four classes, no "
            "more.' What is missing?"
        ),
        answer=(
            "Stragglers and imbalance: one rank is slower and all others wait, which looks like communication. Memory "
            "that is swapped or reallocated during steps. Steps that wait for a checkpoint. And host overhead, if the "
            "launching of kernels is what takes time. They have other remedies than the four, so a diagnosis that "
            "cannot name them changes the wrong thing."
        ),
        notes=(
            "A straggler of 50 ms in forward on one of two ranks shows as sync on the other. If sync is long on every "
            "rank, it is communication; if it is long on all but one, look at that one. The run diagnoses synthetic "
            "records with known times, one class each, and counts the different causes that diagnose returns."
        ),
        mistake="The waits for a slow rank are booked as communication, and buckets are tuned.",
        experiment=SLOW_RUNS,
        predictions=(
            Prediction(
                "causes_named", "Besides 'healthy', how many causes does diagnose tell apart here?", "causes", 0.01
            ),
        ),
        relations=(
            Relation("more than four are told apart", "causes_named", ">", "causes_of_the_four"),
            Relation("three are outside the four", "named_outside_the_four", "==", 3),
            Relation("a straggler is named with its rank", "straggler_rank", "==", 1),
            Relation("so is swapping", "named_memory", "==", 1),
            Relation("and waiting for checkpoints", "named_checkpoint", "==", 1),
        ),
        refuted=(Relation("four classes are enough", "causes_named", "<=", "causes_of_the_four"),),
        sources=(PROFILER_DOCS, own_run("trap-four-bottlenecks")),
        items=(148,),
        chapter=PLAYBOOK,
    ),
    Card(
        id="trap-steps-per-second-is-health",
        kind="diagnosis",
        question=(
            "'Steps per second is the one metric: as long as steps complete, the job is healthy.' What can it miss?"
        ),
        answer=(
            "Steps that change nothing, and steps that were done before. A job that skips every second update because "
            "of NaN, or that restarts again and again from an old checkpoint, completes its steps at full speed. Count "
            "samples that are part of the final state, once each, per second of wall time: goodput. And add a "
            "validity gate: finite loss, applied update, replicas equal."
        ),
        notes=(
            "Goodput here: samples of steps that the run keeps and whose update was applied, divided by samples "
            "processed. 8 steps of 4 samples: with a NaN in every second step 16 of 32 are useful; with two kills "
            "before the first checkpoint, 32 of 56. The states of meshwright watch are replaying and skipping."
        ),
        mistake="Throughput is plotted from the loop's own counter, which a restart resets.",
        experiment=SIGNALS,
        predictions=(
            Prediction(
                "skipping_useful_samples",
                "8 steps of 4 samples, every second one not finite: useful samples?",
                "samples",
            ),
            Prediction(
                "replaying_steps",
                "Killed before step 3, twice, without a checkpoint, then 8 steps: steps completed?",
                "steps",
            ),
        ),
        relations=(
            Relation(
                "the skipping run completes as many steps as the healthy one", "skipping_steps", "==", "healthy_steps"
            ),
            Relation("with half of the goodput", "skipping_goodput", "==", 0.5),
            Relation("the replaying run completes more steps", "replaying_steps", ">", "healthy_steps"),
            Relation("with less goodput", "replaying_goodput", "<", "healthy_goodput"),
            Relation("a healthy run uses every sample", "healthy_goodput", "==", 1),
        ),
        refuted=(
            Relation("equal steps are equal progress", "skipping_useful_samples", "==", "healthy_useful_samples"),
        ),
        sources=(LLAMA3_PAPER, own_run("trap-steps-per-second-is-health")),
        items=(109,),
        chapter=FAILURE_PLANE,
    ),
)
