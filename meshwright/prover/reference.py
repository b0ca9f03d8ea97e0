"""The results of three optimizer steps, computed by a plain single process and by the real step on a layout."""

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
"""A larger learning rate amplifies the rounding of the first step too much within three steps of a deep model."""
SAMPLES = 1000
SEQUENCE = 16
HELD_OUT_FRACTION = 0.05
MEAN_DOCUMENT_TOKENS = 6


class MaskedSynthetic(SyntheticSource):
    """Synthetic samples whose labels are masked after a random length, different for every sample. With a `separator`
    the samples consist of documents of a few tokens.
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
    """What three optimizer steps and an evaluation produce."""

    losses: list[float] = field(default_factory=list)
    """The loss of every step."""
    norms: list[float] = field(default_factory=list)
    """The gradient norm of every step."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """The gradients of the first step."""
    updates: dict[str, Tensor] = field(default_factory=dict)
    """The difference of every parameter and buffer after the last step and before the first."""
    evaluation: float = 0.0
    """The evaluation loss after the last step."""
    stale_loss: float = 0.0
    """The loss of the second step with the parameters from before the first step."""


def proof_settings(config: RunConfig) -> RunConfig:
    """Settings that make errors visible: an epsilon so large that AdamW depends on the scale of the gradient, a clip
    norm that is exceeded in every step, and no gradient compression.
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
    """A number of held-out samples that the data-parallel degree does not divide."""
    return 2 * layout.data_degree + 1


def run_single_process(_world: World, configs: list[RunConfig]) -> list[StepResults]:
    """The reference: full batches and torch's own optimizer, with no code of the training path except the model."""
    return [_run_single_process(config) for config in configs]


def _run_single_process(config: RunConfig) -> StepResults:
    dtype = torch.float64 if config.precision.compute == "fp64" else torch.float32
    model = build_model(config.model, config.seed, dtype)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    before = {name: p.detach().clone() for name, p in (parameters | buffers).items()}
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    for layer in experts:
        layer.keep_auxiliary_graph = True  # the balance loss is added to the loss below, not inside the layer
    settings = config.optimizer
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    adamw = torch.optim.AdamW(groups, lr=LR, betas=betas, eps=settings.eps, foreach=False)
    dataset = MicroBatchDataset(ConcatenatedSource([proof_source(config)]), False)
    stream, results = proof_stream(config), StepResults()

    def mean_loss(ids: np.ndarray) -> Tensor:
        total, count = model(*dataset[ids].tensors)
        return total / count  # type: ignore[no-any-return]

    def balance_loss(ids: np.ndarray) -> Tensor:
        losses = (layer.auxiliary for layer in experts if layer.auxiliary is not None)
        return config.model.router_aux_loss * sum(losses, torch.zeros((), dtype=dtype)) / len(ids)

    with torch.no_grad():
        results.stale_loss = float(mean_loss(stream.step(1)))
    for step in range(STEPS):
        for layer in experts:
            layer.take_load()
        loss = mean_loss(stream.step(step))
        (loss + balance_loss(stream.step(step))).backward()
        if step == 0:
            results.gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        results.losses.append(float(loss.detach()))
        norm = torch.stack([p.grad.square().sum() for p in parameters.values() if p.grad is not None]).sum().sqrt()
        results.norms.append(float(norm))
        for p in parameters.values():
            if p.grad is not None:
                p.grad /= torch.clamp(norm / settings.clip, min=1.0)
        adamw.step()
        adamw.zero_grad()
        for layer in experts:
            layer.router.bias.copy_(
                update_router_bias(layer.router.bias, layer.take_load()[0], config.model.router_bias_rate)
            )
    results.updates = {name: p.detach() - before[name] for name, p in (parameters | buffers).items()}
    with torch.no_grad():
        results.evaluation = float(
            mean_loss(stream.held_out_samples(held_out_samples(Layout.from_config(config.layout))))
        )
    return results


def run_parallel(world: World, configs: list[RunConfig]) -> list[StepResults]:
    """The real training step, on this rank of the layout."""
    return [_run_parallel(world, config) for config in configs]


def _run_parallel(world: World, config: RunConfig) -> StepResults:
    layout, batch = validate(config)
    step, stream = build_step(world, config, layout), proof_stream(config)
    source, coordinate = ConcatenatedSource([proof_source(config)]), layout.data_coordinate(world.rank)
    loader = Loader(source, stream, batch, coordinate, DataConfig(workers=0))
    parameters = step.parallel_model.parameters()
    buffers = dict(step.parallel_model.module.named_buffers())
    before = {name: full_tensor(p).clone() for name, p in (parameters | buffers).items()}
    results = StepResults()
    step.warmup_backward(loader.first)
    step.gradient(0, next(loader.steps(0, 1)), StepClock(world.device))
    step.expert_balancer.discard_loads()
    results.gradients = {
        name: gradient_as_applied(p, p.grad).clone() for name, p in parameters.items() if p.grad is not None
    }
    step.optimizer.zero_grad()
    step.parallel_model.pop_gradient_reduction()
    batches = loader.steps(0, STEPS)
    for number in range(STEPS):
        loss, norm, *_ = step.run(number, LR, batches).numbers.tolist()
        results.losses.append(loss)
        results.norms.append(norm)
    results.updates = {name: full_tensor(p) - before[name] for name, p in (parameters | buffers).items()}
    evaluation = Evaluation(source, stream, held_out_samples(layout), batch, coordinate)
    results.evaluation, *_ = evaluation.run(
        step.parallel_model, step.precision, world, step.context.counts_tokens, step.context.reports_loss
    )
    if not layout.is_first_on(world.rank, [axis for axis in AXES if axis != "pipeline"]):
        results.gradients, results.updates = {}, {}  # another rank returns the same tensors
    return results


def gradient_as_applied(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """The full gradient, assembled from the local shards that the optimizer reads. A gradient that still is a partial
    sum must be visible here; `full_tensor` of the gradient itself would reduce it.
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
    parallel_model = build_parallel_decoder(config, layout, precision, world)
    optimizer = AdamW(parallel_model.parameters(), config.optimizer, layout, world, config.optimizer.cpu_offload)
    return Step(StepContext.for_rank(config, layout, world, parallel_model, optimizer, precision))
