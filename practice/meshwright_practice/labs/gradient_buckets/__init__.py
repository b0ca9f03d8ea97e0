"""Lab: gradient buckets whose all-reduce overlaps with backward."""

from meshwright_practice.labs.lab import Lab, LabFunction

LAB = Lab(
    id="gradient_buckets",
    title="Gradient buckets with overlap",
    problem=(
        "Data-parallel ranks need the mean of their gradients. One all-reduce per parameter pays the latency many "
        "times, and one all-reduce of everything can only start when backward has ended. DDP does neither: it groups "
        "parameters into buckets in the order in which their gradients become ready, which is nearly the reverse of "
        "the order in which they were registered, and a hook on every parameter starts an asynchronous all-reduce when "
        "the last gradient of a bucket is ready. Backward goes on meanwhile; only the optimizer waits."
    ),
    functions=(
        LabFunction(
            "make_buckets",
            ("parameters", "bucket_bytes"),
            "list[list[Parameter]]",
            "groups parameters in reverse order; a bucket has at most bucket_bytes of gradients, or one parameter",
        ),
        LabFunction(
            "attach_hooks",
            ("buckets",),
            "state",
            "registers hooks that start an asynchronous all-reduce as soon as all gradients of a bucket are ready",
        ),
        LabFunction(
            "finish",
            ("state",),
            "None",
            "after backward: waits, writes the mean into every .grad, and makes the state ready for the next backward",
        ),
    ),
    checks=(
        "buckets",
        "2 ranks return",
        "gradients",
        "second step",
        "overlap",
        "asynchronous",
        "messages",
        "memory",
        "unused parameter",
        "different layers return",
        "different layers",
    ),
    hints=(
        "parameter.register_post_accumulate_grad_hook(function) calls function(parameter) when parameter.grad is "
        "complete. Count down, per bucket, how many gradients are missing.",
        "When the count reaches zero, copy the gradients of the bucket into one flat tensor "
        "(torch.cat of grad.view(-1)), and start dist.all_reduce(flat, async_op=True). Keep the work handle.",
        "finish waits for every handle, divides by the number of ranks, and copies the slices back into .grad. Then it "
        "sets the counts back and forgets the flat tensors.",
        "A parameter that this step did not use has no gradient, so its bucket never becomes complete. finish starts "
        "the all-reduce of such a bucket itself, with zeros in place of the missing gradient.",
        "Ranks may leave out different parameters, so that other buckets are ready first. A collective adds what the "
        "ranks start next, whatever it is: like DDP, start bucket k only after bucket k - 1. A rank without a gradient "
        "needs the mean as well.",
    ),
    items=(18, 19, 22, 23, 24, 26, 112, 153),
    chapter="handbook/data-parallelism.md",
)
