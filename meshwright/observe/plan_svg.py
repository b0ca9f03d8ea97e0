"""The pictures of a plan's page as SVG: memory, the step, the pipeline, the front. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from meshwright.io import format_bytes, format_seconds
from meshwright.observe.plan_text import LABELS
from meshwright.observe.schedule_text import OPS
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import describe_plan, memory_by_class, merged_calls
from meshwright.planner.search.plan_result import PlanResult
from meshwright.topology.schedule_timeline import Timeline, build_timeline

WIDTH, LEFT, RIGHT, ROW = 1000, 150, 110, 26
"""of a picture: where its bars begin, what is left for figures, and how high a row is"""
SPAN = WIDTH - LEFT - RIGHT
MOST_CELLS = 6000
"""of the pipeline's picture"""


def framed(height: float, inside: str, told: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(told)}"><title>{escape(told)}</title>'
        f"{inside}</svg>"
    )


def text(x: float, y: float, told: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{name}>{escape(told)}</text>'


def box(x: float, y: float, wide: float, kind: str, told: str, high: float = ROW - 8) -> str:
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.1f}" width="{max(0.0, wide):.2f}" height="{high:g}" rx="2">'
        f"<title>{escape(told)}</title></rect>"
    )


def memory_picture(estimate: Estimate) -> str:
    """A waterfall: each class begins where the one before ends, up to the device's memory or beyond."""
    held, capacity = memory_by_class(estimate.peak_memory), estimate.job.cluster.device.memory
    total = estimate.peak_memory.total
    scale = SPAN / max(total, capacity)
    parts, at = [], 0.0
    for row, (name, value) in enumerate(held.items()):
        y = 8 + row * ROW
        label = LABELS.get(name, name)
        parts.append(text(LEFT - 8, y + 13, label, "end"))
        parts.append(box(LEFT + at * scale, y, value * scale, f"m-{name}", f"{label}: {format_bytes(value)}"))
        at += value
        parts.append(text(LEFT + at * scale + 6, y + 13, format_bytes(value), "faint"))
    y = 8 + len(held) * ROW
    parts.append(text(LEFT - 8, y + 13, "heaviest rank", "end strong"))
    parts.append(box(LEFT, y, total * scale, "total" if total <= capacity else "over", f"all: {format_bytes(total)}"))
    parts.append(text(LEFT + total * scale + 6, y + 13, format_bytes(total), "strong"))
    edge = LEFT + capacity * scale
    parts.append(f'<line class="limit" x1="{edge:.1f}" x2="{edge:.1f}" y1="0" y2="{y + ROW:g}"/>')
    parts.append(text(edge, y + ROW + 14, f"device {format_bytes(capacity)}", "middle faint"))
    return framed(
        y + ROW + 22, "".join(parts), f"memory of the heaviest rank: {format_bytes(total)} of {format_bytes(capacity)}"
    )


def step_picture(estimate: Estimate) -> str:
    """The step by phase, end to end; below, every collective, dark where it is waited for."""
    scale, parts, at = SPAN / estimate.seconds, [text(LEFT - 8, 25, "step", "end strong")], 0.0
    for name, value in estimate.phases.items():
        parts.append(box(LEFT + at * scale, 6, value * scale, kind_of(name), f"{name}: {format_seconds(value)}", 30))
        if value * scale > 9 * len(name):
            parts.append(text(LEFT + (at + value / 2) * scale, 25, name, "middle on"))
        at += value
    parts.append(text(LEFT + SPAN + 6, 25, format_seconds(estimate.seconds), "strong"))
    rows = keys(
        {name: (kind_of(name), format_seconds(value)) for name, value in estimate.phases.items() if value > 0}, 58
    )
    parts += [key for row in rows for key in row]
    y = 58.0 + 20 * len(rows)
    for call in sorted(merged_calls(estimate), key=lambda call: -call.exposed_seconds)[:10]:
        longest = min(SPAN, max(call.seconds, call.exposed_seconds) * scale)
        exposed = format_seconds(call.exposed_seconds)
        told = f"{call.axis} {call.collective}: {format_seconds(call.seconds)}, {exposed} exposed"
        parts.append(text(LEFT - 8, y + 13, f"{call.axis} {call.collective}", "end small"))
        parts.append(box(LEFT, y, longest, "hidden", told))
        parts.append(box(LEFT, y, min(longest, call.exposed_seconds * scale), "exposed", told))
        parts.append(text(LEFT + longest + 6, y + 13, format_seconds(max(call.seconds, call.exposed_seconds)), "faint"))
        y += ROW
    return framed(y + 6, "".join(parts), f"a step of {format_seconds(estimate.seconds)} by phase, and its collectives")


def keys(values: dict[str, tuple[str, str]], y: float) -> list[list[str]]:
    """What colours mean, in as many rows as it takes."""
    rows: list[list[str]] = [[]]
    x = float(LEFT)
    for name, (kind, told) in values.items():
        label = f"{name} {told}".strip()
        wide = 26 + 6.6 * len(label)
        if x + wide > WIDTH and rows[-1]:
            rows.append([])
            x = float(LEFT)
        top = y + 20 * (len(rows) - 1)
        rows[-1] += [box(x, top - 10, 11, kind, label, 11), text(x + 16, top, label, "small")]
        x += wide
    return rows


def kind_of(phase: str) -> str:
    known = ("forward", "backward", "recompute", "bubble", "update", "other", "contention")
    return f"p-{phase}" if phase in known else "exposed"


def pipeline_picture(estimate: Estimate) -> tuple[str, str]:
    """(the schedule, what was left out of the picture); ('', '') where there is no pipeline."""
    job = estimate.job
    ranks = job.layout.pipeline
    if ranks == 1:
        return "", ""
    micros = job.batch.accumulation
    drawn = micros
    while drawn > 2 * ranks and (drawn > 4 * ranks or 3 * ranks * drawn * job.stages_per_rank > MOST_CELLS):
        drawn = max(2 * ranks, drawn // 2 // ranks * ranks)
    found = build_timeline(job.schedule, ranks, drawn, job.stages_per_rank)
    step = max(1, -(-3 * ranks * drawn * job.stages_per_rank // MOST_CELLS))
    used = {slot.action.op for row in found.rows for slot in row}
    rows = [*range(0, ranks, step)]
    told = f"{job.schedule}: {ranks} ranks, {drawn} of {micros} micro-batches"
    left = [f"{drawn} of {micros} micro-batches are drawn; the middle repeats"] if drawn < micros else []
    left += [f"one rank of {step} is drawn"] if step > 1 else []
    left += ["pale: a rank's second, fourth, ... stage"] if job.stages_per_rank > 1 else []
    high = 20 if len(rows) <= 16 else 12
    bottom = len(rows) * high + 8
    legend = keys({OPS[what]: (f"s-{what}", "") for what in "FBIW" if what in used}, bottom + 14)
    inside = [*pipeline_rows(found, rows, high), *(key for row in legend for key in row)]
    return framed(bottom + 24, "".join(inside), told), "; ".join(left)


def pipeline_rows(found: Timeline, rows: list[int], high: int) -> Iterator[str]:
    scale = SPAN / float(found.makespan)
    for place, rank in enumerate(rows):
        y = 4 + place * high
        yield text(LEFT - 8, y + high * 0.7, f"rank {rank}", "end small")
        yield f'<rect class="wait" x="{LEFT}" y="{y}" width="{SPAN}" height="{high - 3}"/>'
        for slot in found.rows[rank]:
            start, wide = LEFT + float(slot.start) * scale, float(slot.end - slot.start) * scale
            later = " later" if slot.action.stage // found.ranks % 2 else ""
            yield (
                f'<rect class="s-{slot.action.op}{later}" x="{start:.1f}" y="{y}" width="{max(0.3, wide - 0.4):.1f}" '
                f'height="{high - 3}"/>'
            )


def front_picture(whole: PlanResult) -> str:
    """Seconds against memory: every layout that fits, and the front than which none is both quicker and lighter."""
    points, front = whole.search.ranked, whole.search.pareto_front
    every = [*points, *front]
    quick, slow = min(one.seconds for one in every), max(one.seconds for one in every)
    slow = min(slow, 3 * quick) if slow > quick else 2 * quick
    capacity, high = whole.cluster.device.memory, 260

    def place(one: Estimate) -> tuple[float, float]:
        return (
            LEFT + min(1.0, (one.seconds - quick) / (slow - quick)) * SPAN,
            12 + (1 - one.peak_memory.total / capacity) * (high - 40),
        )

    parts = [f'<path class="axis" d="M{LEFT} 8V{high - 24}H{LEFT + SPAN}"/>']
    parts += [text(LEFT - 8, 18, format_bytes(capacity), "end faint"), text(LEFT - 8, high - 24, "0", "end faint")]
    parts += [
        text(LEFT, high - 6, format_seconds(quick), "faint"),
        text(LEFT + SPAN, high - 6, format_seconds(slow), "end faint"),
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, front))
    parts.append(f'<polyline class="front" points="{line}"/>')
    for kind, group in (("dot", points[:400]), ("dot front-dot", front), ("dot chosen", [whole.chosen])):
        for one in group:
            x, y = place(one)
            told = f"{describe_plan(one.job)}: {format_seconds(one.seconds)}, {format_bytes(one.peak_memory.total)}"
            parts.append(
                f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(told)}</title></circle>'
            )
    return framed(high, "".join(parts), "seconds of a step against memory of the heaviest rank")
