"""Lab: a sampler that resumes exactly, on any number of ranks."""

from meshwright_practice.labs.lab import Lab, LabFunction

LAB = Lab(
    id="resumable_sampler",
    title="A sampler that resumes exactly",
    problem=(
        "A run that restarts must not train on a sample twice, nor leave one out, even if it restarts on another "
        "number of ranks. torch's DistributedSampler has no position, and repeats samples to fill the last batch. Here "
        "the order of samples is a pure function of the seed and the epoch, the state is a position in that order, and "
        "a rank takes its part of the global batch from it. Epochs follow one another without a gap: a batch may have "
        "the last samples of one epoch and the first ones of the next."
    ),
    functions=(
        LabFunction(
            "start", ("seed", "length"), "dict", "returns the state at the beginning, as a small dict for JSON"
        ),
        LabFunction(
            "next_batch",
            ("state", "rank", "ranks", "batch_size"),
            "tuple[list[int], dict]",
            "returns this rank's samples of the next global batch, and the state after it, the same on all ranks",
        ),
    ),
    checks=(
        "functions return",
        "indices",
        "ranks do not overlap",
        "every sample once per epoch",
        "order changes with the epoch",
        "order depends on the seed",
        "same state on all ranks",
        "any number of ranks",
        "resume",
        "resume on other ranks",
        "size of the state",
        "random state",
    ),
    hints=(
        "Think of one endless list: the shuffled samples of epoch 0, then those of epoch 1, and so on. A position "
        "says everything: epoch, offset = divmod(position, length).",
        "random.Random(f'{seed} {epoch}').shuffle(order) uses a generator of its own, so the rest of the program keeps "
        "its random numbers. With seed + epoch, epoch 1 of seed 0 would be epoch 0 of seed 1.",
        "The global batch is the positions from `position` to `position + batch_size`. Rank r takes every N-th one, "
        "starting with r. The position counts the samples of all ranks together, so it means the same for any N.",
        "The state needs the seed, the length and the position, and nothing else: the order follows from them.",
    ),
    items=(82, 101, 107, 124),
    chapter="handbook/data-and-resume.md",
)
