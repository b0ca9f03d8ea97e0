"""Gradients of bf16 weights under FSDP2 stay in float32, whatever ran the model before its first step."""

from __future__ import annotations

import torch

from benchmarks.gpu.meshwright_contender import WrappedLoop
from benchmarks.gpu.shapes import SHAPES, tiny


def test_forward_pass_before_the_first_step_does_not_round_the_reduced_gradients():
    shape = tiny(SHAPES["b"])
    loop = WrappedLoop(shape, torch.device("cpu"), shard=True, settings=("precision.weights=bf16",))
    try:
        tokens = torch.zeros(shape.batch, shape.sequence, dtype=torch.int64)
        model = loop.training.parallel_model
        with torch.no_grad(), loop.training.precision.autocast(), model.micro_step(last=True):
            model.forward_loss(tokens, tokens)
        model.reshard()
        dtypes = set()
        loop.training.step.context.on_gradient = lambda *_: dtypes.update(
            parameter.grad.dtype for parameter in model.module.parameters()
        )
        loop.step()
        assert dtypes == {torch.float32}
    finally:
        loop.close()
