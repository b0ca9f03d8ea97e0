"""Cards on 16-bit numbers, saved tensors and activation checkpointing."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.references import (
    AMP_DOCS,
    AMP_EXAMPLES,
    AUTOGRAD_NOTES,
    BFLOAT16_PAPER,
    CHECKPOINT_DOCS,
    CHECKPOINTING_PAPER,
    FINFO_DOCS,
    MIXED_PRECISION_PAPER,
    SAVED_TENSORS_TUTORIAL,
    SEQUENCE_PAPER,
    own_run,
)

NUMERICS, MEMORY = "handbook/numerics.md", "handbook/memory.md"
FORMATS = Experiment(
    "numerics:formats",
    knobs=(
        Knob("gradient", (1e-8, 1e-7, 1e-6), "a small gradient"),
        Knob("loss_scale", (65536.0, 1024.0), "loss scale"),
        Knob("update", (1e-3, 1e-2), "update that is added to a weight of 1"),
        Knob("updates", (100, 10), "number of updates"),
    ),
)
SCALING = Experiment(
    "numerics:loss_scaling",
    knobs=(
        Knob("scale_exponent", (24, 20, 30), "the first loss scale is 2 to this power"),
        Knob("steps", (12, 20), "steps"),
    ),
)
SAVED = Experiment(
    "numerics:saved_tensors",
    knobs=(
        Knob("batch", (2, 4), "samples b"),
        Knob("sequence", (16, 32), "tokens s"),
        Knob("width", (32, 64), "width d"),
    ),
)
SEGMENTS = Experiment("numerics:checkpoint_segments", knobs=(Knob("layers", (64, 16, 256), "layers L"),))
CHECKPOINTED = Experiment(
    "numerics:checkpointed_run",
    knobs=(Knob("layers", (4, 8), "blocks of the model"), Knob("batch", (8, 4), "samples per step")),
)

CARDS = (
    Card(
        id="saved-activations",
        kind="numerics",
        question="What is a saved activation, and what has it to do with an activation function?",
        answer=(
            "A saved activation is a tensor that autograd keeps from forward to backward, because a derivative needs "
            "it: the input of a matrix product, the input of a nonlinearity. Its size is that of hidden states, [b, s, "
            "d] or a multiple, so it grows with the batch and not with the parameters. An activation function, such as "
            "SiLU, is an operator without parameters. It is one of many operators that save a tensor."
        ),
        notes=(
            "SiLU saves its input: b s d elements. A linear layer saves its input for the gradient of the weight. A "
            "SwiGLU feed-forward with inner width 4 d saves x, gate(x), up(x), silu and the product: 17 b s d "
            "elements. "
            "Under no_grad nothing is saved. torch.autograd.graph.saved_tensors_hooks lists what is saved."
        ),
        mistake="'Activation memory' is explained as memory of activation functions.",
        experiment=SAVED,
        predictions=(
            Prediction("silu_saves", "SiLU on a float32 tensor [2, 16, 32]: bytes saved for backward?", "B"),
            Prediction(
                "feed_forward_twice_the_batch",
                "The feed-forward saves 69,632 bytes for b = 2. And for b = 4?",
                "B",
            ),
        ),
        relations=(
            Relation("SiLU saves one tensor of its input's size", "silu_saves", "==", "tensor_bytes"),
            Relation("and has no parameters", "silu_parameters", "==", 0),
            Relation(
                "a feed-forward saves more than its parameters take",
                "feed_forward_saves",
                ">",
                "feed_forward_parameter_bytes",
            ),
            Relation("twice the batch saves more", "feed_forward_twice_the_batch", ">", "feed_forward_saves"),
            Relation("without gradients nothing is saved", "saved_without_grad", "==", 0),
        ),
        refuted=(
            Relation(
                "what is saved does not depend on the batch", "feed_forward_twice_the_batch", "==", "feed_forward_saves"
            ),
        ),
        sources=(AUTOGRAD_NOTES, SAVED_TENSORS_TUTORIAL, own_run("saved-activations")),
        items=(142,),
        chapter=MEMORY,
    ),
    Card(
        id="fp16-produces-nan",
        kind="numerics",
        question="A run in fp16 produces NaN. Is it overflow or underflow, and what helps?",
        answer=(
            "NaN comes from overflow: a number above 65,504 becomes infinite, and infinity minus infinity or zero "
            "times infinity is NaN. It starts in logits, in attention scores, or in gradients whose loss scale is too "
            "high. Underflow gives zeros: training stalls silently. A dynamic loss scale treats both: it lifts small "
            "gradients, and when a gradient is not finite it skips the update and halves the scale. Or use bf16."
        ),
        notes=(
            "GradScaler and Meshwright's LossScale: start at 65,536, halve after an overflow, double after a number of "
            "finite steps. Skipped updates are normal at the start and rare later; many in a row mean that the forward "
            "pass itself overflows, which no scale repairs. Gradients must be unscaled before clipping."
        ),
        mistake="NaN is blamed on underflow, and the scale is raised.",
        experiment=SCALING,
        predictions=(
            Prediction(
                "scale_after_one_overflow", "The scale is 2^24 and a gradient overflows. The scale after it?", "scale"
            ),
        ),
        relations=(
            Relation("the first update overflows and is skipped", "first_step_skipped", "==", 1),
            Relation("the scale falls by one half per skipped step", "halvings", "==", "skipped_steps"),
            Relation("then updates are applied again", "last_step_skipped", "==", 0),
            Relation("and the loss is finite", "last_loss_is_finite", "==", 1),
        ),
        refuted=(Relation("an overflow ends the run", "skipped_steps", ">=", "steps"),),
        sources=(AMP_EXAMPLES, MIXED_PRECISION_PAPER, own_run("fp16-produces-nan")),
        items=(143,),
        chapter=NUMERICS,
    ),
    Card(
        id="fp16-against-bf16",
        kind="numerics",
        question="Compare the bits of fp16 and bf16. Why does bf16 need no loss scaling?",
        answer=(
            "fp16 has 5 bits of exponent and 10 of mantissa, bf16 has 8 and 7. bf16 therefore reaches as far as fp32 "
            "in both directions: gradients of 1e-8 are representable, so nothing has to be scaled. It pays with "
            "precision, about 2 to 3 decimal digits. Small updates of a weight are lost in it, which is why the "
            "optimizer keeps fp32 weights."
        ),
        notes=(
            "One sign bit each. Largest numbers: 65,504 and 3.4e38. Smallest normal ones: 6.1e-5 and 1.2e-38; fp16 "
            "subnormals end at 6e-8. Spacing at 1: 2^-10 and 2^-7, so that an addition below 2^-8 of the weight is "
            "rounded away in bf16. Meshwright keeps fp32 parameters under autocast, or fp32 master weights in the "
            "optimizer."
        ),
        mistake="bf16 is called more precise because it is newer. It has fewer digits than fp16.",
        experiment=FORMATS,
        predictions=(
            Prediction("exponent_bits_bf16", "Exponent bits of bf16?", "bits"),
            Prediction("weight_bf16", "A bf16 weight of 1 gets 100 updates of 0.001. Its value?", ""),
        ),
        relations=(
            Relation("bf16 has more exponent bits", "exponent_bits_bf16", ">", "exponent_bits_fp16"),
            Relation("and fewer mantissa bits", "mantissa_bits_bf16", "<", "mantissa_bits_fp16"),
            Relation("a gradient of 1e-8 is zero in fp16", "small_gradient_fp16", "==", 0),
            Relation("and not in bf16", "small_gradient_bf16", ">", 0),
            Relation("loss scaling saves it in fp16", "scaled_gradient_fp16", ">", 0),
            Relation("bf16 loses small updates", "weight_bf16", "==", 1),
            Relation("an fp32 master weight keeps them", "weight_fp32_master", "==", 1.1, 1e-4),
        ),
        refuted=(Relation("a bf16 weight follows small updates", "weight_bf16", ">=", 1.05),),
        sources=(FINFO_DOCS, BFLOAT16_PAPER, AMP_DOCS, own_run("fp16-against-bf16")),
        items=(144,),
        chapter=NUMERICS,
    ),
    Card(
        id="trap-loss-scaling-prevents-overflow",
        kind="numerics",
        question=(
            "'Loss scaling protects fp16 from overflow, and bf16 is immune to it, so it has no price.' What is right?"
        ),
        answer=(
            "Loss scaling prevents underflow: it multiplies small gradients so that they do not become zero. Overflow "
            "is its side effect, which the finite check and the skipped update catch. bf16 has the range of fp32, so "
            "both are rare, but not impossible: exp(100), log(0) and 1/0 are infinite in it, too. Its price is "
            "precision: updates below 2^-8 of a weight are lost without fp32 master weights."
        ),
        notes=(
            "fp16: 1e-8 becomes 0, times 65,536 it is representable and is divided after backward. Underflow shows as "
            "zero gradients and a loss that stops falling, not as NaN. Softmax and losses are computed in fp32 under "
            "autocast for this reason."
        ),
        mistake="NaN and stalling are treated with the same remedy. One needs a lower scale, the other a higher one.",
        experiment=FORMATS,
        claims=(
            claim("In fp16, a gradient of 1e-8 becomes NaN.", "small_gradient_is_nan", "==", 1),
            claim("With a loss scale of 65,536 the same gradient survives.", "scaled_gradient_fp16", ">", 0),
            claim("70,000 overflows in bf16.", "70000_overflows_bf16", "==", 1),
            claim("exp(100) is infinite in bf16.", "exp_100_is_inf_bf16", "==", 1),
            claim("100 updates of 0.001 move a bf16 weight of 1 above 1.05.", "weight_bf16", ">=", 1.05),
        ),
        relations=(
            Relation("underflow gives zero", "small_gradient_fp16", "==", 0),
            Relation("loss scaling prevents it", "scaled_gradient_fp16", ">", 0),
            Relation("70,000 overflows in fp16", "70000_overflows_fp16", "==", 1),
            Relation("inf - inf is NaN", "inf_minus_inf_is_nan", "==", 1),
            Relation("0 x inf is NaN", "zero_times_inf_is_nan", "==", 1),
            Relation("exp(100) overflows in bf16, too", "exp_100_is_inf_bf16", "==", 1),
            Relation("log(0) is infinite in bf16, too", "log_0_is_inf_bf16", "==", 1),
            Relation("small updates are lost in bf16", "weight_bf16", "==", 1),
        ),
        refuted=(
            Relation("bf16 never overflows", "exp_100_is_inf_bf16", "==", 0),
            Relation("a gradient that is too small becomes NaN", "small_gradient_is_nan", "==", 1),
        ),
        sources=(AMP_DOCS, MIXED_PRECISION_PAPER, BFLOAT16_PAPER, own_run("trap-loss-scaling-prevents-overflow")),
        items=(143, 144),
        chapter=NUMERICS,
    ),
    Card(
        id="three-baseline-techniques",
        kind="numerics",
        question="Which techniques come before any parallelism when memory is short, and what does each reduce?",
        answer=(
            "Mixed precision, activation checkpointing and gradient accumulation. Computing in bf16 shrinks "
            "activations and speeds matrix products up; weights and moments usually stay in fp32. Checkpointing saves "
            "the inputs of blocks and recomputes the rest, for about a third more FLOPs. Accumulation lets a "
            "micro-batch be small at the same global batch, so activations shrink. None of them shrinks optimizer "
            "state: that needs sharding or offload."
        ),
        notes=(
            "AdamW with fp32 weights, gradients and two moments: 16 bytes per parameter, with a bf16 copy of the "
            "weights 18. Activations of a block are about 34 s b h bytes plus attention in 16 bits (Korthikanti et "
            "al.), 2 s b h with full checkpointing. In a small float32 model the share of each technique differs, its "
            "direction does not."
        ),
        mistake="All three are switched on by habit. Checkpointing costs time, and is due only where memory binds.",
        experiment=CHECKPOINTED,
        claims=(
            claim(
                "Checkpointing every block leaves less than 30 % of the activations.",
                "activations_checkpointed",
                "<",
                0.3,
            ),
            claim("Accumulation over single samples halves the optimizer state.", "optimizer_accumulated", "<=", 0.5),
            claim("Computing in bf16 reduces activations.", "activations_bf16", "<", 1),
            claim("Computing in bf16 reduces the optimizer state.", "optimizer_bf16", "<", 1),
            claim("Checkpointing changes the loss.", "loss_difference_checkpointed", ">", 0),
        ),
        relations=(
            Relation("checkpointing shrinks activations", "activations_checkpointed", "<", 0.3),
            Relation("selective checkpointing lies between", "activations_selective", ">", "activations_checkpointed"),
            Relation("accumulation shrinks activations", "activations_accumulated", "<", 0.3),
            Relation("bf16 shrinks activations", "activations_bf16", "<", 1),
            Relation("the loss does not change by checkpointing", "loss_difference_checkpointed", "==", 0),
        ),
        refuted=(Relation("checkpointing shrinks the optimizer state", "optimizer_checkpointed", "<", 1),),
        sources=(AMP_DOCS, CHECKPOINT_DOCS, SEQUENCE_PAPER, own_run("three-baseline-techniques")),
        items=(145,),
        chapter=MEMORY,
    ),
    Card(
        id="trap-always-the-three-baselines",
        kind="numerics",
        question=(
            "'Before any parallelism always use mixed precision, checkpointing and accumulation: together they make "
            "state and activations fit.' What is right?"
        ),
        answer=(
            "They act on activations. Parameters, gradients and optimizer state are as large as before: accumulation "
            "and checkpointing change none of them. If the state is what does not fit, they cannot help, and sharding "
            "is due. And checkpointing is no default: it recomputes the forward pass, which is paid in every step, so "
            "it is due only where memory binds."
        ),
        notes=(
            "Look at the memory classes first: meshwright plan prints them per rank, and the trainer counts them in a "
            "step. Full checkpointing costs one forward pass more: with backward at twice the forward FLOPs, (1 + 2 + "
            "1)/3 = 4/3. Selective checkpointing costs less and saves less."
        ),
        mistake="'Memory' is treated as one number, so that every remedy seems to fit every overflow.",
        experiment=CHECKPOINTED,
        claims=(
            claim("Accumulation reduces the memory of gradients.", "gradients_accumulated", "<", 1),
            claim("Checkpointing reduces the memory of parameters.", "parameters_checkpointed", "<", 1),
            claim(
                "Selective checkpointing keeps more than full checkpointing.",
                "activations_selective",
                ">",
                "activations_checkpointed",
            ),
            claim("Accumulation reduces the memory of activations.", "activations_accumulated", "<", 1),
        ),
        relations=(
            Relation("accumulation leaves the optimizer state", "optimizer_accumulated", "==", 1),
            Relation("and the gradients", "gradients_accumulated", "==", 1),
            Relation("checkpointing leaves parameters", "parameters_checkpointed", "==", 1),
            Relation("and the optimizer state", "optimizer_checkpointed", "==", 1),
        ),
        refuted=(
            Relation("accumulation shrinks the optimizer state", "optimizer_accumulated", "<", 1),
            Relation("checkpointing shrinks parameters", "parameters_checkpointed", "<", 1),
        ),
        sources=(CHECKPOINT_DOCS, SEQUENCE_PAPER, own_run("trap-always-the-three-baselines")),
        items=(145,),
        chapter=MEMORY,
    ),
    Card(
        id="square-root-checkpointing",
        kind="numerics",
        question="How does activation checkpointing reach O(sqrt(L)) memory, and what does it cost?",
        answer=(
            "Cut L layers into sqrt(L) segments of sqrt(L) layers. Forward keeps only the input of each segment; "
            "backward recomputes one segment at a time, and keeps its sqrt(L) tensors for that time. So about 2 "
            "sqrt(L) tensors are alive instead of L. The cost is one more forward pass: with backward at twice its "
            "FLOPs, 4/3 in total."
        ),
        notes=(
            "Segments of k layers: L/k inputs plus k recomputed tensors, smallest at k = sqrt(L). The counter sees "
            "every "
            "live tensor of a chain of equal layers that save one tensor each: 65 without checkpointing and 16 with "
            "segments of 8, for L = 64. torch.utils.checkpoint with use_reentrant=False recomputes once; nested "
            "checkpoints would trade further."
        ),
        mistake="33 % is quoted as wall time. It is FLOPs, and only if backward takes twice the forward pass.",
        experiment=SEGMENTS,
        predictions=(
            Prediction(
                "units_square_root",
                "64 layers, segments of 8, one saved tensor per layer: tensors alive at the peak?",
                "tensors",
            ),
            Prediction("flops_ratio", "FLOPs with full checkpointing, relative to without?", "times"),
        ),
        relations=(
            Relation(
                "sqrt(L) segments keep about 2 sqrt(L) tensors", "units_square_root", "==", "twice_square_root", 0.1
            ),
            Relation("no other segment length keeps fewer", "units_square_root", "==", "units_smallest"),
            Relation("without checkpointing all are kept", "units_without", ">=", "layers"),
            Relation("recomputation costs one third", "flops_ratio", "==", 4 / 3, 1e-9),
        ),
        refuted=(Relation("one segment for all layers keeps the fewest", "units_one_segment", "==", "units_smallest"),),
        sources=(CHECKPOINTING_PAPER, CHECKPOINT_DOCS, own_run("square-root-checkpointing")),
        items=(146,),
        chapter=MEMORY,
    ),
    Card(
        id="trap-checkpointing-every-block-is-sqrt",
        kind="numerics",
        question="'Checkpointing every block makes activation memory O(sqrt(L)).' What is right?",
        answer=(
            "With one checkpoint per block the inputs of all L blocks stay alive: memory is still O(L), with a much "
            "smaller constant, because the insides of a block are far larger than its input. O(sqrt(L)) needs about "
            "sqrt(L) segments of sqrt(L) blocks. In practice one checkpoint per block is usual: a real block saves so "
            "much that recomputing several at once would cost more than the inputs do."
        ),
        notes=(
            "Chain of layers with one saved tensor each: one checkpoint per layer saves nothing at all. A transformer "
            "block: 34 s b h + 5 a s^2 b bytes in 16 bits (s tokens, b samples, h width, a heads) become 2 s b h. "
            "activation_checkpoint.segment sets the number of blocks per checkpoint in Meshwright."
        ),
        mistake="The square root of the paper is attached to a setting that does not group blocks.",
        experiment=SEGMENTS,
        predictions=(
            Prediction(
                "units_per_block", "64 layers with one checkpoint each: tensors alive at the peak?", "tensors", 0.05
            ),
        ),
        relations=(
            Relation("one checkpoint per block keeps all inputs", "units_per_block", ">=", "layers"),
            Relation("a quarter of the layers keeps far fewer of them", "units_per_block_quarter", "<=", 20),
            Relation(
                "with sqrt(L) segments, a quarter of the layers keeps a half",
                "units_quarter_of_the_layers",
                "==",
                8,
                0.15,
            ),
            Relation("sqrt(L) segments keep fewer", "units_square_root", "<", "units_per_block"),
        ),
        refuted=(
            Relation(
                "one checkpoint per block keeps 2 sqrt(L) tensors", "units_per_block", "==", "twice_square_root", 0.1
            ),
        ),
        sources=(CHECKPOINTING_PAPER, SEQUENCE_PAPER, own_run("trap-checkpointing-every-block-is-sqrt")),
        items=(146,),
        chapter=MEMORY,
    ),
)
