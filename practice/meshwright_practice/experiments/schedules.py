"""Pipeline schedules: idle ticks, micro-batches in flight, and what crosses a boundary between two stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

from meshwright.base.topology.schedule_orders import Action, action_orders
from meshwright.base.topology.schedule_timeline import TimelineSlot, build_timeline, execute_orders
from meshwright.base.topology.schedules import partition_blocks
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.small_runs import SmallRun, scratch_folder, train_small
from meshwright_practice.pictures import GanttChart, HeatMap, Span

SLOTS = {"F": 1, "B": 2}
"""A backward pass takes twice as long as a forward pass."""


def bubble(knobs: Knobs) -> Observation:
    """Executes the action orders of several schedules, and counts the idle ticks of all ranks."""
    ranks, micro = int(knobs["ranks"]), int(knobs["micro_batches"])
    one, gpipe = build_timeline("1f1b", ranks, micro), build_timeline("gpipe", ranks, micro)
    interleaved = build_timeline("interleaved", ranks, micro, 2)
    zero_bubble = build_timeline("zero-bubble", ranks, micro, 1)
    values = {
        "formula": (ranks - 1) / (micro + ranks - 1),
        "gpipe": float(gpipe.bubble),
        "1f1b": float(one.bubble),
        "interleaved": float(interleaved.bubble),
        "zero_bubble": float(zero_bubble.bubble),
        "twice_the_micro_batches": float(build_timeline("1f1b", ranks, 2 * micro).bubble),
        "twice_the_ranks": float(build_timeline("1f1b", 2 * ranks, max(micro, 2 * ranks)).bubble),
        "speedup": float(ranks * (1 - one.bubble)),
        "ranks": float(ranks),
        "in_flight_gpipe_first": float(gpipe.rank_peaks[0]),
        "in_flight_gpipe_last": float(gpipe.rank_peaks[-1]),
        "in_flight_1f1b_first": float(one.rank_peaks[0]),
        "in_flight_1f1b_last": float(one.rank_peaks[-1]),
        "micro_batches": float(micro),
    }
    spans = draw(one.rows)
    notes = (f"1F1B on {ranks} ranks idles {values['1f1b']:.2%} of all ranks' time with {micro} micro-batches.",)
    return Observation(values, GanttChart(f"1F1B, {ranks} ranks, {micro} micro-batches", "ticks", spans), notes)


def uneven_stages(knobs: Knobs) -> Observation:
    """Executes 1F1B with stages of unequal cost, and again with the blocks that `partition_blocks` gives each stage."""
    ranks, micro = int(knobs["ranks"]), int(knobs["micro_batches"])
    heavy, blocks = int(knobs["head_cost"]), int(knobs["blocks_per_stage"]) * ranks
    costs = (*[1.0] * (blocks - 1), 1.0 + heavy)  # the head is on the last block
    even = [range(stage * blocks // ranks, (stage + 1) * blocks // ranks) for stage in range(ranks)]
    before = execute(ranks, micro, [sum(costs[b] for b in stage) for stage in even])
    after = execute(ranks, micro, [sum(costs[b] for b in stage) for stage in partition_blocks(costs, ranks)])
    balanced = execute(ranks, micro, [1.0] * ranks)
    values = {
        "bubble_equal_blocks": idle_share(before),
        "bubble_rebalanced": idle_share(after),
        "bubble_equal_cost": idle_share(balanced),
        "ticks_equal_blocks": makespan(before),
        "ticks_rebalanced": makespan(after),
        "formula": (ranks - 1) / (micro + ranks - 1),
        "idle_first_stage": makespan(before) - busy(before[0]),
        "idle_last_stage": makespan(before) - busy(before[-1]),
    }
    notes = (f"The head costs as much as {heavy} blocks; the last stage has fewer blocks after the new partition.",)
    return Observation(values, GanttChart("equal blocks per stage, a heavy head", "ticks", draw(before)), notes)


def execute(ranks: int, micro: int, stage_costs: list[float]) -> list[list[TimelineSlot]]:
    cost: Callable[[Action], float] = lambda action: SLOTS[action.op] * stage_costs[action.stage]  # noqa: E731
    return execute_orders(action_orders("1f1b", ranks, micro), ranks, cost)


def busy(row: list[TimelineSlot]) -> float:
    return float(sum(slot.end - slot.start for slot in row))


def makespan(rows: list[list[TimelineSlot]]) -> float:
    return float(max(row[-1].end for row in rows))


def idle_share(rows: list[list[TimelineSlot]]) -> float:
    total = len(rows) * Fraction(makespan(rows))
    return float(1 - sum(Fraction(busy(row)) for row in rows) / total)


def draw(rows: list[list[TimelineSlot]]) -> tuple[Span, ...]:
    return tuple(
        Span(f"rank {rank}", f"{slot.action.op}{slot.action.micro_batch}", float(slot.start), float(slot.end))
        for rank, row in enumerate(rows)
        for slot in row
    )


def pipeline_run(knobs: Knobs) -> Observation:
    """Trains under GPipe and under 1F1B on real ranks, and without a pipeline, and reads what the ranks counted."""
    ranks, micro, layers = int(knobs["ranks"]), int(knobs["micro_batches"]), int(knobs["layers"])
    sizes = (f"model.layers={layers}", f"batch.global={micro}", "batch.micro=1", "layout.replicate=1")
    runs: dict[str, SmallRun] = {}
    with scratch_folder() as folder:
        for name in ("none", "gpipe", "1f1b"):
            settings = () if name == "none" else (f"layout.pipeline={ranks}", f"pipeline.schedule={name}")
            runs[name] = train_small(folder / name, *sizes, *settings)
        values = dict(pipeline_values(runs, ranks, micro, layers))
        in_flight = {name: tuple(live(runs[name], rank) for rank in range(ranks)) for name in ("gpipe", "1f1b")}
    picture = HeatMap(
        "micro-batches in flight", "count", tuple(in_flight), tuple(f"rank {rank}" for rank in range(ranks)),
        tuple(in_flight.values()),
    )  # fmt: skip
    return Observation(values, picture, ("All three runs end with the same loss.",))


def live(run: SmallRun, rank: int) -> float:
    return float(run.steps(rank)[1]["pipeline"]["live"])


def pipeline_values(runs: Mapping[str, SmallRun], ranks: int, micro: int, layers: int) -> Mapping[str, float]:
    config = runs["1f1b"].config
    one, plain = runs["1f1b"], runs["none"]
    sent = [run_sent(one, rank) for rank in range(ranks)]
    tensor = config.data.sequence * config.model.width * 8  # [b, s, d] with b = 1, in float64
    return {
        "gpipe_first": live(runs["gpipe"], 0),
        "gpipe_last": live(runs["gpipe"], ranks - 1),
        "1f1b_first": live(one, 0),
        "1f1b_last": live(one, ranks - 1),
        "micro_batches": float(micro),
        "ranks": float(ranks),
        "layers": float(layers),
        "layers_kept_first_1f1b": live(one, 0) * layers / ranks,
        "layers_kept_first_gpipe": live(runs["gpipe"], 0) * layers / ranks,
        "parameter_share_first": one.peak_memory(0)["optimizer"] / plain.peak_memory(0)["optimizer"],
        "activation_share_first": one.peak_memory(0)["activation"] / plain.peak_memory(0)["activation"],
        "tensor_bytes": float(tensor),
        "sent_by_first": float(sent[0][1]),
        "sent_by_last": float(sent[-1][1]),
        "messages_of_first": float(sent[0][0]),
        "loss_difference": max(
            abs(a - b) for run in runs.values() for a, b in zip(run.losses(), plain.losses(), strict=True)
        ),
    }


def run_sent(run: SmallRun, rank: int) -> tuple[int, int]:
    """The messages that a rank sent to other stages, and their bytes."""
    row = run.collectives(rank)["pipeline", "send"]
    return row["calls"], row["message_bytes"]
