"""A pipeline schedule as one SVG file, without scripts or external resources, for light and dark pages. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from meshwright.base.io import write_output
from meshwright.base.topology.schedule_timeline import ActionCosts, Timeline, TimelineSlot
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.planner.display.schedule_text import OPS, describe_timeline, is_even_stage, title

LEFT, TOP, ROW = 72, 84, 28
"""The left and top edges of the rows, and the height of a row."""
MIN_PICTURE_WIDTH = 1100
"""The width that the legend needs."""

STYLE = """
svg { --page: #ffffff; --ink: #1b1f24; --faint: #66707c; --line: #d7dce1; --wait: #f1f3f5;
  --F: #2f6fd0; --f: #8fb8f0; --B: #d9771c; --b: #f3bd86; --I: #c7a500; --i: #ead873; --W: #2f9450; --w: #94d3a8;
  --deep: #ffffff; --pale: #14181d; }
@media (prefers-color-scheme: dark) { svg { --page: #14181d; --ink: #e6eaee; --faint: #98a2ad; --line: #39424c;
  --wait: #1d232a; } }
text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.title { font-size: 15px; font-weight: 600; } .faint { fill: var(--faint); }
.cell { text-anchor: middle; font-size: 11px; } rect { stroke: var(--page); }
.F { fill: var(--F); } .f { fill: var(--f); } .B { fill: var(--B); } .b { fill: var(--b); }
.I { fill: var(--I); } .i { fill: var(--i); } .W { fill: var(--W); } .w { fill: var(--w); }
.wait { fill: var(--wait); } .page { fill: var(--page); stroke: none; }
.onF, .onW { fill: var(--deep); } .onB, .onI, .onf, .onb, .oni, .onw { fill: var(--pale); }
.pair { stroke: var(--ink); stroke-width: 2; }
"""


def draw_svg(timeline: Timeline, costs: ActionCosts) -> Iterator[str]:
    """Yields the file line by line, so that a large drawing is never in memory at once."""
    slots, cell_width = int(timeline.makespan), slot_width(timeline)
    width = max(MIN_PICTURE_WIDTH, LEFT + slots * cell_width + 16)
    bottom = TOP + timeline.ranks * ROW
    sentences = describe_timeline(timeline, costs)
    height = bottom + 30 + 18 * len(sentences)
    name = escape(title(timeline))
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
    yield f'viewBox="0 0 {width} {height}" role="img">\n<title>{name}</title>\n<style>{STYLE}</style>\n'
    yield f'<rect class="page" width="{width}" height="{height}"/>\n'
    yield f'<text class="title" x="16" y="26">{name}</text>\n'
    yield from legend(timeline)
    for tick in range(0, slots, 5):
        yield f'<text class="faint" x="{LEFT + tick * cell_width + 2}" y="{TOP - 8}">{tick}</text>\n'
    for rank, row in enumerate(timeline.rows):
        top = TOP + rank * ROW
        yield f'<text x="16" y="{top + 18}">rank {rank}</text>\n'
        yield f'<rect class="wait" x="{LEFT}" y="{top}" width="{slots * cell_width}" height="{ROW - 4}"/>\n'
        for slot in row:
            yield cell(timeline, slot, top)
    for line, text in enumerate(sentences):
        yield f'<text x="16" y="{bottom + 26 + 18 * line}">{escape(text)}</text>\n'
    yield "</svg>\n"


def slot_width(timeline: Timeline) -> int:
    """Returns the width of a slot that fits the largest micro-batch number."""
    return 8 + 7 * max(2, len(str(timeline.micro_batches - 1)))


def cell(timeline: Timeline, slot: TimelineSlot, top: int) -> str:
    action = slot.action
    kind = action.op.lower() if is_even_stage(timeline, slot) else action.op
    width = slot_width(timeline)
    left, wide = LEFT + int(slot.start) * width, int(slot.end - slot.start) * width
    pair = " pair" if slot.paired else ""
    suffix = ", in an overlapped pair" if pair else ""
    label = f"stage {action.stage}, {OPS[action.op]} of micro-batch {action.micro_batch}{suffix}"
    return (
        f'<g><title>{label}</title><rect class="{kind}{pair}" x="{left + 1}" y="{top}" width="{wide - 2}" '
        f'height="{ROW - 4}" rx="2"/><text class="cell on{kind}" x="{left + wide / 2:g}" y="{top + 16}">'
        f"{action.micro_batch}</text></g>\n"
    )


def legend(timeline: Timeline) -> Iterator[str]:
    used = {slot.action.op for row in timeline.rows for slot in row}
    left = 16
    for op in (op for op in OPS if op in used):
        for kind in (op, op.lower()) if timeline.stages_per_rank > 1 else (op,):
            yield f'<rect class="{kind}" x="{left}" y="40" width="16" height="16" rx="2"/>\n'
            left += 18
        text = f"{op}: {OPS[op]}"
        yield f'<text x="{left + 4}" y="52">{text}</text>\n'
        left += 7 * len(text) + 16
    if timeline.stages_per_rank > 1:
        pairs = "; framed: overlapped pair" if SCHEDULES[timeline.schedule].overlaps_pairs else ""
        stages = "second stage" + (", fourth, ..." if timeline.stages_per_rank > 2 else "")
        yield f'<text class="faint" x="{left}" y="52">light: the rank\'s {stages}{pairs}</text>\n'


def write_svg(timeline: Timeline, costs: ActionCosts, path: Path) -> None:
    write_output(path, draw_svg(timeline, costs), "--svg")
