"""Cards on batches: accumulation, the global batch, and the passes of a step."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.references import (
    AUTOGRAD_NOTES,
    DDP_DOCS,
    DDP_NOTES,
    FSDP2_DOCS,
    LINEAR_RATE_PAPER,
    RANDOMNESS_NOTES,
    own_run,
)

DATA_PARALLEL, NUMERICS, JUDGEMENT = (
    "handbook/data-parallelism.md",
    "handbook/numerics.md",
    "handbook/judgement.md",
)
ACCUMULATION = Experiment(
    "batches:accumulation",
    ranks=2,
    knobs=(
        Knob("short_tokens", (1, 2, 3), "valid tokens of the short micro-batch; the long one has 4"),
        Knob("micro_batches", (4, 2, 8), "micro-batches per step, for the count of all-reduces"),
    ),
)
STEP = Experiment(
    "batches:one_step", ranks=2, knobs=(Knob("accumulation", (4, 1, 2), "micro-batches per step and rank"),)
)
ALGEBRA = Experiment(
    "batches:algebra",
    ranks=4,
    knobs=(
        Knob("axis", ("tensor", "pipeline", "none"), "what two of the four ranks share"),
        Knob("micro", (2, 1), "samples per micro-batch"),
        Knob("accumulation", (2, 4), "micro-batches per step"),
    ),
)

CARDS = (
    Card(
        id="gradient-accumulation",
        kind="numerics",
        question="Why does gradient accumulation need so little code, and what does it need nevertheless?",
        answer=(
            "backward adds to param.grad, so several micro-batches followed by one optimizer step accumulate by "
            "themselves. What one has to write: the scale of each loss, so that the sum becomes the mean over all "
            "tokens of the step; no_sync, so that DDP reduces once and not per micro-batch; clipping and the update "
            "only after the last one; and zero_grad after the update."
        ),
        notes=(
            "Token mean: sum of token losses / number of valid tokens N of the whole step, over micro-batches and "
            "ranks. Dividing each micro-batch by its own count and by their number k is equal only if all counts are. "
            "Without no_sync, DDP all-reduces k times. Meshwright divides by N once, in trainer/step.py, and sums "
            "gradients over ranks."
        ),
        mistake="The loss is left unscaled. Then the gradient is the sum of means, k times too large.",
        experiment=ACCUMULATION,
        predictions=(
            Prediction(
                "all_reduces_without_no_sync",
                "4 micro-batches, DDP, one bucket, no no_sync: all-reduces per step?",
                "calls",
            ),
            Prediction("all_reduces_with_no_sync", "And with no_sync on all but the last?", "calls"),
        ),
        relations=(
            Relation(
                "without no_sync every micro-batch is reduced", "all_reduces_without_no_sync", "==", "micro_batches"
            ),
            Relation("with it one reduction remains", "all_reduces_with_no_sync", "==", 1),
            Relation("the bytes follow", "bytes_without_no_sync", ">", "bytes_with_no_sync"),
            Relation("unscaled means add up to more than the mean", "sum_of_means", ">", "token_mean"),
            Relation("the trainer accumulates the token mean", "trainer_accumulated", "==", "token_mean", 1e-12),
        ),
        refuted=(Relation("the accumulated sum of means is the gradient", "sum_of_means", "==", "token_mean", 1e-12),),
        sources=(AUTOGRAD_NOTES, DDP_DOCS, own_run("gradient-accumulation")),
        items=(135,),
        chapter=DATA_PARALLEL,
    ),
    Card(
        id="trap-mean-of-means",
        kind="numerics",
        question=(
            "'Divide each micro-batch's mean loss by the number of micro-batches, and accumulation equals the large "
            "batch.' One micro-batch has 1 valid token with loss 1, the other 4 with loss 4 each. What is right?"
        ),
        answer=(
            "The large batch has 5 tokens and the mean 17/5 = 3.4. The mean of the two means is 2.5: the single token "
            "counts as much as the other four together. Means add up only if all micro-batches have equally many valid "
            "tokens. The remedy is to sum token losses and to divide once by the count of the whole step, which has to "
            "be known before the first backward pass."
        ),
        notes=(
            "x_i: sum of token losses, n_i: valid tokens of micro-batch i. Right: sum x_i / sum n_i. Common: (1/k) sum "
            "x_i/n_i. Several widely used trainers had this error until 2024, where padding and masked prompts make "
            "counts unequal. Meshwright sums the counts over ranks and micro-batches in the step control vector, "
            "before the first backward pass."
        ),
        mistake="The test uses equal lengths, for which both formulas agree.",
        experiment=ACCUMULATION,
        predictions=(
            Prediction("trainer_accumulated", "What does the trainer accumulate here (loss per token)?", "loss"),
            Prediction("mean_of_means", "What does the mean of means give?", "loss"),
        ),
        relations=(
            Relation("the trainer gives the token mean", "trainer_accumulated", "==", "token_mean", 1e-12),
            Relation("the mean of means is another number", "mean_of_means", "!=", "token_mean", 1e-3),
        ),
        refuted=(Relation("the mean of means is the token mean", "mean_of_means", "==", "token_mean", 1e-3),),
        sources=(AUTOGRAD_NOTES, own_run("trap-mean-of-means")),
        items=(135,),
        chapter=NUMERICS,
    ),
    Card(
        id="trap-ddp-is-the-large-batch",
        kind="numerics",
        question="'DDP on N ranks computes exactly the gradient of the N times larger batch.' When is that wrong?",
        answer=(
            "When ranks have unequal numbers of valid tokens and each returns its own mean: DDP averages the ranks' "
            "gradients with equal weight. Also with BatchNorm, whose statistics are local, with dropout, whose masks "
            "depend on the rank's random numbers, and always in the last bits, since sums are in another order. With "
            "equal counts, or with losses that are divided by the global count, the mathematics agrees."
        ),
        notes=(
            "DDP's gradient: (1/N) sum_r g_r, with g_r the gradient of rank r's mean. It equals the token mean only if "
            "all n_r are equal. Meshwright lets the loss be a sum, divides by the global token count and sums over "
            "ranks. SyncBatchNorm exists for the statistics. Floating-point addition is not associative: compare in "
            "float64, with a tolerance of about 1e-10."
        ),
        mistake="Equivalence is asserted from the average alone, without asking what is averaged.",
        experiment=ACCUMULATION,
        predictions=(
            Prediction(
                "ddp", "Rank 0: 1 token with loss 1. Rank 1: 4 with loss 4. DDP's gradient of mean losses?", "loss"
            ),
        ),
        relations=(
            Relation("DDP gives the mean of means", "ddp", "==", "mean_of_means", 1e-12),
            Relation("with equal counts DDP is right", "ddp_equal_tokens", "==", "long_alone", 1e-12),
            Relation("the trainer gives the token mean on two ranks", "trainer_two_ranks", "==", "token_mean", 1e-12),
        ),
        refuted=(Relation("DDP gives the gradient of the large batch", "ddp", "==", "token_mean", 1e-3),),
        sources=(DDP_NOTES, RANDOMNESS_NOTES, own_run("trap-ddp-is-the-large-batch")),
        items=(19,),
        chapter=NUMERICS,
    ),
    Card(
        id="global-batch-in-ddp",
        kind="numerics",
        question="Why does the global batch matter when the number of data-parallel ranks changes?",
        answer=(
            "The global batch is micro-batch times data-parallel degree times accumulation. The optimizer sees it, not "
            "the number of devices. Twice the ranks with the same local batch double it: fewer and larger steps per "
            "epoch, another noise, and usually another learning rate and warm-up. To run the same training faster, "
            "keep the global batch and halve the accumulation. Judge by loss over samples as well as by samples per "
            "second."
        ),
        notes=(
            "Meshwright treats batch.global as part of the run's identity and derives the accumulation: on twice the "
            "ranks it is halved, and a batch that does not divide is refused with the nearest ones that do. Common "
            "rules for a changed batch: learning rate times k for SGD (Goyal et al.), times the square root of k for "
            "Adam; both end at the critical batch."
        ),
        mistake="More devices are expected to give the same run in less time. A fixed local batch makes another run.",
        experiment=ALGEBRA,
        predictions=(
            Prediction(
                "samples_per_step",
                "4 ranks as tensor 2 x data 2, micro-batch 2, accumulation 2: samples per step?",
                "samples",
            ),
            Prediction(
                "accumulation_on_twice_the_ranks",
                "Twice the data-parallel ranks, same global batch: accumulation?",
                "count",
            ),
        ),
        relations=(
            Relation(
                "the batch is micro x data x accumulation", "samples_per_step", "==", "micro_x_data_x_accumulation"
            ),
            Relation("twice the ranks need less accumulation", "accumulation_on_twice_the_ranks", "<", "accumulation"),
        ),
        refuted=(
            Relation("accumulation stays on twice the ranks", "accumulation_on_twice_the_ranks", "==", "accumulation"),
        ),
        sources=(DDP_DOCS, LINEAR_RATE_PAPER, own_run("global-batch-in-ddp")),
        items=(58, 59),
        chapter=DATA_PARALLEL,
    ),
    Card(
        id="smallest-effective-batch",
        kind="numerics",
        question="Can gradient accumulation make the effective batch smaller, and what is the smallest one?",
        answer=(
            "No. Accumulation multiplies: the smallest factor is one. The smallest global batch is one sample per "
            "data-parallel rank, so it equals the data-parallel degree. With tensor, context or pipeline parallelism "
            "that is less than the number of devices, because ranks of such a group work on the same samples."
        ),
        notes=(
            "global = micro x data-parallel degree x accumulation, each at least 1. Data-parallel degree = ranks / "
            "(tensor x context x pipeline). The run tries global batches from 1 upwards and takes the first that the "
            "config accepts. Smaller still is possible only by leaving data-parallel ranks out."
        ),
        mistake="The number of GPUs is named as the minimum.",
        experiment=ALGEBRA,
        predictions=(
            Prediction(
                "smallest_global_batch", "4 ranks, of which 2 share each sample: smallest global batch?", "samples"
            ),
        ),
        relations=(
            Relation("the minimum is the data-parallel degree", "smallest_global_batch", "==", "data_degree"),
            Relation("which is less than the number of ranks", "data_degree", "<", "ranks"),
        ),
        refuted=(Relation("the minimum is the number of ranks", "smallest_global_batch", "==", "ranks"),),
        sources=(DDP_DOCS, own_run("smallest-effective-batch")),
        items=(152,),
        chapter=DATA_PARALLEL,
    ),
    Card(
        id="trap-global-batch-counts-gpus",
        kind="numerics",
        question="'The global batch is the local batch times the number of GPUs times accumulation.' What is right?",
        answer=(
            "It is the micro-batch times the data-parallel degree times accumulation. Ranks of one tensor-, context- "
            "or pipeline-parallel group share their samples: they are one data-parallel rank together. On 4 ranks with "
            "tensor parallelism 2, micro-batch 2 and accumulation 2, a step has 8 samples, not 16."
        ),
        notes=(
            "Data-parallel degree = ranks / (tensor x context x pipeline); expert parallelism uses existing ranks and "
            "changes nothing. The trainer counts the samples of every step from its loader; tokens per step follow."
        ),
        mistake="The formula of pure DDP is kept when an axis is added. Learning rate and loss curves then mislead.",
        experiment=ALGEBRA,
        predictions=(
            Prediction(
                "samples_per_step", "4 ranks, tensor 2, micro-batch 2, accumulation 2: samples per step?", "samples"
            ),
        ),
        relations=(
            Relation(
                "the recorded batch is micro x data x accumulation",
                "samples_per_step",
                "==",
                "micro_x_data_x_accumulation",
            ),
            Relation("it is less than with all ranks", "samples_per_step", "<", "micro_x_ranks_x_accumulation"),
        ),
        refuted=(
            Relation(
                "the recorded batch is micro x ranks x accumulation",
                "samples_per_step",
                "==",
                "micro_x_ranks_x_accumulation",
            ),
        ),
        sources=(DDP_DOCS, own_run("trap-global-batch-counts-gpus")),
        items=(58, 152),
        chapter=DATA_PARALLEL,
    ),
    Card(
        id="trap-a-step-is-one-pass",
        kind="judgement",
        question="'A training step is one fetch, one forward, one backward, one sync and one update.' What is right?",
        answer=(
            "With accumulation k, a step has k forward and k backward passes and one update. It does not have one "
            "moment of synchronization either: DDP reduces buckets while backward runs, and FSDP gathers parameters "
            "for every unit and pass and reduces gradients again and again. What is single is the update: a step is "
            "done on every rank or on none."
        ),
        notes=(
            "The run enters the phases of the trainer's step and counts its collectives: with 4 micro-batches and 6 "
            "FSDP units (embedding, 4 blocks, head), 2 gathers and 1 reduce-scatter per unit and micro-batch; DDP one "
            "all-reduce for its one bucket, because only the last micro-batch synchronizes."
        ),
        mistake="'One synchronization boundary' is drawn as a barrier between backward and the optimizer.",
        experiment=STEP,
        predictions=(
            Prediction("forward_phases", "Accumulation 4: forward passes per step and rank?", "passes"),
            Prediction("fsdp_collectives", "FSDP2, 6 units, 4 micro-batches: collectives per step?", "calls"),
        ),
        relations=(
            Relation("a step has one forward pass per micro-batch", "forward_phases", "==", "accumulation"),
            Relation("and one backward pass", "backward_phases", "==", "accumulation"),
            Relation("and one update", "update_phases", "==", 1),
            Relation("FSDP synchronizes many times", "fsdp_collectives", ">", "ddp_gradient_collectives"),
        ),
        refuted=(
            Relation("a step has one forward pass", "forward_phases", "==", 1),
            Relation("FSDP synchronizes once per step", "fsdp_collectives", "==", 1),
        ),
        sources=(DDP_NOTES, FSDP2_DOCS, own_run("trap-a-step-is-one-pass")),
        items=(106,),
        chapter=JUDGEMENT,
    ),
)
