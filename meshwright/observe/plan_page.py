"""A plan as one HTML page: no script, nothing fetched, every text escaped, light and dark. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from meshwright.io import format_bytes, format_count, format_percent, format_seconds
from meshwright.observe.plan_svg import front_picture, memory_picture, pipeline_picture, step_picture
from meshwright.observe.plan_text import title
from meshwright.planner.describe import describe_execution, describe_layout, describe_plan, exposed_seconds
from meshwright.planner.search.plan_result import PlanResult
from meshwright.planner.search.scaling import ScalingRow
from meshwright.version import __version__

STYLE = """
:root { color-scheme: light dark; --page: #fff; --card: #f7f8fa; --ink: #1b1f24; --faint: #66707c; --line: #d7dce1;
  --good: #1a7f45; --bad: #c0392b; --warn: #9a6700; --blue: #2f6fd0; --teal: #1e94a8; --violet: #8250c4;
  --green: #2f9450; --gold: #c7a500; --orange: #d9771c; --grey: #98a2ad; --wait: #e9ecef; }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --card: #1b2027; --ink: #e6eaee; --faint: #98a2ad;
  --line: #39424c; --good: #56c881; --bad: #ff7b6b; --warn: #e3b341; --blue: #5b93e8; --teal: #3db3c6;
  --violet: #a680e0; --green: #4db36f; --gold: #d6b92e; --orange: #e8924a; --grey: #6f7a86; --wait: #232a32; } }
body { margin: 0 auto; max-width: 1080px; padding: 32px 24px 64px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 36px 0 10px; } p { margin: 4px 0; }
.faint { color: var(--faint); } .note { color: var(--warn); }
.plan { font-size: 18px; font-weight: 600; color: var(--good); margin-top: 10px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 18px 0; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.figures b { display: block; font-size: 20px; white-space: nowrap; }
.figures span { color: var(--faint); font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; } .wide { overflow-x: auto; }
th { text-align: left; color: var(--faint); font-weight: 500; } th, td { padding: 5px 10px 5px 0; vertical-align: top; }
tr + tr td { border-top: 1px solid var(--line); } .n { text-align: right; white-space: nowrap; }
tr.chosen td { font-weight: 600; } ol { list-style: none; padding: 0; margin: 0; }
li.rung { border-left: 3px solid var(--line); padding: 2px 0 12px 16px; } li.rung.last { border-color: var(--good); }
li.rung b { margin-right: 8px; } .binds { color: var(--bad); } .free { color: var(--good); }
details { color: var(--faint); font-size: 14px; } dl { margin: 0; } dt { font-weight: 600; margin-top: 12px; }
dd { margin: 2px 0 0; } svg { width: 100%; height: auto; display: block; }
svg text { font: 13px system-ui, sans-serif; fill: var(--ink); stroke: var(--page); stroke-width: 4px;
  paint-order: stroke; } svg .faint { fill: var(--faint); }
svg .strong { font-weight: 600; } svg .small { font-size: 12px; } svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; } svg .on { fill: #fff; stroke: none; } svg .on, svg .cell { pointer-events: none; }
.m-parameters, .p-forward, .s-F { fill: var(--blue); } .m-gradients, .p-backward { fill: var(--teal); }
.m-optimizer, .p-recompute { fill: var(--violet); } .m-activations, .p-update, .s-W { fill: var(--green); }
.m-logits, .p-bubble, .s-I { fill: var(--gold); } .m-unsharded { fill: var(--orange); } .s-B { fill: var(--orange); }
.m-communication, .exposed { fill: var(--bad); } .m-slack, .m-context, .p-other, .p-contention { fill: var(--grey); }
.total { fill: var(--good); } .over { fill: var(--bad); } .hidden, .wait { fill: var(--wait); } .later { opacity: .6; }
.limit { stroke: var(--ink); stroke-dasharray: 4 3; } .axis, .front { fill: none; stroke: var(--line); }
.front { stroke: var(--blue); } .dot { fill: var(--grey); opacity: .55; } .front-dot { fill: var(--blue); opacity: 1; }
.dot.chosen { fill: var(--good); opacity: 1; stroke: var(--page); stroke-width: 2; }
"""


def page(whole: PlanResult, top: int) -> Iterator[str]:
    """Piece by piece."""
    name = escape(title(whole))
    yield f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield f"<style>{STYLE}</style></head><body>\n<h1>{name}</h1>\n"
    yield from head(whole)
    yield section("Memory of the heaviest rank", memory_picture(whole.chosen))
    yield section("A step", step_picture(whole.chosen), "Collectives: red is waited for, grey is hidden by computing.")
    picture, left = pipeline_picture(whole.chosen)
    if picture:
        yield section("The pipeline", picture, left)
    yield section("From DDP to the plan", "".join(ladder(whole)))
    yield section("Why", "".join(reasons(whole)))
    yield section("Plans", "".join(candidates(whole, top)), "Of those within a hundredth of the quickest the simplest.")
    yield section("Seconds against memory", front_picture(whole), "Blue: none is both quicker and lighter.")
    yield from scale(whole)
    yield f'<p class="faint">meshwright {__version__}</p></body></html>\n'


def section(name: str, inside: str, told: str = "") -> str:
    below = f'<p class="faint">{escape(told)}</p>' if told else ""
    return f'<section><h2>{escape(name)}</h2><div class="wide">{inside}</div>{below}</section>\n'


def head(whole: PlanResult) -> Iterator[str]:
    work, chosen = whole.workload, whole.chosen
    asked = (
        f"{format_count(work.model.parameters)} parameters, {work.global_batch:,} x {work.sequence:,} tokens "
        f"a step, {work.precision}"
    )
    yield f'<p class="faint">{escape(asked)}</p>\n<p class="plan">{escape(describe_layout(chosen.job))}</p>'
    yield f"<p>{escape(describe_execution(chosen.job))}</p>\n"
    for note in (*work.notes, *chosen.notes):
        yield f'<p class="note">{escape(note)}</p>\n'
    capacity = chosen.job.cluster.device.memory
    figures = {
        "seconds a step": f"{chosen.seconds:.3g}",
        "in 4 of 5 cases": f"{chosen.interval_low:.3g}-{chosen.interval_high:.3g} s",
        "tokens a second": format_count(chosen.tokens_per_second),
        "of the devices' peak": f"{chosen.mfu:.1%}",
        f"of {format_bytes(capacity)}": format_bytes(chosen.peak_memory.total),
        "of the step exposed": format_percent(exposed_seconds(chosen) / chosen.seconds),
    }
    shown = "".join(
        f"<div><b>{escape(figure)}</b><span>{escape(name)}</span></div>" for name, figure in figures.items()
    )
    yield f'<div class="figures">{shown}</div>\n'
    yield f'<p class="faint">Most of the doubt: {escape(chosen.main_uncertainty)}.</p>\n'


def ladder(whole: PlanResult) -> Iterator[str]:
    yield "<ol>"
    for place, rung in enumerate(whole.ladder, 1):
        kind = " last" if place == len(whole.ladder) else ""
        yield f'<li class="rung{kind}"><b>{escape(rung.name)}</b>{escape(describe_plan(rung.estimate.job))}'
        if rung.resolved:
            yield f"<p>removed: {escape(rung.resolved)}</p><p>price: {escape(rung.cost)}</p>"
        state = "free" if rung.bottleneck.kind == "none" else "binds"
        yield f'<p class="{state}">binds: {escape(rung.bottleneck.message)}</p>'
        if rung.rejected:
            told = "".join(f"<p>{escape(each)}</p>" for each in rung.rejected)
            yield f"<details><summary>not added</summary>{told}</details>"
        yield "</li>"
    yield f"</ol><p>{escape(whole.ladder_summary)}</p>"


def reasons(whole: PlanResult) -> Iterator[str]:
    parts = vars(whole.explanation).copy()
    questions: dict[str, str] = parts.pop("questions")
    yield "<dl>"
    for name, told in [*parts.items(), *((question, [answer]) for question, answer in questions.items())]:
        yield f"<dt>{escape(name[0].upper() + name[1:])}</dt>"
        yield "".join(f"<dd>{escape(sentence)}</dd>" for sentence in told)
    yield "</dl>"


def rows_of(names: list[str], rows: list[list[str]], chosen: int = -1, words: tuple[int, ...] = ()) -> Iterator[str]:
    """A table; `words` are the columns that hold no figures."""
    kinds = ["" if place in words else ' class="n"' for place in range(len(names))]
    yield (
        "<table><tr>"
        + "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(names, kinds, strict=True))
        + "</tr>"
    )
    for place, row in enumerate(rows):
        yield '<tr class="chosen">' if place == chosen else "<tr>"
        yield "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
    yield "</table>"


def candidates(whole: PlanResult, top: int) -> Iterator[str]:
    names = ["", "layout", "passes", "step", "4 of 5 cases", "of peak", "memory", "exposed", "bubble"]
    rows = [
        [
            str(place),
            describe_layout(each.job),
            describe_execution(each.job),
            format_seconds(each.seconds),
            f"{each.interval_low:.3g} - {each.interval_high:.3g} s",
            f"{each.mfu:.1%}",
            format_bytes(each.peak_memory.total),
            format_percent(exposed_seconds(each) / each.seconds),
            format_percent(each.phases.get("bubble", 0.0) / each.seconds),
        ]
        for place, each in enumerate(whole.search.ranked[: max(top, 10)], 1)
    ]
    yield from rows_of(names, rows, whole.position - 1, (0, 1, 2))


def scale(whole: PlanResult) -> Iterator[str]:
    if whole.scaling is None:
        return
    names = ["", "devices", "batch", "step", "tokens/s", "efficiency", "exposed", "useful tokens/s", "layout"]
    for name, rows in (
        ("The same batch on more devices", whole.scaling.strong),
        ("A batch that grows along", whole.scaling.weak),
    ):
        yield section(name, "".join(rows_of(names, [scale_row(row) for row in rows], words=(0, 8))))
    yield f"<p>Amdahl: {whole.scaling.serial_fraction:.1%} of the first row's step does not get shorter on more devices.</p>\n"  # noqa: E501
    yield f'<p class="faint">{escape(whole.scaling.assumption)}</p>\n'


def scale_row(row: ScalingRow) -> list[str]:
    start = [f"{row.factor}x", f"{row.devices:,}", f"{row.batch:,}"]
    if row.estimate is None:
        return [*start, "-", "-", "-", "-", "-", "none divides and fits"]
    return [
        *start,
        format_seconds(row.estimate.seconds),
        format_count(row.estimate.tokens_per_second),
        f"{row.efficiency:.0%}",
        f"{row.exposed_share:.1%}",
        format_count(row.useful_tokens_per_second),
        describe_layout(row.estimate.job) + ("" if row.same_layout else " (new)"),
    ]
