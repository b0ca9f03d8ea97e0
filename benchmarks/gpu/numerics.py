"""Checks that Meshwright and the contenders compute the same loss and gradient from the same weights and batch.

Meshwright runs one step of its trainer as timed. Its initial weights and its batch are given to the plain model in
float32, the reference, and to the other models. The tolerances have a reason:

- Models that compute in float32 differ by the order of sums: the largest sum has about 10^4 products, whose error is
  sqrt(10^4) x 2^-24, about 10^-5; the backward pass multiplies it by a small factor.
- In bfloat16 every operator rounds to 2^-9. About 40 of them in a row (two layers, forward and backward) make
  sqrt(40) x 2^-9, about 0.012; the tolerance is 2.5 times as much. The loss is a mean over tokens, in which most of the
  rounding averages out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.meshwright_contender import MeshwrightLoop
from benchmarks.gpu.plain_model import PlainModel, plain_tensors
from benchmarks.gpu.shapes import Shape, for_numerics
from benchmarks.gpu.timing import GlobalState, free_memory
from benchmarks.gpu.transformers_contenders import build_transformers_model
from meshwright.base.models.registry import stored_parameters
from meshwright.core.data.loader import MicroBatch
from meshwright.core.kernels.triton_runtime import runs_triton
from meshwright.core.trainer.job import TrainingObserver

TOLERANCES = {"fp32": {"loss": 1e-5, "gradient": 1e-4}, "bf16": {"loss": 1e-3, "gradient": 0.03}}
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""The largest relative difference to the float32 reference: of the loss, and of the gradient of all parameters."""


class FirstStep(TrainingObserver):
    """Keeps the initial weights, the first batch and its gradient."""

    def on_start(self, training: Any) -> None:
        self.module: nn.Module = training.module
        state = training.state()
        self.weights = {
            name.removeprefix("model/"): shard.local.detach().clone()
            for name, shard in state.items()
            if name.startswith("model/")
        }

    def on_gradient(self, step: int, batches: list[MicroBatch]) -> None:
        if step == 0:
            self.tensors = batches[0].tensors
            gradients = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
            self.gradients = {name: gradient.detach().float().clone() for name, gradient in gradients.items()}


Case = Callable[[Shape, torch.device, "FirstStep"], tuple[float, dict[str, Tensor]]]
"""Computes the loss and the gradient under the names of the plain model."""


def check(shape: Shape, device: torch.device) -> dict[str, Any]:
    """The relative differences of every model to the reference, and whether all are within their tolerance."""
    shape = for_numerics(shape)
    first, default = FirstStep(), GlobalState.capture()
    torch.manual_seed(0)
    scope = "model" if shape.width < 1024 else "block"  # as the full model is compiled
    loop = MeshwrightLoop(shape, device, (f"compile.scope={scope}",), first)
    loop.step()
    own_loss, own_gradients = loop.loss(), plain_tensors(shape, first.gradients)
    loop.close()
    default.restore()
    first.gradients.clear()
    torch.set_float32_matmul_precision("highest")
    reference = plain_case(shape, device, first, torch.float32)
    rows = {"meshwright": compare(reference, (own_loss, own_gradients), "bf16")}
    for name, dtype, case in CASES:
        if case is best_case and not runs_triton(device):
            rows[name] = {"skipped": f"missing: Triton for {device.type}"}
            continue
        try:
            rows[name] = compare(reference, case(shape, device, first, dtype), PRECISIONS[dtype])
        except ImportError as error:
            rows[name] = {"skipped": str(error)}
        free_memory(device)
    default.restore()
    return {"models": rows, "met": all(row.get("met", True) for row in rows.values())}


def plain_case(
    shape: Shape, device: torch.device, first: FirstStep, dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    """The plain model, under autocast if `dtype` is bfloat16."""
    with device:
        model = PlainModel(shape)
    model.load_state_dict(with_tied_head(shape, plain_tensors(shape, first.weights)))
    return loss_and_gradient(model, lambda: model(*inputs(first, device)), device, dtype)


def best_case(
    shape: Shape, device: torch.device, first: FirstStep, _dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    """The model of the best loop: bfloat16 weights and residual stream, in-place cross-entropy."""
    from benchmarks.gpu.plain_kernels import fused_head_loss

    with device:
        model = PlainModel(shape, fused_head_loss)
    model.load_state_dict(with_tied_head(shape, plain_tensors(shape, first.weights)))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return loss_and_gradient(model, lambda: model(*inputs(first, device)), device, torch.float32)


def transformers_case(
    shape: Shape, device: torch.device, first: FirstStep, dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    """The model of transformers, whose gradients get the names of the plain model through Meshwright's."""
    model = build_transformers_model(shape, device)
    stored = dict(model.named_parameters())
    with torch.no_grad():
        for own, tensor in mapped(shape, stored):
            tensor.copy_(first.weights[own])
    tokens, targets = inputs(first, device)

    def loss() -> Tensor:
        return F.cross_entropy(model(input_ids=tokens).logits.float().flatten(0, 1), targets.flatten())

    value, gradients = loss_and_gradient(model, loss, device, dtype)
    return value, plain_tensors(shape, dict(mapped(shape, gradients)))


CASES = (
    ("plain, autocast", torch.bfloat16, plain_case),
    ("best loop", torch.bfloat16, best_case),
    ("transformers, float32", torch.float32, transformers_case),
    ("transformers, autocast", torch.bfloat16, transformers_case),
)


def mapped(shape: Shape, stored: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The tensors of a transformers model as (name of Meshwright's parameter, view of the tensor)."""
    result = []
    for parameter in stored_parameters(shape.model_config()):
        tensor = stored[parameter.stored]
        if parameter.transposed:
            tensor = tensor.t()
        if parameter.rows is not None:
            tensor = tensor[slice(*parameter.rows)]
        result.append((parameter.name, tensor))
    return result


def inputs(first: FirstStep, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens, targets = (tensor.to(device) for tensor in first.tensors[:2])
    return tokens, targets


def with_tied_head(shape: Shape, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | ({"head.weight": tensors["embedding.weight"]} if shape.tie else {})


def loss_and_gradient(
    model: nn.Module, loss: Callable[[], Tensor], device: torch.device, dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    autocast = torch.autocast(device.type, dtype) if dtype == torch.bfloat16 else nullcontext()
    with autocast:
        value = loss()
    value.backward()
    return value.item(), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def compare(
    reference: tuple[float, dict[str, Tensor]], found: tuple[float, dict[str, Tensor]], precision: str
) -> dict[str, Any]:
    """The relative difference of the loss, of the whole gradient, and of the parameter that differs most."""
    tolerance, (loss, gradients) = TOLERANCES[precision], reference
    squares = {name: (found[1][name] - gradient).square().sum().item() for name, gradient in gradients.items()}
    norms = {name: gradient.square().sum().item() for name, gradient in gradients.items()}
    worst = max(gradients, key=lambda name: squares[name] / max(norms[name], 1e-30))
    by_loss = abs(found[0] - loss) / loss
    by_gradient = (sum(squares.values()) / sum(norms.values())) ** 0.5
    return {
        "loss": by_loss,
        "gradient": by_gradient,
        "worst_parameter": worst,
        "worst_gradient": (squares[worst] / max(norms[worst], 1e-30)) ** 0.5,
        "tolerance": tolerance,
        "met": by_loss <= tolerance["loss"] and by_gradient <= tolerance["gradient"],
    }
