"""Cards on large batches: what they change in updates, memory, traffic and loss."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.references import (
    DDP_NOTES,
    LARGE_BATCH_PAPER,
    LINEAR_RATE_PAPER,
    SHARP_MINIMA_PAPER,
    TRAIN_LONGER_PAPER,
    own_run,
)

NUMERICS, JUDGEMENT = "handbook/numerics.md", "handbook/judgement.md"
SWEEP = Experiment(
    "batches:batch_sweep",
    ranks=2,
    knobs=(
        Knob("batch", (4, 8), "samples per step of the small batch"),
        Knob("factor", (8, 4), "the large batch is so many times as large"),
        Knob("samples", (256, 512), "samples that every run reads"),
    ),
)

CARDS = (
    Card(
        id="very-large-batches",
        kind="numerics",
        question="Why may very large batches train worse, although their gradients are more accurate?",
        answer=(
            "Three reasons. First, at a fixed number of samples a larger batch means fewer updates, and a learning "
            "rate cannot grow without limit to make up for it. Second, beyond the critical batch the gradient is "
            "already accurate: further samples remove noise that no longer matters. Third, the noise of small batches "
            "is said to lead away from sharp minima; that reason is contested. A well-chosen rate helps, up to the "
            "critical batch."
        ),
        notes=(
            "Gradient noise scale B = tr(S)/|g|^2, with S the covariance of per-sample gradients and g the mean "
            "gradient: far below B, twice the batch halves the steps; far above, it changes nothing. Meshwright "
            "records an estimate from the norms of local and reduced gradients. In the run, 8 times the batch with the "
            "same samples is worse, and a rate times the square root of 8 wins a part of it back."
        ),
        mistake="'More accurate gradients are better' ignores that accuracy is paid for in updates.",
        experiment=SWEEP,
        predictions=(Prediction("updates_large", "256 samples in batches of 32: how many updates?", "updates"),),
        relations=(
            Relation("at equal samples the large batch is worse", "loss_large", ">", "loss_small", 0.02),
            Relation("a higher rate wins a part of it back", "loss_large_higher_rate", "<", "loss_large", 0.02),
            Relation("but not all of it", "loss_large_higher_rate", ">", "loss_small", 0.01),
            Relation("it makes fewer updates", "updates_large", "<", "updates_small"),
        ),
        refuted=(
            Relation("at equal samples both batches reach the same loss", "loss_large", "<=", "loss_small", 0.02),
        ),
        sources=(LARGE_BATCH_PAPER, LINEAR_RATE_PAPER, SHARP_MINIMA_PAPER, own_run("very-large-batches")),
        items=(136,),
        chapter=NUMERICS,
    ),
    Card(
        id="trap-large-batches-generalize-worse",
        kind="numerics",
        question="'A large batch generalizes worse: its held-out loss suffers.' What can be measured?",
        answer=(
            "At an equal number of steps the large batch has the lower held-out loss here: it has read more samples. "
            "At an equal number of samples it has the higher one, because it made fewer updates. So what is measured "
            "is efficiency per sample, the critical batch, and not a gap between training and held-out loss. In "
            "pretraining with one epoch every sample is new, and both losses are nearly the same."
        ),
        notes=(
            "The generalization gap of large batches was reported for many epochs on small datasets (Keskar et al.), "
            "and mostly closed by more updates and better rates (Hoffer et al., Goyal et al.). For language models, "
            "plot held-out loss over tokens and look for the batch from which on the curves separate."
        ),
        mistake="Runs with equal epochs are compared, and the lack of updates is called a lack of generalization.",
        experiment=SWEEP,
        claims=(
            claim(
                "At equal steps, the 8 times larger batch has the lower held-out loss.",
                "loss_equal_steps",
                "<",
                "loss_small",
            ),
            claim("At equal samples, the larger batch has the lower held-out loss.", "loss_large", "<", "loss_small"),
            claim(
                "At equal steps, held-out and training loss of the large batch differ by more than 10 %.",
                "loss_equal_steps",
                ">",
                "training_loss_equal_steps",
                0.1,
            ),
            claim("The larger batch makes fewer updates on equal samples.", "updates_large", "<", "updates_small"),
        ),
        relations=(
            Relation("at equal steps the large batch is better", "loss_equal_steps", "<", "loss_small", 0.02),
            Relation("at equal samples it is worse", "loss_large", ">", "loss_small", 0.02),
            Relation(
                "held-out and training loss agree within 10 %",
                "loss_equal_steps",
                "<=",
                "training_loss_equal_steps",
                0.1,
            ),
        ),
        refuted=(Relation("the large batch is worse at equal steps", "loss_equal_steps", ">=", "loss_small"),),
        sources=(TRAIN_LONGER_PAPER, LARGE_BATCH_PAPER, own_run("trap-large-batches-generalize-worse")),
        items=(136,),
        chapter=NUMERICS,
    ),
    Card(
        id="why-not-increase-the-batch",
        kind="judgement",
        question="The job is slow. Why not just increase the batch?",
        answer=(
            "Because the batch is no generic dial. It changes optimization: fewer updates per sample, another rate. It "
            "raises activation memory in proportion to the micro-batch. It hides a slow loader without repairing it. "
            "What it does not do under data parallelism is raise the gradient traffic: that depends on parameters "
            "only, so bytes per sample fall. If communication is the bottleneck, accumulate with no_sync; then check "
            "the loss per sample."
        ),
        notes=(
            "DDP: about 2 x gradient bytes per rank and step, whatever the batch. Tensor, context, pipeline and expert "
            "parallelism move activations, so their traffic does grow with the batch. Accumulation without no_sync "
            "multiplies DDP's traffic by the number of micro-batches."
        ),
        mistake="The gradient payload is said to grow with the batch. It has the size of the parameters.",
        experiment=SWEEP,
        claims=(
            claim("8 times the micro-batch needs at least 6 times the activation memory.", "activation_ratio", ">=", 6),
            claim("8 times the batch makes DDP send more gradient bytes per step.", "gradient_bytes_ratio", ">", 1),
            claim("8 times the batch needs more optimizer state.", "optimizer_ratio", ">", 1),
            claim(
                "On equal samples, the run with 8 times the batch ends with the higher loss.",
                "loss_large",
                ">",
                "loss_small",
            ),
            claim(
                "A higher learning rate makes the large batch as good as the small one.",
                "loss_large_higher_rate",
                "<=",
                "loss_small",
            ),
        ),
        relations=(
            Relation("activations grow with the micro-batch", "activation_ratio", ">=", 6),
            Relation("gradient bytes per step do not change", "gradient_bytes_ratio", "==", 1),
            Relation("optimizer state does not change", "optimizer_ratio", "==", 1),
            Relation("equal samples train less", "loss_large", ">", "loss_small", 0.02),
        ),
        refuted=(Relation("gradient bytes grow with the batch", "gradient_bytes_ratio", ">", 1),),
        sources=(DDP_NOTES, LARGE_BATCH_PAPER, own_run("why-not-increase-the-batch")),
        items=(127,),
        chapter=JUDGEMENT,
    ),
)
