"""The collectives of activations and their gradients on one rank: tensor, context, expert and pipeline parallelism.

T is the number of tokens of a micro-batch on one context rank, W the width, e the bytes per element, w those of a
gradient that is summed over ranks, c the context-parallel degree, H the query heads, K the key and value heads, D the
head dimension, all divided by the tensor-parallel degree t where they are; E the experts. Per block and micro-batch:

| axis | forward | backward |
|---|---|---|
| tensor | all-gather and reduce-scatter of T W e, around attention and around the dense feed-forward | the same |
| tensor, without sequence parallelism | an all-reduce of T W e after each | the same |
| tensor, embedding and head | reduce-scatter and all-gather | all-gather and reduce-scatter |
| tensor, loss | three all-reduces of one number per token | |
| context, ring | c - 1 sends of 2 K D T e | c - 1 sends of 2 K D T e, and c - 1 of 2 K D T w |
| context, all-to-all | (H + 2 K') D T e and H D T e, with K' = lcm(K, c) | the same |
| context, gather | an all-gather of 2 K D T c e | the same, and a reduce-scatter |
| expert | 8 E bytes of token counts; tokens to the experts and back | tokens to the experts and back |
| context+tensor | 8 E bytes per sample: expert choices, if the load-balancing loss has a weight | |
| pipeline | one send of T W / t elements per stage | the same |

Activation checkpointing repeats what its recomputation needs. A rank sends T active / t tokens of W e bytes to experts,
and receives as many back. How many its experts receive depends on the data: for what they send back the formula assumes
a uniform load, and is exact for the sum over the ranks of an expert group.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from meshwright.base.config import RunConfig
from meshwright.base.dtypes import COMPUTE_BYTES, parameter_bytes, residual_bytes, weight_bytes
from meshwright.base.hardware.all_to_all import reachable_nodes, token_copies
from meshwright.base.hardware.links import GroupPlacement, collective_seconds, token_all_to_all_seconds
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.topology.layout import Layout
from meshwright.planner.cost.terms.expert_overlap import exposed_all_to_all
from meshwright.planner.cost.terms.layer_matmuls import routed_tokens
from meshwright.planner.cost.terms.layer_time import LayerShape, LayerTime
from meshwright.planner.cost.trace.operations import Communicate
from meshwright.planner.cost.units.group_placements import group_placements
from meshwright.planner.cost.units.rank_units import TensorModules
from meshwright.planner.workload.planned_job import PlannedJob


def data_dependent_axes(config: RunConfig, layout: Layout) -> dict[str, str]:
    """The axes whose volume depends on the data, each with the reason."""
    if config.model.capacity_factor and layout.expert > 1:
        return {"expert": "the number of tokens over capacity_factor depends on the data"}
    return {}


@dataclass(frozen=True)
class Messages:
    """The collectives of one module for one micro-batch."""

    forward: tuple[Communicate, ...] = ()
    backward: tuple[Communicate, ...] = ()
    recomputed: tuple[Communicate, ...] = ()
    """what activation checkpointing repeats before backward"""


class ActivationMessages:
    """The collectives of activations of a job."""

    def __init__(self, job: PlannedJob, shape: LayerShape) -> None:
        self.job, self.shape, self.config = job, shape, job.run_config
        self.placements = group_placements(job)
        config = job.run_config
        self.tokens = shape.tokens
        self.residual_tokens = shape.tokens // job.layout.tensor
        self.element_bytes = COMPUTE_BYTES[config.precision.compute] if config else shape.rate.element_bytes
        self.gradient_bytes = parameter_bytes(config) if config else max(4, self.element_bytes)
        self.activation_bytes = self.tokens * job.model.width * self.element_bytes
        selective = job.activation_checkpoint == "selective" and job.trainer.torch_native
        self.recomputes = job.activation_checkpoint == "full" or selective

    def collective(
        self,
        axis: str,
        collective: str,
        message_bytes: float,
        calls: float,
        placement: GroupPlacement | None = None,
        overlap: float = 0.0,
    ) -> Communicate:
        """`overlap` is the fraction of the time that the trainer hides under the computation of the block."""
        placement = placement or self.placements[axis]
        seconds = calls * collective_seconds(self.job.cluster, collective, message_bytes, placement)
        return Communicate(axis, collective, message_bytes, calls, placement, seconds, overlap * seconds)

    def block(self, moe: bool, layer: LayerTime, tensor: TensorModules | None = None) -> Messages:
        """The collectives of one block with these times. They also run while the device waits for the host."""
        parts = [self.tensor(moe, tensor or TensorModules()), self.context(layer.attention), self.expert(moe, layer)]
        forward = [message for part in parts for message in part.forward if message.calls]
        backward = [message for part in parts for message in part.backward if message.calls]
        recomputed = [message for part in parts for message in part.recomputed if message.calls]
        in_backward = hidden_by_host([*backward, *recomputed], layer.backward_idle)
        return Messages(
            tuple(hidden_by_host(forward, layer.forward_idle)),
            tuple(in_backward[: len(backward)]),
            tuple(in_backward[len(backward) :]),
        )

    def tensor(self, moe: bool, block: TensorModules) -> Messages:
        """Of a mixture of experts, only shared experts are tensor parallel."""
        if self.job.layout.tensor == 1:
            return Messages()
        trainer, full = self.job.trainer, self.job.activation_checkpoint == "full"
        modules = tensor_modules(self.job.model, moe)

        def of(collective: str, calls: float) -> Communicate:
            return self.collective(
                "tensor", collective, self.activation_bytes, calls, overlap=trainer.tensor_overlap
            )  # fmt: skip

        if not trainer.sequence_parallel:
            all_reduce = (of("all_reduce", modules),)
            return Messages(all_reduce, all_reduce, all_reduce if full else ())
        all_gathers = modules - block.gathers_frozen + (modules if trainer.regathers_in_backward else 0)
        scatters = modules - (0 if block.repeats_last_scatter else 1)
        return Messages(
            (of("all_gather", modules), of("reduce_scatter", modules)),
            (of("all_gather", all_gathers), of("reduce_scatter", modules - block.scatters_frozen)),
            (of("all_gather", modules * self.recomputes), of("reduce_scatter", scatters if full else 0)),
        )

    def context(self, attention_seconds: float) -> Messages:
        """Ring attention overlaps its sends with attention."""
        ranks, model, tensor = self.job.layout.context, self.job.model, self.job.layout.tensor
        if ranks == 1:
            return Messages()
        heads, kv_heads = max(1, model.heads // tensor), max(1, model.kv_heads // tensor)
        per_head: float = self.tokens * model.head_dim
        kv_elements: float = 2 * kv_heads * per_head
        # A Meshwright run pads the values of latent attention to the size of keys.
        if model.latent_attention is not None and self.config is None:
            kv_elements = self.tokens * model.attention_width / tensor
        if isinstance(model, Architecture) and model.attention_share < 1:  # the other mixers exchange nothing here
            per_head, kv_elements = (elements * model.attention_share for elements in (per_head, kv_elements))
        if self.job.context_method == "all-to-all":
            exchanged = (heads + 2 * lcm(kv_heads, ranks)) * per_head, heads * per_head
            forward = tuple(self.collective("context", "all_to_all", n * self.element_bytes, 1) for n in exchanged)
            return Messages(forward, forward, forward if self.recomputes else ())
        kv_bytes = kv_elements * self.element_bytes
        if self.job.context_method == "gather":
            gather = (self.collective("context", "all_gather", kv_bytes * ranks, 1),)
            scatter = self.collective("context", "reduce_scatter", kv_bytes * ranks, 1)
            return Messages(gather, (*gather, scatter), gather if self.recomputes else ())
        placement = self.placements["context"]
        pair = GroupPlacement(2, min(2, placement.ranks_per_node)) if placement.nodes == 1 else GroupPlacement(2, 1)
        send = self.collective("context", "send", kv_bytes, ranks - 1, pair)
        gradients = self.collective("context", "send", kv_elements * self.gradient_bytes, ranks - 1, pair)
        forward = (replace_hidden(send, attention_seconds),)
        hidden = 2.5 * attention_seconds * send.seconds / max(1e-12, send.seconds + gradients.seconds)
        backward = (replace_hidden(send, hidden), replace_hidden(gradients, 2.5 * attention_seconds - hidden))
        return Messages(forward, backward, forward if self.recomputes else ())

    def expert(self, moe: bool, layer: LayerTime) -> Messages:
        """Dispatch and combine of the tokens of one MoE block."""
        if not moe:
            return Messages()
        job, model = self.job, self.job.model
        forward: list[Communicate] = []
        backward: list[Communicate] = []
        if job.layout.expert > 1:
            counts = [self.collective("expert", "all_to_all", 8 * model.experts, 1)] if self.config else []
            # Another micro-batch that computes meanwhile runs a pass of the other direction.
            forward = counts + self.tokens_to_experts(layer.backward / 2)
            backward = self.tokens_to_experts(layer.forward / 2)
        ranks = job.layout.context * job.layout.tensor
        if self.config is not None and ranks > 1 and self.config.model.router_aux_loss:
            placement = GroupPlacement(ranks, min(ranks, job.cluster.devices_per_node))
            choices = 8 * job.batch.micro * model.experts
            forward = [*forward, self.collective("context+tensor", "all_reduce", choices, 1, placement)]
        return Messages(tuple(forward), tuple(backward), tuple(forward) if self.recomputes else ())

    def tokens_to_experts(self, other_compute: float) -> list[Communicate]:
        """Dispatch and combine in one pass. `other_compute` are the seconds that another micro-batch may hide."""
        job, trainer, model, placement = self.job, self.job.trainer, self.job.model, self.placements["expert"]
        overlap = trainer.expert_overlap
        if placement.nodes > 1 and job.stages_per_rank > 1:
            overlap = max(overlap, trainer.interleaved_expert_overlap)
        active = model.experts_active
        node_limit = reachable_nodes(placement.nodes, model.routing_groups, model.routing_groups_active)
        ranks, per_node = placement.ranks, placement.ranks_per_node
        copies = token_copies(model.experts, active, ranks, per_node, trainer.deduplicates_tokens, node_limit)
        share = copies.total * placement.ranks / (placement.ranks - 1) / active
        messages = []
        for element_bytes in (trainer.dispatch_bytes or self.element_bytes, self.element_bytes):
            busiest = routed_tokens(self.shape) / active * model.width * element_bytes
            seconds = token_all_to_all_seconds(job.cluster, busiest, copies, placement)
            exposed = exposed_all_to_all(seconds, overlap, other_compute)
            size = self.residual_tokens * active * model.width * self.element_bytes
            message = size if self.config is not None else busiest * active * share
            messages.append(Communicate("expert", "all_to_all", message, 1, placement, seconds, seconds - exposed))
        return messages

    def embedding(self, frozen: bool) -> Messages:
        """The lookup in a vocabulary-parallel embedding."""
        if self.job.layout.tensor == 1:
            return Messages()
        element_bytes: float = self.element_bytes
        if self.config is not None:
            element_bytes = parameter_bytes(self.config) if frozen else weight_bytes(self.config)
        message = self.tokens * self.job.model.width * element_bytes
        if not self.job.trainer.sequence_parallel:
            return Messages((self.collective("tensor", "all_reduce", message, 1),))
        backward = () if frozen else (self.collective("tensor", "all_gather", message, 1),)
        return Messages((self.collective("tensor", "reduce_scatter", message, 1),), backward)

    def head(self) -> Messages:
        """The vocabulary-parallel head and its loss: the maximum, the sum of exponentials and the label's logit."""
        if self.job.layout.tensor == 1:
            return Messages()
        numbers = self.tokens * self.gradient_bytes
        loss = [self.collective("tensor", "all_reduce", numbers, 3)]
        if self.config is not None and self.config.rl.enabled:  # the entropy gathers three such numbers of every rank
            loss.append(self.collective("tensor", "all_gather", numbers * self.job.layout.tensor, 3))
        if not self.job.trainer.sequence_parallel:
            return Messages(tuple(loss), (self.collective("tensor", "all_reduce", self.activation_bytes, 1),))
        gather = self.collective("tensor", "all_gather", self.activation_bytes, 1)
        return Messages((gather, *loss), (self.collective("tensor", "reduce_scatter", self.activation_bytes, 1),))

    def send(self) -> Communicate:
        """The hidden states of a micro-batch to the next stage, or their gradients to the previous one."""
        job, trainer = self.job, self.job.trainer
        if self.config is not None:
            message: float = self.residual_tokens * job.model.width * residual_bytes(self.config)
        else:
            divided = job.layout.tensor if trainer.sequence_parallel or trainer.scatters_stage_outputs else 1
            message = trainer.stage_output_bytes * self.tokens * job.model.width / divided
        return self.collective("pipeline", "send", message, 1, overlap=trainer.pipeline_overlap)


def tensor_modules(model: Architecture | TracedModel, moe: bool) -> float:
    """Tensor-parallel modules of a layer, each with a pair of collectives, in the mean over its kinds of blocks."""
    if not isinstance(model, Architecture):
        return 1 if moe and not model.shared_ffn else 2
    parallel = ("dense", "moe") if model.shared_ffn else ("dense",)
    return model.mean(moe, lambda kind: (kind.mixer != "none") + (kind.ffn in parallel))


def replace_hidden(message: Communicate, seconds: float) -> Communicate:
    return message._replace(hidden=min(message.seconds, seconds))


def hidden_by_host(messages: list[Communicate], idle: float) -> list[Communicate]:
    """Collectives also run while the device waits `idle` seconds for the host to launch the next kernels."""
    exposed = sum(message.seconds - message.hidden for message in messages)
    if not idle or exposed <= 0:
        return messages
    share = min(1.0, idle / exposed)
    return [
        message._replace(hidden=message.hidden + share * (message.seconds - message.hidden)) for message in messages
    ]
