"""Cards on sample order, checkpoints and restarts."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.references import DATA_DOCS, DCP_DOCS, ELASTIC_DOCS, LLAMA3_PAPER, RANDOMNESS_NOTES, own_run

CHAPTER = "handbook/data-and-resume.md"
FAILURE_PLANE = "handbook/failure-plane.md"
PADDING = Experiment(
    "streams:padding",
    knobs=(Knob("samples", (1001, 1000, 1007), "samples of the dataset"), Knob("ranks", (8, 4), "data-parallel ranks")),
)
DROP_ONE = Experiment("recovery:drop_one")
WEIGHTS_ONLY = Experiment("recovery:weights_only", knobs=(Knob("stop", (4, 6), "steps before the kill"),))
KILLED_SAVE = Experiment(
    "recovery:killed_save",
    ranks=2,
    knobs=(
        Knob(
            "point",
            ("save.after_shard", "save.begin", "save.after_part", "step.update"),
            "the fail point at which rank 1 is killed",
        ),
        Knob("at", (4,), "the step of the kill"),
    ),
)

CARDS = (
    Card(
        id="recoverable-checkpoint",
        kind="recovery",
        question="What does a sharded checkpoint need so that a run recovers from it?",
        answer=(
            "Parameters and optimizer state, keyed by what they are and not by rank, so that they load on another "
            "layout. And enough small state to continue and to refuse: the position in the sample stream, seeds, the "
            "schedule, the loss scale, counters, and the identity of the run. It must be whole or not exist: a "
            "manifest with digests, published last. With online data, the cursor of what has been consumed belongs to "
            "it."
        ),
        notes=(
            "Each rank writes its shard; the manifest, which names every shard with its digest, is published by one "
            "atomic operation. A kill before that leaves the previous checkpoint as the newest. DCP reshards at load; "
            "Meshwright adds digests, identity and the stream position. In reinforcement learning the cursor holds the "
            "consumed groups and the versions of the policy, and stale or repeated rollouts are rejected."
        ),
        mistake="Only parameters are saved, and the resumed run looks healthy with fresh moments and old samples.",
        experiment=KILLED_SAVE,
        predictions=(
            Prediction(
                "restored_step",
                "Checkpoints after steps 2, 4 and 6; a rank is killed while that of step 4 is written. Restored step?",
                "step",
            ),
            Prediction("steps_recorded", "6 steps in total: how many steps do both attempts complete?", "steps"),
        ),
        relations=(
            Relation("the unfinished checkpoint is not used", "restored_step", "<", "killed_at"),
            Relation("the run ends with the bits of an undisturbed one", "same_bits", "==", 1),
            Relation("steps were run again", "steps_recorded", ">", "steps"),
            Relation("every sample counts once", "unique_samples", "<", "samples_processed"),
            Relation("the incident names the killed rank", "killed_rank", "==", 1),
        ),
        refuted=(
            Relation("the checkpoint that was being written is used", "restored_step", "==", "killed_at"),
            Relation("a kill changes the result", "same_bits", "==", 0),
        ),
        sources=(DCP_DOCS, own_run("recoverable-checkpoint")),
        items=(69, 71, 72),
        chapter=CHAPTER,
    ),
    Card(
        id="weights-are-no-checkpoint",
        kind="recovery",
        question="A run continues from its weights alone. What is lost, and where does it show?",
        answer=(
            "The moments of the optimizer are zero again, so the first updates have another direction and size. The "
            "step counter and the learning rate start anew. And the sample stream starts at its begin: the samples of "
            "the first part are trained a second time, the later ones never. The loss differs from the first step on, "
            "yet nothing fails: that is why the resume has to be checked, not watched."
        ),
        notes=(
            "The run exports the weights of a killed run and starts from them; beside it the same run resumes from its "
            "full checkpoint, bit for bit. AdamW's bias correction hides the missing moments a little: its first "
            "updates have about the size of the learning rate. Use weights alone for a new run, fine-tuning for "
            "example, never for a restart."
        ),
        mistake="'The loss came down again' is taken as proof that nothing was lost.",
        experiment=WEIGHTS_ONLY,
        predictions=(
            Prediction(
                "replayed_samples", "4 steps of 4 samples before the kill: how many samples are read again?", "samples"
            ),
        ),
        relations=(
            Relation("a full checkpoint continues without any difference", "difference_full", "==", 0),
            Relation("bit for bit", "same_bits_full", "==", 1),
            Relation("weights alone give other losses", "difference_weights_only", ">", 0.01),
            Relation("every sample before the kill is read again", "replayed_samples", "==", "samples_before_the_kill"),
        ),
        refuted=(Relation("weights alone continue the run", "difference_weights_only", "<=", 1e-6),),
        sources=(DCP_DOCS, own_run("weights-are-no-checkpoint")),
        items=(72, 99),
        chapter=CHAPTER,
    ),
    Card(
        id="trap-distributed-sampler-partitions",
        kind="data",
        question=(
            "'DistributedSampler gives every rank its own part, so an epoch reads each sample once, and set_epoch "
            "makes "
            "it resumable.' What is right?"
        ),
        answer=(
            "If the dataset does not divide by the number of ranks, it pads: some samples are read twice. With "
            "drop_last it leaves some out instead. And it has no cursor: after a restart in the middle of an epoch it "
            "begins the epoch again. An order that survives restarts and other rank counts has to be a function of "
            "seed and global position, from which each rank takes its part."
        ),
        notes=(
            "n samples on W ranks: padding repeats W ceil(n/W) - n of them, drop_last omits n - W floor(n/W). "
            "StatefulDataLoader saves the state of workers of one rank, not an order across ranks. Meshwright's stream "
            "runs through shuffled epochs without padding: a batch that crosses the end of an epoch continues in the "
            "next one."
        ),
        mistake="The sampler is tested with a dataset whose length divides by the ranks.",
        experiment=PADDING,
        predictions=(
            Prediction(
                "repeated_padded", "1,001 samples on 8 ranks, drop_last=False: repeated samples per epoch?", "samples"
            ),
            Prediction("missing_dropped", "And with drop_last=True: samples that are left out?", "samples"),
        ),
        relations=(
            Relation("the sampler reads more than the dataset has", "reads_padded", ">", "samples"),
            Relation("with drop_last samples are missing", "missing_dropped", ">", 0),
            Relation("the stream repeats none", "repeated_stream", "==", 0),
            Relation("and leaves none out", "missing_stream", "==", 0),
            Relation("ranks do not overlap", "overlap_of_ranks", "==", 0),
            Relation("the second epoch has another order", "same_order_in_second_epoch", "==", 0),
            Relation("of the same samples", "same_samples_in_second_epoch", "==", 1),
        ),
        refuted=(Relation("an epoch of the sampler reads each sample once", "repeated_padded", "==", 0),),
        sources=(DATA_DOCS, own_run("trap-distributed-sampler-partitions")),
        items=(107,),
        chapter=CHAPTER,
    ),
    Card(
        id="trap-short-list-of-restart-state",
        kind="recovery",
        question=(
            "'Model, optimizer, scheduler and step number are the state of a restart.' A checkpoint has lost one "
            "field. "
            "Which fields must a resume refuse to do without?"
        ),
        answer=(
            "More than those four. Besides tensors and moments: the position in the stream, the random seeds of every "
            "data-parallel rank, the schedule, the loss scale, the position inside an accumulation if saves happen "
            "there, averages of weights if there are any, and what identifies the run: data and tokenizer version, "
            "config, code. A resume that cannot compare them has to refuse. Placement, such as the number of ranks, "
            "may differ."
        ),
        notes=(
            "The run removes one field after the other from the manifest of a killed run and resumes. Meshwright saves "
            "between steps, so no accumulation is open, and derives the seed of every step from (seed, step, data "
            "coordinate), so one number per coordinate is the whole random state, CUDA and loader workers included."
        ),
        mistake="A missing field gets a default. The run then continues, silently, as another one.",
        experiment=DROP_ONE,
        claims=(
            claim("A checkpoint without the stream position is refused.", "refused_without_data", "==", 1),
            claim("A checkpoint with other random seeds is accepted.", "refused_without_rng", "==", 0),
            claim("A checkpoint without optimizer moments is refused.", "refused_without_optimizer", "==", 1),
            claim(
                "A checkpoint without the learning rate of its step is accepted.", "refused_without_schedule", "==", 0
            ),
            claim("The intact checkpoint continues bit for bit.", "intact_same_bits", "==", 1),
        ),
        relations=(
            Relation("every field is missed", "refused", "==", "fields"),
            Relation("the intact checkpoint is accepted", "intact_loss_difference", "==", 0),
            Relation("and ends with the same bits", "intact_same_bits", "==", 1),
        ),
        refuted=(
            Relation("a resume does without the stream position", "refused_without_data", "==", 0),
            Relation("a resume does without the seeds", "refused_without_rng", "==", 0),
        ),
        sources=(DCP_DOCS, RANDOMNESS_NOTES, own_run("trap-short-list-of-restart-state")),
        items=(108,),
        chapter=CHAPTER,
    ),
    Card(
        id="cost-of-a-kill",
        kind="recovery",
        question="A rank is killed during a save. What does the job lose, and what bounds the loss?",
        answer=(
            "It loses the steps since the newest complete checkpoint, the time to notice the failure, and the time to "
            "start and to restore. The result does not change if the state is complete. The interval between "
            "checkpoints bounds the lost work, the watchdog bounds the time to notice. Goodput counts it: samples "
            "that are part of the final state, once, per second of wall time."
        ),
        notes=(
            "Young's rule for the interval: sqrt(2 x cost of a save x mean time between failures). RPO: steps at risk; "
            "RTO: seconds to the first new step. The supervisor restarts the whole job; the attempt number fences off "
            "a rank of the old attempt that is still alive. Large runs see several interruptions per day."
        ),
        mistake="Only uptime is reported. Steps that are run twice look like progress.",
        experiment=KILLED_SAVE,
        predictions=(
            Prediction(
                "steps_run_again", "Saves every 2 steps, killed while step 4 is saved: steps that run twice?", "steps"
            ),
        ),
        relations=(
            Relation("two steps are run again", "steps_run_again", "==", 2),
            Relation("goodput counts fewer samples than were processed", "unique_samples", "<", "samples_processed"),
            Relation("two attempts are on record", "attempts", "==", 2),
            Relation("the result has the same bits", "same_bits", "==", 1),
        ),
        refuted=(Relation("all processed samples count", "unique_samples", "==", "samples_processed"),),
        sources=(ELASTIC_DOCS, LLAMA3_PAPER, own_run("cost-of-a-kill")),
        items=(61, 69),
        chapter=FAILURE_PLANE,
    ),
)
