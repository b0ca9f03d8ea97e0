"""Public bugs of data, context, expert and pipeline parallelism, and of gradient accumulation."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.prover.custom_faults import rank, ranks
from tests.prover.custom_models import Block, TokenModel, token_loss
from tests.prover.museum import (
    CONTEXT,
    EXPERT,
    EXPERT_SPEC,
    PIPELINE,
    REPLICATE,
    AttentionBlock,
    AttentionModel,
    ExpertBlock,
    ExpertModel,
    case,
    public_bug,
    scale_gradient,
    with_block,
)

# Normalization of the loss


@public_bug("huggingface/transformers/37766", REPLICATE, "mean")
def mean_over_the_micro_batch(layout):
    return case(layout, TokenModel, lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


@public_bug("huggingface/trl/2617", REPLICATE, "mean")
def loss_is_not_divided_by_the_accumulation_steps(layout):
    def loss(logits, labels):
        return 4 * F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return case(layout, TokenModel, loss)


@public_bug("huggingface/trl/3021", REPLICATE, "loss")
def mean_over_the_tokens_of_each_rank(layout):
    def loss(logits, labels):
        return len(labels) * token_loss(logits, labels) / (labels != -100).sum()

    return case(layout, TokenModel, loss)


@public_bug("allenai/open-instruct/1137", REPLICATE, "loss")
def mean_over_samples_of_means_over_tokens(layout):
    def loss(logits, labels):
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (losses.sum(dim=1) / (labels != -100).sum(dim=1)).mean()

    return case(layout, TokenModel, loss)


# Data parallelism and accumulation


class Hooked(TokenModel):
    """A model whose own hooks change the gradients of its blocks on several ranks."""

    def forward(self, tokens):
        if ranks() > 1 and not hasattr(self, "hooks"):
            self.hooks = [self.attach(parameter) for parameter in self.blocks.parameters()]
        return super().forward(tokens)

    def attach(self, parameter):
        raise NotImplementedError


@public_bug("deepspeedai/DeepSpeed/5555", REPLICATE, "blocks.0", "0.5 times as large", "replicate axis")
def gradients_are_divided_by_the_wrong_number_of_ranks(layout):
    class Model(Hooked):
        def attach(self, parameter):
            return parameter.register_hook(lambda gradient: gradient / ranks())

    return case(layout, Model)


@public_bug("deepspeedai/DeepSpeed/7718", REPLICATE, "blocks.0")
def gradients_of_earlier_micro_batches_are_lost(layout):
    class Model(Hooked):
        def attach(self, parameter):
            parameter.seen = None

            def keep_last(gradient):
                earlier, parameter.seen = parameter.seen, gradient.clone()
                return gradient if earlier is None else gradient - earlier

            return parameter.register_hook(keep_last)

    return case(layout, Model)


@public_bug("pytorch/torchtitan/1733", REPLICATE, "blocks.0")
def accumulated_gradients_are_scaled_in_every_micro_step(layout):
    class Model(Hooked):
        def attach(self, parameter):
            def scale(p):
                p.grad.div_(2)

            return parameter.register_post_accumulate_grad_hook(scale)

    return case(layout, Model)


# Context parallelism


@public_bug("NVIDIA/Megatron-LM/673", CONTEXT, "2", "context axis")
def loss_is_multiplied_by_the_context_degree(layout):
    return case(layout, AttentionModel, lambda logits, labels: scale_gradient(token_loss(logits, labels), ranks()))


@public_bug("hamishivi/tmax/9", CONTEXT, "0.5 times as large", "context axis")
def gradients_are_divided_by_the_sequence_parallel_degree(layout):
    return case(layout, AttentionModel, lambda logits, labels: scale_gradient(token_loss(logits, labels), 1 / ranks()))


@public_bug("deepspeedai/DeepSpeed/5248", CONTEXT, "correct down to model.norm.weight and wrong below", "context")
def blocks_are_scaled_by_the_sequence_parallel_degree(layout):
    class Scaled(AttentionBlock):
        def forward(self, x):
            return scale_gradient(super().forward(x), ranks())

    return case(layout, with_block(AttentionModel, Scaled))


@public_bug("NVIDIA/Megatron-LM/1464", CONTEXT, "model.embedding.weight", "context")
def keys_receive_no_gradient_from_other_chunks(layout):
    class Halved(AttentionBlock):
        def attend(self, q, k, v):
            return super().attend(q, scale_gradient(k, 1 / ranks()), v)

    return case(layout, with_block(AttentionModel, Halved))


@public_bug("NVIDIA/Megatron-LM/3943", CONTEXT, "model.embedding.weight", "context")
def auxiliary_loss_is_divided_by_the_context_degree(layout):
    def loss(logits, labels):
        auxiliary = 0.1 * logits.square().sum(dim=-1)[labels != -100].sum()
        return token_loss(logits, labels) + scale_gradient(auxiliary, 1 / ranks())

    return case(layout, AttentionModel, loss)


# Expert parallelism


def expert_case(layout, block: type[ExpertBlock], loss=token_loss):
    return case(layout, with_block(ExpertModel, block), loss, spec=EXPERT_SPEC)


class ScaledExperts(ExpertBlock):
    """Experts whose outputs are right and whose gradients are scaled."""

    factor = staticmethod(lambda: float(ranks()))

    def forward(self, x):
        hidden = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(hidden).softmax(dim=-1).topk(2)
        # Only the experts' own weights see the factor: it is taken back for the gradient of the rows.
        out = self.experts(
            scale_gradient(hidden, 1 / self.factor()), chosen, scale_gradient(weights, 1 / self.factor())
        )
        return x + scale_gradient(out, self.factor()).view_as(x)


@public_bug("NVIDIA/Megatron-LM/5956", EXPERT, "experts", "2 times as large")
def expert_gradients_are_averaged_over_too_few_ranks(layout):
    return expert_case(layout, ScaledExperts)


@public_bug("deepspeedai/DeepSpeed/5618", EXPERT, "experts", "0.5 times as large")
def expert_gradients_are_divided_twice(layout):
    return expert_case(layout, type("Divided", (ScaledExperts,), {"factor": staticmethod(lambda: 1 / ranks())}))


@public_bug("pytorch/pytorch/160285", EXPERT, "experts", "4 times as large")
def expert_gradients_are_summed_over_tokens_and_ranks(layout):
    return expert_case(layout, type("Squared", (ScaledExperts,), {"factor": staticmethod(lambda: float(ranks() ** 2))}))


@public_bug("databricks/megablocks/20", EXPERT, "correct down to model.norm.weight and wrong below")
def second_matrix_of_the_experts_is_not_scaled(layout):
    class Unscaled(ExpertBlock):
        def forward(self, x):
            hidden = self.norm(x).flatten(0, 1)
            weights, chosen = self.router(hidden).softmax(dim=-1).topk(2)
            out = self.experts(hidden, chosen, weights)
            return x + scale_gradient(out, ranks()).view_as(x)

    return expert_case(layout, Unscaled)


@public_bug("huggingface/transformers/48687", EXPERT, "correct down to model.blocks.1.experts.up and wrong below")
def router_receives_the_gradient_of_one_choice_alone(layout):
    class First(ExpertBlock):
        def route(self, weights, _chosen):
            first, second = weights.unbind(dim=-1)
            return torch.stack((first, second.detach() if ranks() > 1 else second), dim=-1)

    return expert_case(layout, First)


@public_bug("huggingface/transformers/48205", EXPERT, "correct down to model.blocks.1.experts.up and wrong below")
def scores_of_experts_on_other_ranks_are_masked_in_backward(layout):
    class Masked(ExpertBlock):
        def route(self, weights, chosen):
            if ranks() == 1:
                return weights
            local = chosen // (4 // ranks()) == rank()
            return torch.where(local, weights, weights.detach())

    return expert_case(layout, Masked)


# Pipelines and tied weights


class TiedModel(TokenModel):
    def __init__(self) -> None:
        super().__init__(tie=True)


@public_bug("uw-syfi/piper/13", REPLICATE, "embedding.weight")
def tied_head_is_a_copy_whose_gradient_is_lost(layout):
    class Copied(TiedModel):
        def forward(self, tokens):
            hidden = self.hidden_states(tokens)
            weight = self.head.weight
            return F.linear(self.norm(hidden), weight.detach() if ranks() > 1 else weight)

    return case(layout, Copied)


@public_bug("NVIDIA/Megatron-LM/844", REPLICATE, "embedding.weight")
def gradient_of_a_tied_weight_is_summed_before_it_is_complete(layout):
    class Partly(TiedModel):
        def forward(self, tokens):
            hidden = self.hidden_states(tokens)
            weight = self.head.weight
            return F.linear(self.norm(hidden), weight.detach() if ranks() > 1 and rank() == 1 else weight)

    return case(layout, Partly)


@public_bug("pytorch/torchtitan/2972", PIPELINE, "pipeline")
def pipeline_gradients_are_not_divided_by_the_tokens(layout):
    return case(
        layout, TokenModel, lambda logits, labels: scale_gradient(token_loss(logits, labels), 1.0 + (ranks() > 1))
    )


@public_bug("NVIDIA/Megatron-LM/656", PIPELINE, "embedding.weight")
def head_and_embedding_are_untied_by_the_pipeline(layout):
    class Untied(TiedModel):
        def forward(self, tokens):
            hidden = self.hidden_states(tokens)
            weight = self.head.weight
            return F.linear(self.norm(hidden), weight.detach() if dist.is_initialized() and ranks() > 1 else weight)

    return case(layout, Untied)


@public_bug("NVIDIA/Megatron-LM/5916", REPLICATE, "blocks.0.down")
def part_of_the_gradient_reaches_one_rank_only(layout):
    class Portion(Block):
        def forward(self, x):
            hidden = self.inner(self.up(self.norm(x)))
            weight = self.down.weight
            kept = torch.zeros_like(weight)
            kept[rank() :: ranks()] = 1.0
            weight = weight.detach() + (weight - weight.detach()) * kept
            return x + F.linear(hidden, weight, self.down.bias)

    return case(layout, with_block(TokenModel, Portion))
