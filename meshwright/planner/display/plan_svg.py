"""The SVG pictures of a plan's page: memory, step time, pipeline schedule and Pareto front. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from meshwright.base.io import format_bytes, format_seconds
from meshwright.base.topology.schedule_timeline import Timeline, build_timeline
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import describe_plan, memory_by_class, memory_label, merged_calls, phase_label
from meshwright.planner.display.schedule_text import OPS
from meshwright.planner.search.plan_result import PlanResult

WIDTH, LEFT, RIGHT, ROW = 1000, 220, 110, 26
"""The width of a picture, the margins left and right of its bars, and the height of a row."""
SPAN = WIDTH - LEFT - RIGHT
MAX_CELLS = 6000
"""The cells of the pipeline picture."""
MAX_POINTS = 400
MAX_COLLECTIVES = 10
COMPUTE_PHASES = ("forward", "backward", "recompute", "bubble", "update", "other", "contention")


def picture(height: float, content: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}"><title>{escape(label)}</title>'
        f"{content}</svg>"
    )


def text(x: float, y: float, content: str, css_class: str = "") -> str:
    attribute = f' class="{css_class}"' if css_class else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attribute}>{escape(content)}</text>'


def box(x: float, y: float, width: float, css_class: str, label: str, height: float = ROW - 8) -> str:
    return (
        f'<rect class="{css_class}" x="{x:.2f}" y="{y:.1f}" width="{max(0.0, width):.2f}" height="{height:g}" rx="2">'
        f"<title>{escape(label)}</title></rect>"
    )


def memory_picture(plan: Estimate) -> str:
    """Draws a waterfall: each class starts where the one before it ends, up to the device's memory or beyond."""
    memory, capacity = memory_by_class(plan.peak_memory), plan.job.cluster.device.memory
    total = plan.peak_memory.total
    scale = SPAN / max(total, capacity)
    parts, start = [], 0.0
    for row, (name, size) in enumerate(memory.items()):
        y = 8 + row * ROW
        label = memory_label(name)
        parts.append(text(LEFT - 8, y + 13, label, "end"))
        parts.append(box(LEFT + start * scale, y, size * scale, f"m-{name}", f"{label}: {format_bytes(size)}"))
        start += size
        parts.append(text(LEFT + start * scale + 6, y + 13, format_bytes(size), "faint"))
    y = 8 + len(memory) * ROW
    parts.append(text(LEFT - 8, y + 13, "total", "end strong"))
    fits = "total" if total <= capacity else "excess"
    parts.append(box(LEFT, y, total * scale, fits, f"total: {format_bytes(total)}"))
    parts.append(text(LEFT + total * scale + 6, y + 13, format_bytes(total), "strong"))
    edge = LEFT + capacity * scale
    parts.append(f'<line class="limit" x1="{edge:.1f}" x2="{edge:.1f}" y1="0" y2="{y + ROW:g}"/>')
    parts.append(text(edge, y + ROW + 14, f"device memory {format_bytes(capacity)}", "end faint"))
    label = f"peak memory of a rank: {format_bytes(total)} of {format_bytes(capacity)}"
    return picture(y + ROW + 22, "".join(parts), label)


def step_picture(plan: Estimate) -> str:
    """Draws the phases of a step end to end, and below them every collective with its exposed part."""
    scale, parts, start = SPAN / plan.seconds, [text(LEFT - 8, 25, "step", "end strong")], 0.0
    for phase, spent in plan.phases.items():
        name = phase_label(phase)
        label = f"{name}: {format_seconds(spent)}"
        parts.append(box(LEFT + start * scale, 6, spent * scale, phase_class(phase), label, 30))
        if spent * scale > 9 * len(name):
            parts.append(text(LEFT + (start + spent / 2) * scale, 25, name, "middle on"))
        start += spent
    parts.append(text(LEFT + SPAN + 6, 25, format_seconds(plan.seconds), "strong"))
    entries = {
        f"{phase_label(phase)} {format_seconds(spent)}": phase_class(phase)
        for phase, spent in plan.phases.items()
        if spent > 0
    }
    rows = legend_rows(entries, 58)
    parts += [item for row in rows for item in row]
    y = 58.0 + 20 * len(rows)
    for call in sorted(merged_calls(plan), key=lambda call: -call.exposed_seconds)[:MAX_COLLECTIVES]:
        longest = max(call.seconds, call.exposed_seconds)
        width = min(SPAN, longest * scale)
        name = f"{call.axis} {call.collective}"
        label = f"{name}: {format_seconds(call.seconds)}, {format_seconds(call.exposed_seconds)} exposed"
        parts.append(text(LEFT - 8, y + 13, name, "end small"))
        parts.append(box(LEFT, y, width, "hidden", label))
        parts.append(box(LEFT, y, min(width, call.exposed_seconds * scale), "exposed", label))
        parts.append(text(LEFT + width + 6, y + 13, format_seconds(longest), "faint"))
        y += ROW
    label = f"a step of {format_seconds(plan.seconds)} by phase, and its collectives"
    return picture(y + 6, "".join(parts), label)


def legend_rows(entries: dict[str, str], y: float) -> list[list[str]]:
    """Draws a legend of CSS classes by label, in as many rows as it needs."""
    rows: list[list[str]] = [[]]
    x = float(LEFT)
    for label, css_class in entries.items():
        width = 28 + 6.8 * len(label)
        if x + width > WIDTH and rows[-1]:
            rows.append([])
            x = float(LEFT)
        top = y + 20 * (len(rows) - 1)
        rows[-1] += [box(x, top - 10, 11, css_class, label, 11), text(x + 16, top, label, "small")]
        x += width
    return rows


def phase_class(phase: str) -> str:
    return f"p-{phase}" if phase in COMPUTE_PHASES else "exposed"


def pipeline_picture(plan: Estimate) -> tuple[str, str]:
    """Returns the picture of the schedule and a note on what it leaves out; two empty strings without a pipeline."""
    job = plan.job
    ranks, micro_batches, stages = job.layout.pipeline, job.batch.accumulation, job.stages_per_rank
    if ranks == 1:
        return "", ""
    drawn = micro_batches
    while drawn > 2 * ranks and (drawn > 4 * ranks or 3 * ranks * drawn * stages > MAX_CELLS):
        drawn = max(2 * ranks, drawn // 2 // ranks * ranks)
    timeline = build_timeline(job.schedule, ranks, drawn, stages)
    stride = max(1, -(-3 * ranks * drawn * stages // MAX_CELLS))
    shown_ranks = [*range(0, ranks, stride)]
    notes = [f"{drawn} of {micro_batches} micro-batches are drawn"] if drawn < micro_batches else []
    notes += [f"one of {stride} ranks is drawn"] if stride > 1 else []
    notes += ["light: a rank's second, fourth, ... stage"] if stages > 1 else []
    row_height = 20 if len(shown_ranks) <= 16 else 12
    bottom = len(shown_ranks) * row_height + 8
    used = {slot.action.op for row in timeline.rows for slot in row}
    legend = legend_rows({OPS[op]: f"s-{op}" for op in OPS if op in used}, bottom + 14)
    content = [*timeline_rows(timeline, shown_ranks, row_height), *(item for row in legend for item in row)]
    label = f"{job.schedule}: {ranks} ranks, {drawn} of {micro_batches} micro-batches"
    return picture(bottom + 24, "".join(content), label), "; ".join(notes)


def timeline_rows(timeline: Timeline, ranks: list[int], row_height: int) -> Iterator[str]:
    scale = SPAN / float(timeline.makespan)
    for position, rank in enumerate(ranks):
        y = 4 + position * row_height
        yield text(LEFT - 8, y + row_height * 0.7, f"rank {rank}", "end small")
        yield f'<rect class="wait" x="{LEFT}" y="{y}" width="{SPAN}" height="{row_height - 3}"/>'
        for slot in timeline.rows[rank]:
            start, width = LEFT + float(slot.start) * scale, float(slot.end - slot.start) * scale
            even = " later" if slot.action.stage // timeline.ranks % 2 else ""
            yield (
                f'<rect class="s-{slot.action.op}{even}" x="{start:.1f}" y="{y}" width="{max(0.3, width - 0.4):.1f}" '
                f'height="{row_height - 3}"/>'
            )


def pareto_picture(result: PlanResult) -> str:
    """Draws step time against memory: every layout that fits, and the Pareto front."""
    points, front = result.search.ranked, result.search.pareto_front
    step_times = [plan.seconds for plan in (*points, *front)]
    fastest, slowest = min(step_times), max(step_times)
    slowest = min(slowest, 3 * fastest) if slowest > fastest else 2 * fastest
    capacity, height = result.cluster.device.memory, 260

    def position(plan: Estimate) -> tuple[float, float]:
        return (
            LEFT + min(1.0, (plan.seconds - fastest) / (slowest - fastest)) * SPAN,
            12 + (1 - plan.peak_memory.total / capacity) * (height - 40),
        )

    parts = [
        f'<path class="axis" d="M{LEFT} 8V{height - 24}H{LEFT + SPAN}"/>',
        text(LEFT - 8, 18, format_bytes(capacity), "end faint"),
        text(LEFT - 8, height - 24, "0", "end faint"),
        text(LEFT, height - 6, format_seconds(fastest), "faint"),
        text(LEFT + SPAN, height - 6, format_seconds(slowest), "end faint"),
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(position, front))
    parts.append(f'<polyline class="front" points="{line}"/>')
    for css_class, plans in (("dot", points[:MAX_POINTS]), ("dot front-dot", front), ("dot chosen", [result.chosen])):
        for plan in plans:
            x, y = position(plan)
            figures = f"{format_seconds(plan.seconds)}, {format_bytes(plan.peak_memory.total)}"
            label = escape(f"{describe_plan(plan.job)}: {figures}")
            parts.append(f'<circle class="{css_class}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{label}</title></circle>')
    return picture(height, "".join(parts), "step time against peak memory of a rank")
