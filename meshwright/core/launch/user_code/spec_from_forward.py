"""Infers the ParallelSpec of a custom model with a forward on fake tensors, which shows when each module is called."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from meshwright.core.data.loader import MicroBatchDataset
from meshwright.core.data.source import ConcatenatedSource, Source
from meshwright.core.models.trace import copy_to_meta
from meshwright.core.parallel.infer_spec import infer_parallel_spec
from meshwright.core.parallel.parallel_spec import ParallelSpec
from meshwright.core.torch_private import FakeTensors
from meshwright.core.trainer.custom_model import CustomModel


def infer_spec_from_forward(custom: CustomModel, source: Source, given: ParallelSpec | None) -> ParallelSpec:
    """The spec of the model. Blocks and the modules around them are those that the forward of the first sample calls in
    order; where the forward depends on values, which fake tensors do not have, they are those registered in order.
    """
    spec = infer_parallel_spec(custom.module, given)
    dataset = MicroBatchDataset(ConcatenatedSource([source]), False, custom.batch, custom.collate)
    flat = dataset[np.zeros(1, np.uint64)].tensors
    loss = copy_to_meta(custom.loss) if isinstance(custom.loss, nn.Module) else custom.loss
    on_meta = replace(custom, module=copy_to_meta(custom.module), loss=loss)
    dtype = next((p.dtype for p in custom.module.parameters() if p.is_floating_point()), torch.float32)

    def run() -> None:
        with torch.no_grad(), FakeTensors().active():
            objective(*(tensor.to("meta") for tensor in flat))

    try:
        objective = on_meta.build_objective(torch.device("meta"), dtype)
        ordered = infer_parallel_spec(objective.model, given, run)
    except Exception:  # noqa: BLE001  the check of the first batch names errors of the forward
        return spec
    return replace(spec, blocks=ordered.blocks, before=ordered.before, after=ordered.after)
