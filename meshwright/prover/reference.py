"""What three optimizer steps leave behind, computed twice: by one plain process, and by the real step on a layout."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.config import IGNORE_INDEX, DataConfig, RunConfig
from meshwright.data.loader import Loader, MicroBatchDataset
from meshwright.data.source import ConcatenatedSource, Sample, SyntheticSource
from meshwright.data.stream import Stream
from meshwright.models.experts import Experts, update_router_bias
from meshwright.models.init import build_model
from meshwright.optim.adamw import AdamW
from meshwright.parallel.local_shard import full_tensor, local_tensor
from meshwright.parallel.world import World
from meshwright.telemetry.step_clock import StepClock
from meshwright.topology.axes import AXES
from meshwright.topology.layout import Layout
from meshwright.topology.unsupported import validate
from meshwright.trainer.evaluate import Evaluation
from meshwright.trainer.loop import build_parallel_decoder
from meshwright.trainer.precision import Precision
from meshwright.trainer.step import Step, StepContext

STEPS = 3
LR = 0.01
"""Larger ones make too much, in three steps of a deep model, of a rounding in the first."""
SAMPLES = 1000
SEQUENCE = 16
HELD_OUT_FRACTION = 0.05
MEAN_DOCUMENT_TOKENS = 6
"""Tokens, on average."""


class MaskedSynthetic(SyntheticSource):
    """Synthetic samples of which a part, another for every sample, does not count. With a `separator` they are cut into
    documents of a few tokens.
    """

    separator: int | None = None

    def __getitem__(self, index: int) -> Sample:
        tokens, labels = super().__getitem__(index)
        draws = np.random.Generator(np.random.Philox(key=[index, 1]))
        valid = draws.integers(0, len(labels) + 1)
        if self.separator is not None:
            tokens = np.where(draws.random(len(tokens)) < 1 / MEAN_DOCUMENT_TOKENS, self.separator, tokens)
        return tokens, np.where(np.arange(len(labels)) < valid, labels, IGNORE_INDEX)


@dataclass
class StepResults:
    """Losses and norms of every step, the first step's gradients, how far each parameter moved, and an evaluation."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    updates: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float = 0.0
    stale_loss: float = 0.0
    """the second step's loss, had the first not changed a single parameter"""


def proof_settings(config: RunConfig) -> RunConfig:
    """Settings that hide nothing: an epsilon large enough for AdamW to feel the scale of a gradient, a norm that is
    clipped at every step, nothing rounded on the way.
    """
    return replace(
        config,
        optimizer=replace(config.optimizer, eps=1e-4, clip=0.1, weight_decay=0.1),
        ddp=replace(config.ddp, comm_hook="none"),
        launch=replace(config.launch, device="cpu"),
    )


def proof_source(config: RunConfig) -> MaskedSynthetic:
    source = MaskedSynthetic(SAMPLES, config.data.sequence, config.model.vocab)
    source.separator = config.model.separator
    return source


def proof_stream(config: RunConfig) -> Stream:
    return Stream.from_lengths(config.seed, config.batch.global_, [SAMPLES], [1.0], HELD_OUT_FRACTION)


def held_out_samples(layout: Layout) -> int:
    """Held-out samples that no number of ranks divides evenly."""
    return 2 * layout.data_degree + 1


def run_single_process(_world: World, configs: list[RunConfig]) -> list[StepResults]:
    """One plain process, whole batches, torch's own optimizer: no code of the training path but the model."""
    return [_run_single_process(config) for config in configs]


def _run_single_process(config: RunConfig) -> StepResults:
    dtype = torch.float64 if config.precision.compute == "fp64" else torch.float32
    model = build_model(config.model, config.seed, dtype)
    named, biases = dict(model.named_parameters()), dict(model.named_buffers())
    before = {name: p.detach().clone() for name, p in (named | biases).items()}
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    for each in experts:
        each.keep_auxiliary_graph = True  # its balance loss is added to the loss here, and pulls nothing by itself
    rates = config.optimizer
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": rates.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (rates.beta1, rates.beta2)
    adamw = torch.optim.AdamW(groups, lr=LR, betas=betas, eps=rates.eps, foreach=False)
    decoder, stream, trail = (
        MicroBatchDataset(ConcatenatedSource([proof_source(config)]), False),
        proof_stream(config),
        StepResults(),
    )

    def loss_of(ids: np.ndarray) -> Tensor:
        total, count = model(*decoder[ids].tensors)
        return total / count  # type: ignore[no-any-return]

    def balance_of(ids: np.ndarray) -> Tensor:
        of_all = sum((each.auxiliary for each in experts if each.auxiliary is not None), torch.zeros((), dtype=dtype))
        return config.model.router_aux_loss * of_all / len(ids)

    with torch.no_grad():
        trail.stale_loss = float(loss_of(stream.step(1)))
    for step in range(STEPS):
        for each in experts:
            each.take_load()
        loss = loss_of(stream.step(step))
        (loss + balance_of(stream.step(step))).backward()
        if step == 0:
            trail.gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        trail.losses.append(float(loss.detach()))
        norm = torch.stack([p.grad.square().sum() for p in named.values() if p.grad is not None]).sum().sqrt()
        trail.norms.append(float(norm))
        for p in named.values():
            if p.grad is not None:
                p.grad /= torch.clamp(norm / rates.clip, min=1.0)
        adamw.step()
        adamw.zero_grad()
        for each in experts:
            each.router.bias.copy_(
                update_router_bias(each.router.bias, each.take_load()[0], config.model.router_bias_rate)
            )
    trail.updates = {name: p.detach() - before[name] for name, p in (named | biases).items()}
    with torch.no_grad():
        trail.evaluation = float(loss_of(stream.held_out_samples(held_out_samples(Layout.from_config(config.layout)))))
    return trail


def run_parallel(world: World, configs: list[RunConfig]) -> list[StepResults]:
    """The real step on this rank of the layout."""
    return [_run_parallel(world, config) for config in configs]


def _run_parallel(world: World, config: RunConfig) -> StepResults:
    layout, batch = validate(config)
    step, stream = build_step(world, config, layout), proof_stream(config)
    source, coordinate = ConcatenatedSource([proof_source(config)]), layout.data_coordinate(world.rank)
    loader = Loader(source, stream, batch, coordinate, DataConfig(workers=0))
    named = step.parallel_model.parameters()
    biases = dict(step.parallel_model.module.named_buffers())
    before = {name: full_tensor(p).clone() for name, p in (named | biases).items()}
    trail = StepResults()
    step.warmup_backward(loader.first)
    step.gradient(0, next(loader.steps(0, 1)), StepClock(world.device))
    step.expert_balancer.discard_loads()
    trail.gradients = {name: gradient_as_applied(p, p.grad).clone() for name, p in named.items() if p.grad is not None}
    step.optimizer.zero_grad()
    step.parallel_model.pop_gradient_reduction()
    batches = loader.steps(0, STEPS)
    for number in range(STEPS):
        loss, norm, *_ = step.run(number, LR, batches).numbers.tolist()
        trail.losses.append(loss)
        trail.norms.append(norm)
    trail.updates = {name: full_tensor(p) - before[name] for name, p in (named | biases).items()}
    evaluation = Evaluation(source, stream, held_out_samples(layout), batch, coordinate)
    trail.evaluation, *_ = evaluation.run(
        step.parallel_model, step.precision, world, step.context.counts_tokens, step.context.reports_loss
    )
    if not layout.is_first_on(world.rank, [axis for axis in AXES if axis != "pipeline"]):
        trail.gradients, trail.updates = {}, {}  # somebody else has the same
    return trail


def gradient_as_applied(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """The whole of a gradient as the optimizer takes it: each rank's own block. What is still a sum to be made must
    show here; `whole_of` the gradient itself would make it.
    """
    if not isinstance(parameter, DTensor):
        return full_tensor(gradient)
    shape, stride = parameter.shape, parameter.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return full_tensor(
        DTensor.from_local(local_tensor(gradient), mesh, placements, run_check=False, shape=shape, stride=stride)
    )


def build_step(world: World, config: RunConfig, layout: Layout) -> Step:
    precision = Precision(config.precision, world.device)
    spread = build_parallel_decoder(config, layout, precision, world)
    optimizer = AdamW(spread.parameters(), config.optimizer, layout, world, config.optimizer.cpu_offload)
    return Step(StepContext.for_rank(config, layout, world, spread, optimizer, precision))
