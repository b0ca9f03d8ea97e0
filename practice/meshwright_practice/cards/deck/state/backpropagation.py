"""Cards on backpropagation: what a backward pass needs, computes and leaves behind."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.references import AUTOGRAD_NOTES, BACKPROPAGATION_PAPER, ZERO_GRAD_DOCS, own_run

CHAPTER = "handbook/numerics.md"
CHAIN = Experiment(
    "state.backpropagation:chain_rule", knobs=(Knob("width", (5, 8, 16), "width of the input of the chain"),)
)
STORAGE = Experiment(
    "state.gradient_storage:lifecycle", knobs=(Knob("backward_passes", (2, 3, 4), "backward passes before an update"),)
)

CARDS = (
    Card(
        id="backward-needs-weights",
        kind="state placement",
        question="What does the backward pass of a linear layer need its weight matrix for?",
        answer=(
            "For the gradient of its input, the error signal that the layer below continues with. The gradient of the "
            "weight itself does not need the weight: it is the product of the incoming gradient and the saved input. "
            "So a layer keeps its input for its own gradient, and its weight for those below. A first layer whose "
            "input needs no gradient does not need its weight at all. This is why FSDP must gather weights again for "
            "backward, and why nobody may change them in between."
        ),
        notes=(
            "nn.Linear computes y = x W^T with rows as samples. With G = dL/dy: dL/dx = G W, dL/dW = G^T x. autograd "
            "saves W and x at forward and checks a version counter: a weight that is changed in place before backward "
            "raises an error. FSDP's resharding frees the storage and gathers the same values again."
        ),
        mistake="The weight is said to be needed for its own gradient. That one needs the input.",
        experiment=Experiment(
            "state.backpropagation:needs_weight", knobs=(Knob("width", (6, 12), "width of the feed-forward"),)
        ),
        predictions=(
            Prediction(
                "weights_saved",
                "Three matrices, and an input that needs a gradient: how many weights does autograd save?",
                "weights",
            ),
            Prediction(
                "weights_saved_without_input_gradient",
                "Two of the matrices multiply the input. How many weights are saved if the input needs no gradient?",
                "weights",
            ),
        ),
        relations=(
            Relation("the gradient of a weight follows without the weight", "own_gradient_error", "<=", 1e-12),
            Relation("that of the layer below follows with it", "below_error_with_weight", "<=", 1e-12),
            Relation("with another weight it is wrong", "below_error_with_other_weight", ">", 0.1),
            Relation("all three weights are saved", "weights_saved", "==", 3),
            Relation(
                "those that multiply an input without gradient are not", "weights_saved_without_input_gradient", "==", 1
            ),
            Relation("a weight that has changed since is refused", "changed_weight_refused", "==", 1),
        ),
        refuted=(
            Relation(
                "backward saves every weight, whatever needs a gradient",
                "weights_saved_without_input_gradient",
                "==",
                "weights_saved",
            ),
        ),
        sources=(AUTOGRAD_NOTES, BACKPROPAGATION_PAPER, own_run("backward-needs-weights")),
        items=(128,),
        chapter=CHAPTER,
    ),
    Card(
        id="chain-rule-of-three-layers",
        kind="numerics",
        question="Write the gradient of the first matrix of h1 = W1 x, h2 = W2 h1, h3 = W3 h2 with the loss L(h3).",
        answer=(
            "Start at the loss and go down: the signal at h3 is dL/dh3; one layer below it is W3 transposed times "
            "that, then W2 transposed times that. The gradient of W1 is this signal times x transposed: W2^T W3^T "
            "(dL/dh3) x^T, with columns as samples. For half the squared distance to y, dL/dh3 is h3 - y. With an "
            "activation function, multiply the signal elementwise by its slope at each layer. The order of the factors "
            "follows from the shapes."
        ),
        notes=(
            "Recursion, columns as samples: delta_3 = dL/dh3, delta_i = W_{i+1}^T delta_{i+1}, dL/dW_i = delta_i "
            "h_{i-1}^T, with h_0 = x. With h_i = f(W_i h_{i-1}), delta refers to the input of f: delta_i = (W_{i+1}^T "
            "delta_{i+1}) * f'. Rows as samples, h = x W: delta_i = delta_{i+1} W_{i+1}^T, dL/dW_i = h_{i-1}^T "
            "delta_i. The run compares each with central differences (step 1e-6, error near 1e-10), and the trainer's "
            "own gradient of a decoder block, too."
        ),
        mistake="Factors are written from left to right as the chain rule is spoken. Matrices do not commute.",
        experiment=CHAIN,
        claims=(
            claim("W2^T W3^T (h3 - y) x^T is the gradient for half the squared distance.", "column_error", "<=", 1e-6),
            claim("(h3 - y) is right for the mean of squares, too.", "mean_loss_error", "<=", 1e-6),
            claim(
                "With tanh after the first layer, the slope may be left out.", "tanh_error_without_slope", "<=", 1e-6
            ),
            claim("The row convention gives the same gradient, transposed.", "row_error", "<=", 1e-6),
        ),
        relations=(
            Relation("the column form agrees with finite differences", "column_error", "<=", 1e-8),
            Relation("so does the row form", "row_error", "<=", 1e-8),
            Relation("so does autograd", "autograd_error", "<=", 1e-8),
            Relation("so does tanh with its slope", "tanh_error", "<=", 1e-8),
            Relation("tanh without its slope does not", "tanh_error_without_slope", ">", 0.1),
            Relation("the trainer's gradient of a decoder agrees along its direction", "decoder_error", "<=", 1e-4),
        ),
        refuted=(Relation("h3 - y is the derivative of any loss", "mean_loss_error", "<=", 1e-6),),
        sources=(BACKPROPAGATION_PAPER, AUTOGRAD_NOTES, own_run("chain-rule-of-three-layers")),
        items=(129, 130),
        chapter=CHAPTER,
    ),
    Card(
        id="vanishing-gradients",
        kind="numerics",
        question="Where do vanishing and exploding gradients come from?",
        answer=(
            "The signal at a layer is the product of the Jacobians of all layers above it: weights and slopes of the "
            "activation functions. If each factor shrinks the norm by a little, the product shrinks exponentially with "
            "depth; if each grows it, the product explodes. Weights alone can be held at gain one, by initialization "
            "or norms, but a saturating activation still shrinks the signal. Residual connections add an identity to "
            "each factor, so the product keeps a path of gain one."
        ),
        notes=(
            "For linear layers with orthogonal weights times g, the norm at layer 1 of L is g^(L - 1) times that at "
            "layer L, exactly. With tanh the factor is also at most max |f'| = 1 per layer, and less where units "
            "saturate. Clipping by norm limits an explosion after the fact; it cannot restore a signal that has "
            "vanished."
        ),
        mistake="Only the weights are blamed. The slopes are factors as well.",
        experiment=Experiment(
            "state.backpropagation:depth",
            knobs=(
                Knob("layers", (20, 10, 50), "layers of the chain"),
                Knob("gain", (0.9, 0.5, 1.1), "norm by which every linear layer multiplies a signal"),
            ),
        ),
        predictions=(
            Prediction(
                "linear",
                "20 linear layers with gain 0.9: what is the norm of the signal at layer 1?",
                "of the norm at layer 20",
            ),
        ),
        relations=(
            Relation("the norm is the gain to the power of 19", "linear", "==", "gain_to_the_depth", 1e-9),
            Relation("gain 1 keeps it", "linear_gain_1", "==", 1.0, 1e-9),
            Relation("tanh shrinks it at gain 1", "tanh_gain_1", "<", 0.9),
        ),
        refuted=(Relation("with weights of gain 1 nothing vanishes", "tanh_gain_1", ">=", "linear_gain_1", 0.01),),
        sources=(BACKPROPAGATION_PAPER, own_run("vanishing-gradients")),
        items=(130,),
        chapter=CHAPTER,
    ),
    Card(
        id="where-gradients-live",
        kind="state placement",
        question="Where do gradients live between backward and the update? Does the optimizer know the loss?",
        answer=(
            "On the parameters: every parameter has a tensor .grad of its own shape and dtype. backward computes "
            "gradients and adds them to .grad; it does not overwrite. The optimizer was given the parameters, reads "
            ".grad and updates them. It knows neither the loss nor the model: gradients that something else wrote, "
            "such as an all-reduce or a clipping function, are as good as any. Then .grad is cleared, and by default "
            "that means it is set to None and its memory is freed."
        ),
        notes=(
            "Gradient memory equals that of the parameters in the same dtype, from the first backward until zero_grad. "
            "DDP with gradient_as_bucket_view makes .grad a view into its buckets; FSDP2 puts the reduced shard, a "
            "DTensor, into .grad. Non-leaf tensors such as the loss have no .grad unless retain_grad is called. "
            "backward_passes times the same loss gives that multiple of the gradient."
        ),
        mistake="Gradients are imagined inside the optimizer or the loss.",
        experiment=STORAGE,
        predictions=(
            Prediction(
                "growth",
                "backward runs twice on one batch, without clearing. By which factor has a gradient grown?",
                "times",
            ),
            Prediction(
                "bytes_after_backward",
                "How much memory do gradients take after backward, relative to the parameters?",
                "of the parameter bytes",
            ),
        ),
        relations=(
            Relation("every parameter has a gradient", "with_gradient", "==", "parameters"),
            Relation("of its own shape", "same_shape", "==", "parameters"),
            Relation("backward adds", "accumulation_error", "<=", 1e-12),
            Relation("two passes double it", "growth", "==", 2.0, 1e-9),
            Relation(
                "gradients written by hand give the trainer's update", "update_difference_without_loss", "<=", 1e-12
            ),
            Relation("the loss is not a leaf", "loss_is_leaf", "==", 0),
        ),
        refuted=(Relation("backward overwrites", "growth", "==", 1.0, 1e-3),),
        sources=(AUTOGRAD_NOTES, ZERO_GRAD_DOCS, own_run("where-gradients-live")),
        items=(134,),
        chapter="handbook/memory.md",
    ),
    Card(
        id="trap-order-of-the-chain-rule",
        kind="numerics",
        question=(
            "A flash card says: delta_i = delta_{i+1} W_{i+1}^T, dL/dW_i = delta_i h_{i-1}^T, so dL/dW1 = (h3 - y) "
            "W3^T W2^T x^T for h = W x. What is wrong?"
        ),
        answer=(
            "It mixes two conventions. For h = W x with columns as samples, the transposed weight stands on the left: "
            "delta_i = W_{i+1}^T delta_{i+1}, and dL/dW1 = W2^T W3^T (h3 - y) x^T. The form with the weight on the "
            "right belongs to h = x W with rows as samples, and there the gradient is h_{i-1}^T delta_i. With other "
            "than square shapes the mixed product cannot even be computed, and with square ones it is a wrong number. "
            "Also, h3 - y is the derivative of half the squared distance only."
        ),
        notes=(
            "Shapes, columns as samples, B samples: W_i is d_i x d_{i-1}, delta_i is d_i x B, h_{i-1}^T is B x "
            "d_{i-1}; so delta_i h_{i-1}^T has the shape of W_i. nn.Linear stores W and takes rows: y = x W^T, dL/dx = "
            "G W, dL/dW = G^T x. When in doubt, check shapes, then a central difference in float64."
        ),
        mistake="The formula is memorized without its convention.",
        experiment=CHAIN,
        claims=(
            claim(
                "The product (h3 - y) W3^T W2^T x^T exists for the shapes of this chain.",
                "wrong_order_multiplies",
                "==",
                1,
            ),
            claim("Where all matrices are square, it is the gradient.", "wrong_order_error", "<=", 1e-6),
            claim("W2^T W3^T (h3 - y) x^T is the gradient.", "column_error", "<=", 1e-6),
            claim("The row form is right with the transposed weight on the right.", "row_error", "<=", 1e-6),
        ),
        relations=(
            Relation("the column form agrees with finite differences", "column_error", "<=", 1e-8),
            Relation("the row form does", "row_error", "<=", 1e-8),
            Relation("the mixed product does not exist for these shapes", "wrong_order_multiplies", "==", 0),
            Relation("where it exists, it is wrong", "wrong_order_error", ">", 0.1),
        ),
        refuted=(Relation("(h3 - y) W3^T W2^T x^T is the gradient of W1", "wrong_order_error", "<=", 1e-6),),
        sources=(BACKPROPAGATION_PAPER, AUTOGRAD_NOTES, own_run("trap-order-of-the-chain-rule")),
        items=(129, 130),
        chapter=CHAPTER,
    ),
    Card(
        id="trap-zero-grad-writes-zeros",
        kind="state placement",
        question="True or not: optimizer.zero_grad() resets param.grad to zero.",
        answer=(
            "Not by default. Since torch 2.0 it sets .grad to None, which frees the memory. The difference is visible: "
            "code that reads .grad afterwards must expect None, gradient memory falls to nothing between steps, and "
            "the next step treats a parameter without gradient otherwise. With None the optimizer skips it; with a "
            "tensor of zeros, Adam's momentum and weight decay still move it. zero_grad(set_to_none=False) gives the "
            "zeros."
        ),
        notes=(
            "An unused parameter in a step is the case where it matters: under None it stays as it is. Meshwright's "
            "trainer frees gradients, too, except where DDP's buckets are accumulated into: there it zeroes in place, "
            "because new gradients would exist beside the buckets. Writing None also saves the kernel that fills "
            "zeros, and the first backward writes instead of adding."
        ),
        mistake="Zero and None are taken for the same thing.",
        experiment=STORAGE,
        claims=(
            claim("After zero_grad(), every gradient is a tensor of zeros.", "none_after_zero_grad", "==", 0),
            claim("After zero_grad(), gradients take no memory.", "bytes_none", "==", 0),
            claim("An update with .grad = None moves the parameters by momentum.", "movement_with_none", ">", 0),
            claim("An update with gradients of zeros moves the parameters by momentum.", "movement_with_zeros", ">", 0),
        ),
        relations=(
            Relation("zero_grad() leaves None everywhere", "none_after_zero_grad", "==", "parameters"),
            Relation("set_to_none=False leaves zeros everywhere", "zeros_after_zero_grad", "==", "parameters"),
            Relation("None takes no memory", "bytes_none", "==", 0),
            Relation("zeros take that of the parameters", "bytes_zero", "==", 1.0),
            Relation("None skips the update", "movement_with_none", "==", 0),
            Relation("zeros do not", "movement_with_zeros", ">", 1e-6),
            Relation("the trainer frees gradients, too", "none_after_trainer", "==", "parameters"),
        ),
        refuted=(Relation("zero_grad() leaves tensors of zeros", "none_after_zero_grad", "==", 0),),
        sources=(ZERO_GRAD_DOCS, own_run("trap-zero-grad-writes-zeros")),
        items=(134,),
        chapter="handbook/memory.md",
    ),
)
