"""The tables of a plan on the terminal: the ranked list, the baselines, other settings and the scaling rows."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from meshwright.base.io import format_bytes, format_count, format_percent, format_seconds, printable
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import describe_execution, describe_layout, exposed_seconds
from meshwright.planner.search.explanation.baselines import Baseline
from meshwright.planner.search.plan_result import PlanResult
from meshwright.planner.search.scaling import ScalingRow
from meshwright.planner.search.settings import SettingChange
from meshwright.planner.search.trainer_rules import trainer_mfu


def memory_cell(plan: Estimate) -> str:
    """The peak memory of a rank, and its share of the device's memory."""
    used = plan.peak_memory.total
    return f"{format_bytes(used)}\n{format_percent(used / plan.job.cluster.device.memory)}"


def relative_time(plan: Estimate, chosen: Estimate) -> str:
    change = plan.seconds / chosen.seconds - 1
    return "as fast" if abs(change) < 0.005 else f"{change:+.0%}"


def similar_plans(count: int) -> str:
    return f"{count} similar plan{'s' if count > 1 else ''} within 1%" if count else ""


def ranking(result: PlanResult, top: int) -> Table:
    """Lists the first plans, each on several lines: the layout, the rest of the plan, the number of similar plans."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "plan", "step", "MFU", "memory", "exposed\ncomm", "bubble"):
        table.add_column(name, justify="left" if name == "plan" else "right", vertical="bottom", overflow="fold")
    for position, row in enumerate(result.listed[:top], 1):
        plan = row.best
        text = Text(f"{describe_layout(plan.job)}\n{describe_execution(plan.job)}")
        if row.similar:
            text.append(f"\n{similar_plans(row.similar)}", "dim not bold")
        table.add_row(
            str(position),
            text,
            format_seconds(plan.seconds),
            f"{trainer_mfu(plan, result.workload.trainer_name):.0%}",
            memory_cell(plan),
            format_percent(exposed_seconds(plan) / plan.seconds),
            format_percent(plan.phases.get("bubble", 0.0) / plan.seconds),
            style="bold" if position == result.position else "",
        )
    for column in table.columns:
        column.vertical = "top"
    return table


def baseline_table(baselines: list[Baseline], chosen: Estimate) -> Table:
    """Compares well-known layouts with the plan."""
    table = Table(box=None, pad_edge=False)
    for name in ("baseline", "step", "vs plan", "memory"):
        table.add_column(name, justify="left" if name == "baseline" else "right", vertical="top", overflow="fold")
    for row in baselines:
        text = Text(row.name)
        plan = row.estimate
        if plan is not None:
            text.append(f"\n{describe_layout(plan.job)}; {describe_execution(plan.job)}", "dim")
        if row.reason:
            text.append(f"\n{'does not fit: ' if plan is not None else 'not planned: '}", "yellow")
            text.append(printable(row.reason), "yellow")
        if plan is None:
            table.add_row(text, "-", "-", "-")
            continue
        figures = (format_seconds(plan.seconds), relative_time(plan, chosen)) if not row.reason else ("-", "-")
        table.add_row(text, *figures, memory_cell(plan))
    return table


def settings_table(changes: list[SettingChange]) -> Table:
    """Lists the changes of one setting, with what each does to step time and memory."""
    table = Table(box=None, pad_edge=False)
    for name in ("with one setting changed", "step", "memory", ""):
        table.add_column(name, justify="left" if len(name) > 6 else "right", vertical="top", overflow="fold")
    for change in changes:
        text = Text(change.name)
        if change.option:
            text.append(f"\n{change.option}", "dim")
        sign = "+" if change.memory_change >= 0 else "-"
        memory = f"{sign}{format_bytes(abs(change.memory_change))}"
        table.add_row(text, f"{change.time_change:+.0%}", memory, "" if change.fits else Text("does not fit", "yellow"))
    return table


def scaling_rows(rows: list[ScalingRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "devices", "batch", "step", "tokens/s", "efficiency", "exposed\ncomm", "useful\ntokens/s", "plan"):
        table.add_column(name, justify="right", vertical="bottom", overflow="fold")
    for row in rows:
        start = (f"{row.factor}x", f"{row.devices:,}", f"{row.batch:,}")
        if row.estimate is None:
            table.add_row(*start, "-", "-", "-", "-", "-", "none fits")
            continue
        table.add_row(
            *start,
            format_seconds(row.estimate.seconds),
            format_count(row.estimate.tokens_per_second),
            f"{row.efficiency:.0%}",
            f"{row.exposed_share:.1%}",
            format_count(row.useful_tokens_per_second),
            "same" if row.same_layout else "new",
        )
    return table
