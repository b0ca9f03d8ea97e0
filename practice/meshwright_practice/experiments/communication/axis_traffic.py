"""What each axis of parallelism sends in one training step, and how that depends on the batch."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.base.topology.unsupported import validate
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.counted_training import ELEMENT_BYTES, CountedStep, count_layouts, small_config
from meshwright_practice.pictures import Bars

AXES: dict[str, Sequence[str]] = {
    "data": ("--layout.replicate=2",),
    "tensor": ("--layout.replicate=1", "--layout.tensor=2"),
    "context": ("--layout.replicate=1", "--layout.context=2"),
    "pipeline": ("--layout.replicate=1", "--layout.pipeline=2"),
}
GROUPS = {"tensor": "tensor", "context": "context", "pipeline": "pipeline"}
"""The axes whose traffic is that of activations. Data parallelism sends gradients."""


def axis_options(axis: str, samples: int, micro_batches: int = 1) -> list[str]:
    """Two ranks in a layout, with so many samples per micro-batch of a data-parallel rank."""
    replicas = 2 if axis == "data" else 1
    batch = [f"--batch.micro={samples}", f"--batch.global={samples * replicas * micro_batches}"]
    return [*AXES[axis], *batch, "--model.layers=2"]


def batch_dependence(knobs: Knobs) -> Observation:
    """Bytes that one of two ranks sends in a step, for a micro-batch and for one that is larger by a factor."""
    small, factor = 2, int(knobs["factor"])
    cases = {"accumulation": axis_options("data", small, factor)}
    for axis in AXES:
        micro_batches = 2 if axis == "pipeline" else 1
        cases[axis] = axis_options(axis, small, micro_batches)
        cases[f"{axis}, larger"] = axis_options(axis, small * factor, micro_batches)
    counted = count_layouts(2, cases)
    values: dict[str, float] = {"factor": factor}
    for axis in AXES:
        before, after = (sent(counted[name][0], axis) for name in (axis, f"{axis}, larger"))
        values[axis], values[f"{axis}_growth"] = before, after / before
    values["data_per_sample_growth"] = values["data_growth"] / factor
    values["accumulation_growth"] = counted["accumulation"][0].wire() / counted["data"][0].wire()
    labels = tuple(AXES)
    parts: dict[str, tuple[float, ...]] = {"growth": tuple(values[f"{axis}_growth"] for axis in labels)}
    title = f"growth of the bytes of a step, with a micro-batch {factor} times as large"
    note = "Data parallelism sends gradients, whose size is that of the model; the other axes send activations."
    return Observation(values, Bars(title, "times", labels, parts), (note,))


def sent(step: CountedStep, axis: str) -> int:
    return step.wire(axis=GROUPS.get(axis, ""))


def tensor_parallel(knobs: Knobs) -> Observation:
    """One step with tensor parallelism beside one with FSDP2 and one with DDP, on the same ranks and samples."""
    ranks, layers = int(knobs["ranks"]), int(knobs["layers"])
    shape = [f"--model.layers={layers}", "--data.sequence=32", f"--batch.global={2 * ranks}"]
    tensor_layout = ["--layout.replicate=1", f"--layout.tensor={ranks}", f"--batch.micro={2 * ranks}"]
    counted = count_layouts(
        ranks,
        {
            "tensor": [*shape, *tensor_layout],
            "deeper": [*shape, *tensor_layout, f"--model.layers={layers + 1}"],
            "fsdp": [*shape, f"--layout.replicate={ranks}", "--layout.shard=parameters", "--batch.micro=2"],
            "ddp": [*shape, f"--layout.replicate={ranks}", "--batch.micro=2"],
        },
    )
    tensor, deeper, fsdp, ddp = (counted[name][0] for name in ("tensor", "deeper", "fsdp", "ddp"))
    config = small_config(ranks, *shape, *tensor_layout)
    activation = 2 * ranks * config.data.sequence * config.model.width * ELEMENT_BYTES

    def per_block(collective: str) -> tuple[int, int]:
        calls, message = (
            getattr(deeper, count)(collective, "tensor") - getattr(tensor, count)(collective, "tensor")
            for count in ("calls", "message")
        )
        return calls, message

    (gathers, gathered), (scatters, scattered) = per_block("all_gather"), per_block("reduce_scatter")
    values: dict[str, float] = {
        "ranks": ranks,
        "all_gathers_per_block": gathers,
        "reduce_scatters_per_block": scatters,
        "all_reduce_equivalents_per_block": (gathers + scatters) / 2,
        "message_per_collective": (gathered + scattered) / (gathers + scatters) / activation,
        "ddp_all_reduces": ddp.calls("all_reduce"),
        "loss_difference": max(abs(step.loss - ddp.loss) for step in (tensor, fsdp)),
        "data_degree_tensor": validate(config)[0].data_degree,
        "data_degree_fsdp": validate(small_config(ranks, *shape))[0].data_degree,
    }
    for name, step in (("tensor", tensor), ("fsdp", fsdp), ("ddp", ddp)):
        samples = 2 * ranks if name == "tensor" else 2
        values[f"parameter_{name}"] = step.peak["parameter"] / step.model_bytes
        values[f"activation_{name}"] = step.peak["activation"] / samples / (ddp.peak["activation"] / 2)
        values[f"wire_{name}"] = step.wire() / ddp.wire()
    labels = ("tensor", "fsdp", "ddp")
    parts: dict[str, tuple[float, ...]] = {
        "peak parameters": tuple(values[f"parameter_{name}"] for name in labels),
        "peak activations per sample": tuple(values[f"activation_{name}"] for name in labels),
    }
    picture = Bars("memory of one rank", "DDP = 1", labels, parts)
    note = (
        "Between sharded matrices, Meshwright keeps the sequence sharded: an all-gather and a reduce-scatter replace "
        "each all-reduce, with the same bytes."
    )
    return Observation(values, picture, (note,))
