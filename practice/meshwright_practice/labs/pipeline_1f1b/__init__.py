"""Lab: a pipeline of ranks with the 1F1B schedule."""

from meshwright_practice.labs.lab import Lab, LabFunction

LAB = Lab(
    id="pipeline_1f1b",
    title="A pipeline with the 1F1B schedule",
    problem=(
        "The model is divided into stages, one per rank. A stage receives activations from the stage before it and "
        "sends its own to the next one; gradients of activations flow back. GPipe runs all forwards and then all "
        "backwards, so a stage keeps the activations of all M micro-batches. 1F1B has the same bubble and keeps at "
        "most P - s of them on stage s of P: after P - s - 1 forwards, a stage alternates one forward and one backward."
    ),
    functions=(
        LabFunction(
            "schedule",
            ("stage", "stages", "micro_batches"),
            "list[tuple[str, int]]",
            'returns the order of a stage: ("F", i) for the forward of micro-batch i, and ("B", i) for its backward',
        ),
        LabFunction(
            "pipeline_step",
            ("module", "inputs", "targets", "loss", "shape"),
            "list[Tensor]",
            "runs all micro-batches through the stage of this rank, and returns the losses on the last stage",
        ),
    ),
    checks=(
        "schedule returns",
        "order",
        "few micro-batches",
        "4 ranks return",
        "losses",
        "gradients",
        "executed order",
        "live activations",
        "bytes",
    ),
    hints=(
        "Draw the order of the last stage first: F0 B0 F1 B1 ... The stage before it is one forward ahead, the stage "
        "before that two.",
        "The warm-up of stage s has min(P - s - 1, M) forwards. Then every forward is followed by one backward, and "
        "the rest of the backwards come at the end.",
        "A received activation is a leaf: call requires_grad_() on it, so that its .grad exists after the backward; "
        "that is what the stage before it needs.",
        "On the last stage call loss(output, target).backward(); on the others call "
        "output.backward(received_gradient).",
        "In the steady state two neighbours send to each other at the same time. With blocking sends both wait for "
        "ever: start sends with dist.isend, keep the handles, and wait for them at the end.",
        "Keep the input and the output of a micro-batch in a dictionary, and pop them in its backward.",
    ),
    items=(43, 149, 154, 155),
    chapter="handbook/pipeline.md",
)
