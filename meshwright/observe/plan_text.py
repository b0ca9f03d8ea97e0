"""A plan on the terminal: what it is, memory and step as bars, the list, the ladder, the reasons. Torch-free."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwright.io import format_bytes, format_count, format_percent, format_seconds, printable
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import (
    describe_execution,
    describe_layout,
    describe_plan,
    exposed_seconds,
    memory_by_class,
)
from meshwright.planner.search.plan_result import PlanResult
from meshwright.planner.search.scaling import ScalingRow, ScalingTable

MEMORY = {
    "parameters": "blue",
    "gradients": "cyan",
    "optimizer": "magenta",
    "activations": "green",
    "logits": "yellow",
    "unsharded": "bright_blue",
    "communication": "red",
    "slack": "white",
    "context": "bright_black",
}
TIME = {"forward": "blue", "backward": "cyan", "recompute": "magenta", "bubble": "yellow", "update": "green"}
WAITING = "red"
"""The colour of time that is spent on messages, and of what is not arithmetic."""
LABELS = {"context": "device's own", "slack": "allocator's slack"}
"""of classes of memory, where their names say too little; the axis called context has its seconds in red"""
WIDEST = 100
"""Letters that a bar has at most."""
FULL, EMPTY = "█", "░"


def show(whole: PlanResult, top: int, explained: bool = False, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    console.print(Text(printable(title(whole)), "bold"))
    console.print(facts([*head(whole), *bars(whole.chosen, console.width)]))
    console.print()
    console.print(ranking(whole, top, console.width))
    console.print(Text(found_told(whole), "dim"))
    console.print(Text("\nFrom DDP to the plan", "bold"))
    console.print(ladder(whole))
    console.print(Padding(Text(whole.ladder_summary), (0, 0, 0, 2), expand=False))
    if explained:
        show_reasons(whole, console)
    if whole.scaling is not None:
        show_scale(whole.scaling, whole.workload.tokens_per_step, console)


def title(whole: PlanResult) -> str:
    cluster = whole.cluster
    nodes = f" in {cluster.nodes:,} nodes of {cluster.devices_per_node}" if cluster.nodes > 1 else ""
    return f"{whole.workload.model.name} on {cluster.device_count:,} {cluster.device.name}{nodes}"


def facts(rows: list[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=8)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(f"  {name}", text)
    return table


def head(whole: PlanResult) -> list[tuple[str, Text]]:
    """What was asked, and the answer."""
    work, chosen, model, job = whole.workload, whole.chosen, whole.workload.model, whole.chosen.job
    active = f" ({format_count(model.active_parameters)} active)" if model.experts else ""
    step = f"{work.global_batch:,} x {work.sequence:,} tokens a step"
    nth = f" [plan {whole.position} of the list]" if whole.position > 1 else ""
    rate = f"{format_count(chosen.tokens_per_second)} tokens/s, {chosen.mfu:.1%} of peak"
    limits = f"{format_seconds(chosen.interval_low)} to {format_seconds(chosen.interval_high)}"
    interval = f"  ({limits} in 4 of 5 cases; most doubt: {chosen.main_uncertainty})"
    return [
        ("model", Text(f"{format_count(model.parameters)} parameters{active}, {step}, {work.precision}")),
        (
            "plan",
            Text(describe_layout(job), "bold green").append(f"; {describe_execution(job)}{nth}", "default not bold"),
        ),
        ("step", Text(f"{format_seconds(chosen.seconds)}, {rate}").append(interval, "dim")),
        *(("note", Text(printable(note), "yellow")) for note in (*work.notes, *chosen.notes)),
    ]


def bars(estimate: Estimate, width: int) -> list[tuple[str, Text]]:
    """Memory of the heaviest rank against what the device has, and the step by what it is spent on."""
    cells = max(10, min(WIDEST, width - 12))
    held, capacity = memory_by_class(estimate.peak_memory), estimate.job.cluster.device.memory
    total, phases = estimate.peak_memory.total, estimate.phases
    where = (
        f" on rank {estimate.memory_by_rank.index(estimate.peak_memory)} of the pipeline"
        if len(estimate.memory_by_rank) > 1
        else ""
    )
    return [
        ("", Text()),
        ("memory", bar(held, capacity, cells, MEMORY)),
        ("", Text(f"{format_bytes(total)} of {format_bytes(capacity)}, {format_percent(total / capacity)}{where}")),
        ("", legend({name: (part, format_bytes(part)) for name, part in held.items()}, total, MEMORY, width - 12)),
        ("time", bar(phases, estimate.seconds, cells, TIME)),
        (
            "",
            legend(
                {name: (part, format_seconds(part)) for name, part in phases.items()},
                estimate.seconds,
                TIME,
                width - 12,
            ),
        ),
    ]


def bar(values: dict[str, float], whole: float, cells: int, colours: dict[str, str]) -> Text:
    """Every part to its cell by rounding the sums, so that the bar is as long as the whole."""
    text, done, sum_ = Text(), 0, 0.0
    for name, value in values.items():
        sum_ += value
        until = min(cells, round(sum_ / whole * cells))
        text.append(FULL * (until - done), colours.get(name, WAITING))
        done = max(done, until)
    return text.append(EMPTY * (cells - done), "bright_black")


def legend(values: dict[str, tuple[float, str]], whole: float, colours: dict[str, str], width: int) -> Text:
    """The parts of a hundredth or more, largest first; no part is torn between lines."""
    text, at = Text(), 0
    for name, (value, told) in sorted(values.items(), key=lambda row: -row[1][0]):
        if value < whole / 100:
            continue
        label = f"{LABELS.get(name, name)} {told}"
        if at and at + len(label) + 2 > width:
            text.append("\n")
            at = 0
        text.append("■ ", colours.get(name, WAITING)).append(label + "   ")
        at += len(label) + 5
    text.rstrip()
    return text


def ranking(whole: PlanResult, top: int, width: int) -> Table:
    """The first plans. The plan is of the fewest parts of those within a hundredth of the quickest."""
    table = Table(box=None, pad_edge=False, width=min(width, 140))
    for name in ("", "layout", "passes", "step", "of peak", "memory", "exposed", "bubble"):
        table.add_column(name, justify="left" if name in ("layout", "passes") else "right", overflow="fold")
    for place, each in enumerate(whole.search.ranked[:top], 1):
        table.add_row(
            str(place),
            describe_layout(each.job),
            describe_execution(each.job),
            format_seconds(each.seconds),
            f"{each.mfu:.0%}",
            format_bytes(each.peak_memory.total),
            format_percent(exposed_seconds(each) / each.seconds),
            format_percent(each.phases.get("bubble", 0.0) / each.seconds),
            style="bold" if place == whole.position else "",
        )
    return table


def found_told(whole: PlanResult) -> str:
    found = whole.search
    light = found.pareto_front[-1]
    return (
        f"{len(found.ranked):,} layouts fit; {found.timed:,} plans timed, {found.memory_estimates:,} weighed; "
        f"lightest: {format_bytes(light.peak_memory.total)} at {format_seconds(light.seconds)} ({describe_plan(light.job)})"  # noqa: E501
    )


def ladder(whole: PlanResult) -> Table:
    """From DDP to the plan."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")
    for rung in whole.ladder:
        table.add_row(Text(f"  {rung.name}", "bold"), "plan", Text(describe_plan(rung.estimate.job), "green"))
        if rung.resolved:
            table.add_row("", "removed", rung.resolved)
            table.add_row("", "price", rung.cost)
        style = "green" if rung.bottleneck.kind == "none" else "yellow"
        table.add_row("", "binds", Text(rung.bottleneck.message, style))
        for told in rung.rejected:
            table.add_row("", Text("not", "dim"), Text(told, "dim"))
    return table


def show_reasons(whole: PlanResult, console: Console) -> None:
    """Five parts, then the questions that anybody would ask."""
    parts = vars(whole.explanation).copy()
    questions = parts.pop("questions")
    for name, told in [*parts.items(), *((question, [told]) for question, told in questions.items())]:
        console.print(Text(f"\n{name[0].upper()}{name[1:]}", "bold"))
        for sentence in told:
            console.print(Padding(Text(printable(sentence)), (0, 0, 0, 2), expand=False))


def show_scale(scale: ScalingTable, tokens: int, console: Console) -> None:
    for title, rows in (("The same batch on more devices", scale.strong), ("A batch that grows along", scale.weak)):
        console.print(Text(f"\n{title}", "bold"))
        console.print(scale_table(rows))
    console.print(
        Text(
            f"Amdahl: {scale.serial_fraction:.1%} of the first row's step does not get shorter on more devices\n"
            f"batch: {format_count(tokens)} tokens a step, {tokens / scale.critical_batch:.2g} of the critical "
            f"batch; a token "
            f"counts for {1 / (1 + tokens / scale.critical_batch):.0%} of one in a small batch"
        )
    )
    console.print(Text(scale.assumption, "dim"))


def scale_table(rows: list[ScalingRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "devices", "batch", "step", "tokens/s", "efficiency", "exposed", "useful tokens/s", "layout"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for row in rows:
        start = (f"{row.factor}x", f"{row.devices:,}", f"{row.batch:,}")
        if row.estimate is None:
            table.add_row(*start, "-", "-", "-", "-", "-", "none divides and fits")
            continue
        figures = (
            format_seconds(row.estimate.seconds),
            format_count(row.estimate.tokens_per_second),
            f"{row.efficiency:.0%}",
            f"{row.exposed_share:.1%}",
            format_count(row.useful_tokens_per_second),
        )
        table.add_row(*start, *figures, describe_layout(row.estimate.job) + ("" if row.same_layout else " (new)"))
    return table
