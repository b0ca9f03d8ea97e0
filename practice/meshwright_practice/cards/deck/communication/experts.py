"""Cards on expert parallelism."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.references import GSHARD_PAPER, SWITCH_PAPER, own_run

CHAPTER = "handbook/experts.md"
EXCHANGE = Experiment(
    "communication.expert_exchange:exchange",
    ranks=2,
    knobs=(
        Knob("experts", (8, 4, 16), "experts per block"),
        Knob("active", (2, 4), "experts per token (top-k)"),
        Knob("ranks", (2, 4), "ranks among which the experts are divided"),
    ),
)
SAME_LOSS = Relation("the loss does not depend on where experts are", "loss_difference", "<=", 1e-10)

CARDS = (
    Card(
        id="expert-parallelism",
        kind="communication",
        question=(
            "What is expert parallelism in a mixture of experts, what does it communicate, and what goes wrong in "
            "practice?"
        ),
        answer=(
            "A mixture of experts has many feed-forwards per block, and a router sends each token to a few of them. "
            "Expert parallelism puts different experts on different ranks, so each rank keeps only a part of the "
            "expert weights. Tokens must then travel: an all-to-all brings them to their experts, a second one brings "
            "the results back, and backward repeats both. Bytes follow tokens times active experts times width. What "
            "goes wrong is balance: the rank with the popular experts computes longest, and everyone waits for it, "
            "even if the mean load is fine."
        ),
        notes=(
            "T tokens, k active of E experts, width d, e bytes, N ranks: an all-to-all sends about T k d e (N - 1) / N "
            "in total, two in forward and two in backward per block, and a small one with the counts. Ranks are taken "
            "from the data-parallel ranks, so expert gradients are summed over fewer of them. Balance is kept by an "
            "auxiliary loss, by a bias per expert that moves against its load, or by a capacity that drops tokens; a "
            "capacity makes results depend on the layout. meshwright records the largest load as a multiple of the "
            "mean."
        ),
        mistake=(
            "A mixture of experts is described as 'more parameters'. Routing, balance and the all-to-all are the work."
        ),
        experiment=EXCHANGE,
        predictions=(
            Prediction(
                "rows_per_token_divided",
                "Two active experts per token: how many rows do all experts of a block compute per token?",
                "rows per token",
            ),
            Prediction(
                "all_to_alls_divided",
                "Two blocks: how many all-to-alls has a step, with that of the counts?",
                "all-to-alls",
            ),
            Prediction(
                "imbalance_skewed",
                "8 experts, 2 active, and a router that chooses expert 0 for every token: what is the largest load?",
                "of the mean load",
            ),
        ),
        relations=(
            Relation("a block has five all-to-alls per step", "all_to_alls_divided", "==", 10),
            Relation(
                "their bytes are four times tokens x active x width, and the counts",
                "all_to_all_bytes_divided",
                "==",
                "expected_bytes",
            ),
            Relation("a rank keeps its experts only", "parameter_divided", "==", "expert_share_per_rank", 1e-9),
            Relation("without expert parallelism there is no all-to-all", "all_to_alls_replicated", "==", 0),
            Relation("a skewed router makes one rank compute more than the mean", "busiest_rank_skewed", ">", 1.1),
            Relation("the largest load is then that of all tokens", "imbalance_skewed", "==", 4.0),
            SAME_LOSS,
        ),
        refuted=(Relation("a token uses all parameters", "active_parameters", "==", "total_parameters"),),
        sources=(GSHARD_PAPER, SWITCH_PAPER, own_run("expert-parallelism")),
        items=(49, 50, 51),
        chapter=CHAPTER,
    ),
    Card(
        id="trap-expert-parallelism-saves-compute",
        kind="state placement",
        question="True or not: expert parallelism reduces the compute per token.",
        answer=(
            "Not true. The router's sparsity does: a token runs through k of E experts, wherever they are. Expert "
            "parallelism divides the weights of the experts among ranks, so it reduces memory per device, and it adds "
            "all-to-alls. The same model with all experts on every rank computes exactly as many rows per token. To "
            "reduce compute, change k, and that is another model."
        ),
        notes=(
            "FLOPs of the experts per token: 6 d f k for a gated feed-forward of widths d and f, forward only, "
            "independent of E and of the expert-parallel degree. Parameters per rank: dense part + expert part / "
            "degree. The run compares k = 2 on every rank, k = 2 divided, and k = 1 divided."
        ),
        mistake="The property of the model (sparse activation) is given to the way it is distributed.",
        experiment=EXCHANGE,
        claims=(
            claim(
                "Dividing the experts among ranks lowers the rows computed per token.",
                "rows_per_token_divided",
                "<",
                "rows_per_token_replicated",
            ),
            claim(
                "Fewer active experts lower the rows computed per token.",
                "rows_per_token_sparser",
                "<",
                "rows_per_token_divided",
            ),
            claim(
                "Dividing the experts lowers the parameters of a rank.",
                "parameter_divided",
                "<",
                "parameter_replicated",
            ),
            claim("Dividing the experts adds communication.", "all_to_alls_divided", ">", "all_to_alls_replicated"),
        ),
        relations=(
            Relation("rows per token are the number of active experts", "rows_per_token_divided", "==", 2.0),
            Relation("they are the same without expert parallelism", "rows_per_token_replicated", "==", 2.0),
            Relation("one active expert computes half of them", "rows_per_token_sparser", "==", 1.0),
            Relation(
                "expert parallelism lowers the parameters of a rank", "parameter_divided", "<", "parameter_replicated"
            ),
            SAME_LOSS,
        ),
        refuted=(
            Relation(
                "expert parallelism reduces the compute per token",
                "rows_per_token_divided",
                "<",
                "rows_per_token_replicated",
            ),
        ),
        sources=(GSHARD_PAPER, SWITCH_PAPER, own_run("trap-expert-parallelism-saves-compute")),
        items=(49,),
        chapter=CHAPTER,
    ),
)
