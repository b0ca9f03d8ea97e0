"""Memory and communication of one training step at every sharding level, from DDP to ZeRO-3."""

from __future__ import annotations

from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.counted_training import CountedStep, count_layouts
from meshwright_practice.pictures import Bars

LEVELS = ("none", "optimizer", "gradients", "parameters")
CLASSES = ("parameter", "gradient", "optimizer")


def levels(knobs: Knobs) -> Observation:
    """One step at each level. Bytes are multiples of the bytes of all parameters; `wire_*` is what a rank sends times
    n / (n - 1), so that it does not depend on the number of ranks n.
    """
    ranks, accumulation = int(knobs["ranks"]), int(knobs["accumulation"])
    batch = [f"--batch.global={ranks * accumulation}", "--batch.micro=1", "--model.layers=3"]
    counted = count_layouts(ranks, {level: [f"--layout.shard={level}", *batch] for level in LEVELS})
    values: dict[str, float] = {"ranks": ranks, "accumulation": accumulation}
    for level, steps in counted.items():
        for name, value in level_values(steps[0], ranks).items():
            values[f"{name}_{level}"] = value
    losses = [step.loss for steps in counted.values() for step in steps]
    values["loss_spread"] = max(losses) - min(losses)
    return Observation(values, level_picture(counted, str(knobs.get("picture", "memory")), ranks), level_notes(values))


def level_values(step: CountedStep, ranks: int) -> dict[str, float]:
    unit, ring = step.model_bytes, ranks / (ranks - 1)
    values = {kind: step.peak[kind] / unit for kind in CLASSES}
    values |= {f"resident_{kind}": step.resident[kind] / unit for kind in CLASSES}
    values["state"] = sum(values[kind] for kind in CLASSES)
    values["resident_state"] = sum(values[f"resident_{kind}"] for kind in CLASSES)
    values["wire"] = step.wire() / unit * ring
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        values[collective] = step.wire(collective) / unit * ring
    return values


def level_picture(counted: dict[str, list[CountedStep]], kind: str, ranks: int) -> Bars:
    first = [steps[0] for steps in counted.values()]
    if kind == "wire":
        sent: dict[str, tuple[float, ...]] = {
            collective: tuple(step.wire(collective) / step.model_bytes * ranks / (ranks - 1) for step in first)
            for collective in ("all_reduce", "reduce_scatter", "all_gather")
        }
        return Bars("sent by one rank in a step, times n / (n - 1)", "bytes of all parameters", tuple(counted), sent)
    parts: dict[str, tuple[float, ...]] = {
        name: tuple(step.peak[name] / step.model_bytes for step in first) for name in CLASSES
    }
    return Bars("peak memory of one rank", "bytes of all parameters", tuple(counted), parts)


def level_notes(values: dict[str, float]) -> tuple[str, ...]:
    wire = ", ".join(f"{level} {values[f'wire_{level}']:.3g}" for level in LEVELS)
    return (
        f"The losses of the four levels differ by {values['loss_spread']:.1e}.",
        f"A rank sends, in bytes of all parameters and times n / (n - 1): {wire}.",
    )


def remedies(knobs: Knobs) -> Observation:
    """What lowers the gradient bytes per token of data parallelism, each remedy alone, on four ranks. Each is compared
    with plain DDP in the same precision.
    """
    more = int(knobs["accumulation"])
    plain = ["--batch.global=4", "--batch.micro=1", "--model.layers=2"]
    hybrid = ["--layout.shard=parameters", "--layout.shard_degree=2", "--layout.replicate=2"]
    counted = count_layouts(
        4,
        {
            "baseline": plain,
            "accumulation": [*plain, f"--batch.global={4 * more}"],
            "larger_micro_batch": [*plain, f"--batch.global={4 * more}", f"--batch.micro={more}"],
            "hybrid_sharding": [*plain, *hybrid],
            "fp32_baseline": [*plain, "--precision.compute=fp32"],
            "bf16_reduction": [*plain, "--precision.compute=fp32", "--ddp.comm_hook=bf16_compress"],
        },
    )
    sent = {name: steps[0].wire(axis="replicate") for name, steps in counted.items()}
    tokens = {"accumulation": more, "larger_micro_batch": more}
    remedy_names = ("bf16_reduction", "accumulation", "larger_micro_batch", "hybrid_sharding")
    values: dict[str, float] = {"accumulation_steps": more, "baseline": 1.0}
    for name in remedy_names:
        compared = sent["fp32_baseline" if name == "bf16_reduction" else "baseline"]
        values[name] = sent[name] / compared / tokens.get(name, 1)
    labels = ("baseline", *remedy_names)
    parts: dict[str, tuple[float, ...]] = {"per token": tuple(values[name] for name in labels)}
    picture = Bars("bytes between replicas per token", "DDP = 1", labels, parts)
    sentence = "Hybrid sharding counts the axis between replicas alone, which is the one that crosses nodes."
    return Observation(values, picture, (sentence,))
