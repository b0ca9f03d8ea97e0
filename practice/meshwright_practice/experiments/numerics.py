"""Numbers in 16 bits, the tensors that backward needs, and what activation checkpointing keeps of them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.core.models.layers.block_stack import BlockStack
from meshwright.core.models.layers.feed_forward import FeedForward
from meshwright.core.models.layers.rotary import RotaryTables
from meshwright.core.parallel.activation_memory.activation_checkpoint import CheckpointedBlockStack
from meshwright.core.telemetry.memory_tracker import MemoryTracker
from meshwright.core.trainer.precision import LossScale
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.small_runs import scratch_folder, train_small
from meshwright_practice.pictures import Bars, Curves, HeatMap

FLOAT16, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32
UNUSED: Any = None
"""The rotary tables, which blocks without attention do not read."""


def number(value: float, dtype: torch.dtype) -> float:
    """A number as this dtype stores it."""
    return float(torch.tensor(value, dtype=dtype))


def count(condition: bool) -> float:
    return float(condition)


def formats(knobs: Knobs) -> Observation:
    """Stores numbers in fp16 and bf16: the largest, a small gradient, and a small update of a weight."""
    gradient, scale = float(knobs["gradient"]), float(knobs["loss_scale"])
    update, updates = float(knobs["update"]), int(knobs["updates"])
    infinite = torch.tensor(70_000.0).to(FLOAT16)
    weights = {name: lost_updates(dtype, update, updates) for name, dtype in (("fp16", FLOAT16), ("bf16", BFLOAT16))}
    values: dict[str, float] = {
        "largest_fp16": torch.finfo(FLOAT16).max,
        "largest_bf16": torch.finfo(BFLOAT16).max,
        "largest_fp32": torch.finfo(FLOAT32).max,
        "mantissa_bits_fp16": -math.log2(torch.finfo(FLOAT16).eps),
        "mantissa_bits_bf16": -math.log2(torch.finfo(BFLOAT16).eps),
        "exponent_bits_fp16": 15 + math.log2(torch.finfo(FLOAT16).eps),
        "exponent_bits_bf16": 15 + math.log2(torch.finfo(BFLOAT16).eps),
        "70000_overflows_fp16": count(bool(torch.isinf(infinite))),
        "70000_overflows_bf16": count(math.isinf(number(70_000.0, BFLOAT16))),
        "inf_minus_inf_is_nan": count(bool(torch.isnan(infinite - infinite))),
        "zero_times_inf_is_nan": count(bool(torch.isnan(0 * infinite))),
        "small_gradient_fp16": number(gradient, FLOAT16),
        "small_gradient_is_nan": count(math.isnan(number(gradient, FLOAT16))),
        "small_gradient_bf16": number(gradient, BFLOAT16),
        "scaled_gradient_fp16": number(gradient * scale, FLOAT16) / scale,
        "exp_100_is_inf_bf16": count(bool(torch.isinf(torch.tensor(100.0, dtype=BFLOAT16).exp()))),
        "log_0_is_inf_bf16": count(bool(torch.isinf(torch.zeros((), dtype=BFLOAT16).log()))),
        "weight_bf16": weights["bf16"],
        "weight_fp16": weights["fp16"],
        "weight_fp32_master": lost_updates(FLOAT32, update, updates),
        "update": update,
    }
    exponents = tuple(range(-30, 41, 5))
    rows = ("fp16", "bf16", "fp32")
    errors = tuple(
        tuple(relative_error(2.0**e * 1.1, dtype) for e in exponents) for dtype in (FLOAT16, BFLOAT16, FLOAT32)
    )
    picture = HeatMap("relative error of 1.1 x 2^e (1: lost)", "", rows, tuple(f"2^{e}" for e in exponents), errors)
    return Observation(values, picture, (f"{updates} updates of {update} to a weight of 1.",))


def relative_error(value: float, dtype: torch.dtype) -> float:
    stored = number(value, dtype)
    return 1.0 if math.isinf(stored) else abs(stored - value) / value


def lost_updates(dtype: torch.dtype, update: float, updates: int) -> float:
    """A weight of 1 after updates that are added in this dtype."""
    weight = torch.ones((), dtype=dtype)
    for _ in range(updates):
        weight += torch.tensor(update, dtype=dtype)
    return float(weight)


def loss_scaling(knobs: Knobs) -> Observation:
    """Trains in fp16 with a loss scale that overflows at first, and reads which updates were skipped."""
    first = 2.0 ** int(knobs["scale_exponent"])
    with scratch_folder() as folder:
        run = train_small(
            folder / "run",
            "precision.compute=fp16",
            f"precision.loss_scale={first}",
            "layout.replicate=1",
            "batch.global=4",
            steps=int(knobs["steps"]),
        )
        steps = [event for _, event in sorted(run.steps().items())]
    skipped = [bool(event.get("skipped")) for event in steps]
    scales = [float(event["loss_scale"]) for event in steps]
    scale = LossScale(first, 1000, torch.device("cpu"))
    scale.update(torch.tensor(False))
    values = {
        "first_scale": first,
        "scale_after_one_overflow": float(scale.scale),
        "skipped_steps": float(sum(skipped)),
        "steps": float(len(steps)),
        "last_scale": scales[-1],
        "first_step_skipped": count(skipped[0]),
        "last_step_skipped": count(skipped[-1]),
        "last_loss_is_finite": count(math.isfinite(steps[-1]["loss"])),
        "halvings": math.log2(first / scales[-1]),
    }
    picture = Curves("loss scale", "step", "log2", tuple(map(float, range(len(scales)))),
                     {"loss scale": tuple(map(math.log2, scales))})  # fmt: skip
    return Observation(values, picture, ("The trainer halves the loss scale after an overflow and skips the update.",))


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd saves in forward; a storage counts once, and those in `ignored` do not count."""

    def __init__(self, ignored: tuple[Tensor, ...] = ()) -> None:
        self.storages = {tensor.untyped_storage().data_ptr(): 0 for tensor in ignored}
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.storages.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    @property
    def total(self) -> float:
        return float(sum(self.storages.values()))


def saved_by(module: nn.Module, *shape: int) -> float:
    """The bytes that autograd saves of one forward pass, without the parameters."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
    saved = SavedBytes(tuple(module.parameters()))
    with saved:
        y = module(x)
    y.sum().backward()
    return saved.total


def saved_tensors(knobs: Knobs) -> Observation:
    """Lists what autograd saves of an activation function, of a linear layer and of the feed-forward of a block."""
    batch, sequence, width = int(knobs["batch"]), int(knobs["sequence"]), int(knobs["width"])
    ffn = FeedForward(width, 4 * width)
    saved = {
        "SiLU": saved_by(nn.SiLU(), batch, sequence, width),
        "linear": saved_by(nn.Linear(width, width, bias=False), batch, sequence, width),
        "feed-forward": saved_by(ffn, batch, sequence, width),
    }
    values = {
        "tensor_bytes": float(batch * sequence * width * 4),
        "silu_saves": saved["SiLU"],
        "silu_parameters": float(sum(p.numel() for p in nn.SiLU().parameters())),
        "linear_saves": saved["linear"],
        "feed_forward_saves": saved["feed-forward"],
        "feed_forward_twice_the_batch": saved_by(ffn, 2 * batch, sequence, width),
        "feed_forward_parameter_bytes": float(sum(p.nbytes for p in ffn.parameters())),
        "saved_without_grad": saved_without_grad(ffn, batch, sequence, width),
    }
    picture = Bars("bytes saved for backward", "B", tuple(saved), {"saved": tuple(saved.values())})
    return Observation(values, picture, (f"The input has the shape [b, s, d] = [{batch}, {sequence}, {width}].",))


def saved_without_grad(module: nn.Module, *shape: int) -> float:
    saved = SavedBytes(tuple(module.parameters()))
    with torch.no_grad(), saved:
        module(torch.zeros(*shape))
    return saved.total


class TanhBlock(nn.Module):
    """A block of which autograd saves exactly one tensor, its output."""

    def forward(self, x: Tensor, _rotary: RotaryTables) -> Tensor:
        return torch.tanh(x)


class MatrixBlock(nn.Module):
    """A block with one matrix product, whose result backward needs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, _rotary: RotaryTables) -> Tensor:
        return torch.tanh(self.linear(x))


def peak_units(layers: int, segment: int) -> float:
    """The most tensors alive at once in forward and backward; without checkpointing for segment 0."""
    stack = CheckpointedBlockStack(segment) if segment else BlockStack()
    x = torch.ones(1024, requires_grad=True)
    with MemoryTracker(stack) as tracker:
        stack([TanhBlock() for _ in range(layers)], x, UNUSED).sum().backward()
    return float(tracker.peak_total // x.nbytes)


def checkpoint_segments(knobs: Knobs) -> Observation:
    """Counts the saved tensors of a chain of equal layers for every segment length, and the FLOPs of recomputation."""
    layers = int(knobs["layers"])
    root = math.isqrt(layers)
    lengths = [2**i for i in range(int(math.log2(layers)) + 1)]
    units = {segment: peak_units(layers, segment) for segment in lengths}
    plain, full = flops(BlockStack()), flops(CheckpointedBlockStack(1))
    values = {
        "layers": float(layers),
        "units_without": peak_units(layers, 0),
        "units_square_root": peak_units(layers, root),
        "units_per_block": units[1],
        "units_one_segment": units[layers],
        "units_smallest": min(units.values()),
        "units_quarter_of_the_layers": peak_units(layers // 4, math.isqrt(layers // 4)),
        "units_per_block_quarter": peak_units(layers // 4, 1),
        "twice_square_root": 2.0 * root,
        "flops_ratio": full / plain,
    }
    x = tuple(map(float, lengths))
    picture = Curves("saved tensors alive at once", "blocks per segment", "tensors", x, {"peak": tuple(units.values())})
    return Observation(values, picture, (f"{layers} layers, each of which saves one tensor.",))


def flops(stack: BlockStack) -> float:
    """The FLOPs of forward and backward through a stack of matrix products."""
    blocks = [MatrixBlock(8) for _ in range(4)]
    x = torch.ones(2, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        stack(blocks, x, UNUSED).sum().backward()
    return float(counter.get_total_flops())


def checkpointed_run(knobs: Knobs) -> Observation:
    """Trains without activation checkpointing, with one checkpoint per block, and in bf16, and reads the peak memory
    by class.
    """
    layers, batch = int(knobs["layers"]), int(knobs["batch"])
    sizes = (f"model.layers={layers}", "layout.replicate=1", "precision.compute=fp32", "model.vocab=16")
    runs = {
        "plain": (f"batch.global={batch}",),
        "checkpointed": (f"batch.global={batch}", "activation_checkpoint.mode=full"),
        "selective": (f"batch.global={batch}", "activation_checkpoint.mode=selective"),
        "accumulated": (f"batch.global={batch}", "batch.micro=1"),
        "bf16": (f"batch.global={batch}", "precision.compute=bf16"),
    }
    peaks, losses = {}, {}
    with scratch_folder() as folder:
        for name, settings in runs.items():
            run = train_small(folder / name.replace(" ", "-"), *sizes, *settings)
            peaks[name], losses[name] = run.peak_memory(), run.losses()[-1]
    share = partial(share_of, peaks)
    values = {
        "activations_checkpointed": share("checkpointed", "activation"),
        "activations_selective": share("selective", "activation"),
        "activations_accumulated": share("accumulated", "activation"),
        "activations_bf16": share("bf16", "activation"),
        "optimizer_checkpointed": share("checkpointed", "optimizer"),
        "optimizer_accumulated": share("accumulated", "optimizer"),
        "optimizer_bf16": share("bf16", "optimizer"),
        "parameters_checkpointed": share("checkpointed", "parameter"),
        "gradients_accumulated": share("accumulated", "gradient"),
        "loss_difference_checkpointed": abs(losses["checkpointed"] - losses["plain"]),
        "activation_bytes": float(peaks["plain"]["activation"]),
        "optimizer_bytes": float(peaks["plain"]["optimizer"]),
        "parameter_bytes": float(peaks["plain"]["parameter"]),
    }
    classes = ("parameter", "gradient", "optimizer", "activation")
    labels = tuple(peaks)
    parts = {name: tuple(float(peaks[label][name]) for label in labels) for name in classes}
    return Observation(values, Bars("peak memory by class", "B", labels, parts))


def share_of(peaks: dict[str, Any], run: str, memory_class: str) -> float:
    """The peak of a class relative to the plain run."""
    return float(peaks[run][memory_class] / peaks["plain"][memory_class])
