"""Cards on DDP: what replicas exchange, and when."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.references import DDP_DOCS, DDP_NOTES, DDP_PAPER, own_run

CHAPTER = "handbook/data-parallelism.md"

UPDATE_MODES = Experiment(
    "state.update_modes:compare_modes",
    ranks=2,
    knobs=(
        Knob("steps", (3, 1, 5), "optimizer steps that every mode trains for"),
        Knob("ranks", (2, 4), "data-parallel ranks"),
    ),
)

MODES = ("bucket", "parameter", "model")
"""How gradients are grouped: in buckets, one by one, or all together."""


def bucket_order(picture: str) -> Experiment:
    return Experiment(
        "communication.gradient_overlap:order",
        ranks=2,
        knobs=(
            Knob("buckets", (4, 2, 8), "buckets that the gradients of the model are divided into"),
            Knob("accumulation", (1, 2), "micro-batches per step"),
            Knob("picture", (picture, *(mode for mode in MODES if mode != picture)), "the mode that is drawn"),
            Knob("ranks", (2, 3), "data-parallel ranks"),
        ),
    )


STARTS_EARLY = Relation(
    "some gradients do not exist yet when the first bucket's all-reduce begins", "gradients_after_start_bucket", ">", 0
)
WAITS_FOR_ALL = Relation(
    "with one bucket for the whole model, no gradient is left when its all-reduce begins",
    "gradients_after_start_model",
    "==",
    0,
)

CARDS = (
    Card(
        id="ddp-reduces-gradients",
        kind="communication",
        question="Every DDP rank has a full copy of the model. Why does DDP all-reduce gradients and not parameters?",
        answer=(
            "The gradient of the global batch is the sum of the gradients of its parts, so a sum over ranks is exact. "
            "Every rank then makes the same update from the same numbers, and parameters and optimizer state stay "
            "equal without being sent. Parameters are the result of a nonlinear update, such as Adam's; a mean of "
            "results is not the result of the mean. Gradients also become ready one by one during backward, so their "
            "transfer can hide behind it, while parameters exist only after the update."
        ),
        notes=(
            "With N ranks, local token sums l_r and T valid tokens in the global batch, Meshwright's step divides each "
            "l_r by T and sums the gradients: grad = sum_r d(l_r / T)/dW. DDP's own default is the mean over ranks, "
            "which is equal only where all ranks have the same number of tokens. The equality with one process also "
            "needs no batch-dependent layer (BatchNorm) and matched dropout seeds. Bytes per rank and step: 2 (N - 1) "
            "/ N times the gradient bytes, once per optimizer step with no_sync during accumulation."
        ),
        mistake="Some say that DDP sends the model after each batch: the bytes are as many, but they are gradients.",
        experiment=UPDATE_MODES,
        claims=(
            claim(
                "Summed gradients give the update of one process with the whole batch.",
                "error_gradients_adamw",
                "<=",
                1e-9,
            ),
            claim(
                "Averaging parameters after local AdamW updates gives that update, too.",
                "error_parameters_adamw",
                "<=",
                1e-9,
            ),
            claim(
                "Averaging parameters after local plain-SGD updates gives that update.",
                "error_parameters_sgd",
                "<=",
                1e-9,
            ),
            claim(
                "The optimizer state of the ranks stays equal, although it is never sent.",
                "moment_spread_gradients_adamw",
                "==",
                0,
            ),
        ),
        relations=(
            Relation("summed gradients equal one process with the whole batch", "error_gradients_adamw", "<=", 1e-9),
            Relation("parameters of the ranks are equal", "spread_gradients_adamw", "==", 0),
            Relation("so is their optimizer state", "moment_spread_gradients_adamw", "==", 0),
            Relation("averaged parameters are another result under AdamW", "error_parameters_adamw", ">", 0.01),
            Relation("under plain SGD they are the same result", "error_parameters_sgd", "<=", 1e-9),
        ),
        refuted=(
            Relation("broadcasting rank 0's parameters gives the same update", "error_broadcast_adamw", "<=", 1e-9),
        ),
        sources=(DDP_NOTES, DDP_PAPER, own_run("ddp-reduces-gradients")),
        items=(18, 19, 21, 22),
        chapter=CHAPTER,
    ),
    Card(
        id="ddp-gradient-buckets",
        kind="communication",
        question="What is a gradient bucket in DDP, and which tradeoff does its size decide?",
        answer=(
            "A bucket is a flat buffer for the gradients of several parameters, filled in about the reverse order of "
            "their use. When the last gradient of a bucket is ready, DDP starts one asynchronous all-reduce of the "
            "buffer and backward goes on. Small buckets start early and pay the latency of a collective often; large "
            "buckets use the bandwidth better and start late, down to one bucket that starts when backward is over. "
            "The bytes are the same for every size."
        ),
        notes=(
            "With k buckets of a model of D gradient bytes, latency alpha per collective and bandwidth beta, a simple "
            "model of the communication time is k alpha + 2 (N - 1) / N D / beta; only the part after the last "
            "gradient is exposed, which is about that of the last bucket. torch's default is bucket_cap_mb = 25, with "
            "a smaller first bucket of 1 MiB. DDP rebuilds its buckets after the first backward pass in the observed "
            "order. With gradient_as_bucket_view = True gradients are views into the buckets, which saves one copy of "
            "all gradients."
        ),
        mistake="Some think that all gradients are reduced in one call after backward; that is the worst bucket size.",
        experiment=bucket_order("bucket"),
        predictions=(
            Prediction(
                "all_reduces_parameter",
                "The model has 39 parameters. How many all-reduces does a step have if a bucket holds one parameter?",
                "all-reduces",
            ),
            Prediction(
                "first_start_model",
                "How many of the 39 gradients exist when the all-reduce of a single bucket for the whole model begins?",
                "gradients",
            ),
        ),
        relations=(
            Relation(
                "one bucket per parameter is one all-reduce per parameter", "all_reduces_parameter", "==", "parameters"
            ),
            Relation("the bytes do not depend on the bucket size", "message_bucket", "==", "message_parameter"),
            Relation("they are those of all gradients", "message_bucket", "==", 1.0),
            Relation("smaller buckets start earlier", "first_start_parameter", "<", "first_start_bucket"),
            Relation("larger buckets are fewer collectives", "all_reduces_bucket", "<", "all_reduces_parameter"),
            STARTS_EARLY,
            WAITS_FOR_ALL,
        ),
        sources=(DDP_DOCS, DDP_NOTES, DDP_PAPER, own_run("ddp-gradient-buckets")),
        items=(23, 25, 26, 119),
        chapter=CHAPTER,
    ),
    Card(
        id="ddp-overlap",
        kind="communication",
        question="How does DDP overlap the gradient all-reduce with backward, and which part cannot be hidden?",
        answer=(
            "Backward produces gradients from the last layer to the first. A hook on every parameter tells DDP that "
            "its gradient is ready; as soon as a bucket is full, its all-reduce starts in the background while "
            "autograd computes the layers below. At the end DDP waits for what is still in flight. The last bucket has "
            "the gradients of the first layers, and nothing is left to hide it."
        ),
        notes=(
            "Exposed time is about max(last bucket, total communication - backward). Overlap needs hooks and "
            "asynchronous collectives; the bucket only sets the granularity. With accumulation, no_sync suppresses the "
            "hooks of all micro-batches but the last, so the overlap window is one backward pass, however many there "
            "are. On GPUs the collective runs on its own stream and takes some of the multiprocessors from the compute "
            "kernels."
        ),
        mistake="Overlap is called free. It hides time, not bytes, and not the last bucket.",
        experiment=bucket_order("bucket"),
        predictions=(
            Prediction(
                "buckets_before_end_bucket",
                "The gradients fill four buckets. How many all-reduces have begun before the last gradient exists?",
                "all-reduces",
            ),
        ),
        relations=(
            STARTS_EARLY,
            Relation("all buckets but the last start before the last gradient", "buckets_before_end_bucket", "==", 3),
            WAITS_FOR_ALL,
        ),
        refuted=(Relation("every all-reduce can be hidden", "buckets_before_end_bucket", "==", "all_reduces_bucket"),),
        sources=(DDP_NOTES, DDP_PAPER, own_run("ddp-overlap")),
        items=(153,),
        chapter=CHAPTER,
    ),
)
