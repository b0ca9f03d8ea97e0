"""Faults in models, losses and data of users."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.prover.custom_cases import CustomCase
from tests.prover.custom_faults import (
    BATCH_LOSS,
    FORWARD,
    REPLICATE,
    STATE,
    classifier,
    custom_fault,
    rank,
    ranks,
    tokens,
)
from tests.prover.custom_models import WIDTH, Classifier, Points, TokenModel, class_loss, token_loss

# Losses and scales


@custom_fault(REPLICATE, "gradients are 2 times as large: summed over the replicate axis (2) once too often")
def loss_times_the_number_of_ranks(layout):
    return classifier(layout, loss=lambda logits, labels: class_loss(logits, labels) * ranks())


@custom_fault(REPLICATE, FORWARD)
def outputs_divided_by_the_number_of_ranks(layout):
    class Divided(Classifier):
        def forward(self, x):
            return super().forward(x) / ranks()

    return classifier(layout, Divided)


@custom_fault(REPLICATE, "the loss is the mean over the batch, not the sum")
def mean_loss_that_is_a_sum_for_micro_batches_of_two(layout):
    return classifier(layout, loss=lambda logits, labels: 2 * F.cross_entropy(logits, labels))


@custom_fault(REPLICATE, BATCH_LOSS)
def weighted_loss_divided_by_the_weights_of_the_batch(layout):
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def loss(logits, labels):
        return len(labels) * F.cross_entropy(logits, labels, weight=weight.to(logits.dtype))

    return classifier(layout, loss=loss)


@custom_fault(REPLICATE, BATCH_LOSS)
def penalty_on_the_weights_in_every_micro_batch(layout):
    class Penalized(Classifier):
        def forward(self, x):
            return super().forward(x), self.first.weight.square().sum()

    return classifier(layout, Penalized, loss=lambda out, labels: class_loss(out[0], labels) + 0.1 * out[1])


@custom_fault(REPLICATE, BATCH_LOSS)
def contrastive_loss_between_the_samples_of_a_batch(layout):
    return classifier(layout, loss=lambda logits, labels: class_loss(logits @ logits.T, torch.arange(len(labels))))


@custom_fault(REPLICATE, FORWARD)
def labels_shifted_on_one_rank(layout):
    return tokens(layout, loss=lambda logits, labels: token_loss(logits, labels.roll(rank(), dims=1)))


# Forward passes that depend on the rank, the batch or earlier calls


@custom_fault(REPLICATE, "batch statistics by rank (BatchNorm): the output of norm")
def batch_norm_by_rank(layout):
    return CustomCase(Classifier(nn.BatchNorm1d(WIDTH)), class_loss, layout, Points())


@custom_fault(REPLICATE, "depends on the other samples of the batch")
def features_centered_over_the_batch(layout):
    class Centered(Classifier):
        def forward(self, x):
            hidden = self.first(x)
            return self.second(hidden - hidden.mean(dim=0))

    return classifier(layout, Centered)


@custom_fault(REPLICATE, FORWARD)
def dropout_seeded_by_rank(layout):
    class Seeded(Classifier):
        def forward(self, x):
            generator = torch.Generator().manual_seed(rank())
            kept = torch.rand(x.shape[1:], generator=generator) < 0.8
            return super().forward(x * kept)

    return classifier(layout, Seeded)


@custom_fault(REPLICATE, STATE)
def noise_from_a_generator_of_its_own(layout):
    class Noisy(Classifier):
        def __init__(self):
            super().__init__()
            self.random = np.random.default_rng(0)

        def forward(self, x):
            return super().forward(x + self.random.standard_normal())

    return classifier(layout, Noisy)


@custom_fault(REPLICATE, STATE)
def scale_that_grows_with_every_call(layout):
    class Counting(Classifier):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (1 + 0.01 * self.calls)

    return classifier(layout, Counting)


@custom_fault(REPLICATE, STATE)
def buffer_changed_in_place_and_used(layout):
    class Moving(Classifier):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(WIDTH))

        def forward(self, x):
            self.center.mul_(0.9).add_(0.1)
            return super().forward(x - self.center)

    return classifier(layout, Moving)


@custom_fault(REPLICATE, FORWARD)
def all_reduce_in_forward_without_gradient(layout):
    class Reduced(Classifier):
        def forward(self, x):
            hidden = self.first(x)
            total = hidden.detach().clone()
            if dist.is_initialized():
                dist.all_reduce(total)
            return self.second(torch.tanh(self.norm(hidden + 0.1 * total)))

    return classifier(layout, Reduced)


@custom_fault(REPLICATE, FORWARD)
def block_skipped_on_one_rank(layout):
    class Skipping(TokenModel):
        def forward(self, tokens):
            hidden = self.embedding(tokens)
            for number, block in enumerate(self.blocks):
                hidden = hidden + (block(hidden) - hidden) * (0.0 if number == rank() == 1 else 1.0)
            return self.head(self.norm(hidden))

    return tokens(layout, Skipping)


@custom_fault(REPLICATE, "tokens of step 0", "let forward change no input in place")
def inputs_changed_in_place(layout):
    class Masking(TokenModel):
        def forward(self, tokens):
            tokens[:, 0] = 0
            return super().forward(tokens)

    return tokens(layout, Masking)


@custom_fault(REPLICATE, "evaluation after step 1", "training is correct")
def evaluation_that_depends_on_the_rank(layout):
    class Evaluated(Classifier):
        def forward(self, x):
            return super().forward(x) * (1.0 if self.training else 1.0 + rank())

    return classifier(layout, Evaluated)


# Gradients


@custom_fault(
    REPLICATE, "2 of 6 gradients are 0.5 times as large: averaged over the replicate axis", "first.weight: a hook"
)
def module_hook_that_divides_by_the_number_of_ranks(layout):
    module = Classifier()
    module.norm.register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] / ranks(),))
    return CustomCase(module, class_loss, layout, Points())


@custom_fault(REPLICATE, "gradient of model.first.weight", "a hook on the tensor, which a copy does not have")
def tensor_hook_that_is_lost(layout):
    module = Classifier()
    module.first.weight.register_hook(lambda gradient: 0.1 * gradient)
    return CustomCase(module, class_loss, layout, Points())


@custom_fault(REPLICATE, "correct down to model.norm.weight and wrong below: a hook, a detach")
def branch_detached_on_several_ranks(layout):
    class Detached(Classifier):
        def forward(self, x):
            hidden = self.first(x)
            return self.second(torch.tanh(self.norm(hidden)) + (hidden.detach() if ranks() > 1 else hidden))

    return classifier(layout, Detached)


@custom_fault(
    REPLICATE, "model.embedding.weight of the original", "the weight is tied in the module and not in the copy"
)
def head_that_keeps_the_weight_of_another_model(layout):
    class Tied(TokenModel):
        def __init__(self):
            super().__init__()
            del self.head
            weight = self.embedding.weight
            self.head = lambda hidden: hidden @ weight.T

    return tokens(layout, Tied)


@custom_fault(REPLICATE, "model.scale", "left out of the optimizer")
def parameter_that_no_rank_registers(layout):
    class Lazy(Classifier):
        def forward(self, x):
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(torch.full((4,), 1.5, dtype=x.dtype))
            return super().forward(x) * self.scale

    return classifier(layout, Lazy)


# Data


@custom_fault(REPLICATE, "not those of the stream", "functions of the index alone")
def dataset_that_draws_random_numbers(layout):
    class Random(Points):
        def __getitem__(self, index):
            values, label = super().__getitem__(index)
            return values + np.float32(os.urandom(1)[0] / 256), label

    return classifier(layout, source=Random())


@custom_fault(REPLICATE, "4 of 8 samples are not those of the stream")
def dataset_that_depends_on_the_rank(layout):
    class Ranked(Points):
        def __getitem__(self, index):
            values, label = super().__getitem__(index)
            return values + np.float32(rank()), label

    return classifier(layout, source=Ranked())


@custom_fault(REPLICATE, "the right samples in another order")
def collate_that_depends_on_the_rank(layout):
    def collate(samples):
        samples = samples[::-1] if rank() else samples
        return np.stack([s[0] for s in samples]), np.array([s[1] for s in samples])

    return classifier(layout, options={"collate": collate})
