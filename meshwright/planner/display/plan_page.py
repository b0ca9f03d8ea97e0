"""The HTML page of a plan, rendered from templates/plan.html: self-contained, every text escaped. Torch-free."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from meshwright.base.io import format_bytes, format_count, format_percent, format_seconds
from meshwright.base.pages.html_templates import template_environment
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import describe_execution, describe_layout, describe_plan, exposed_seconds
from meshwright.planner.display.plan_svg import memory_picture, pareto_picture, pipeline_picture, step_picture
from meshwright.planner.display.plan_tables import relative_time
from meshwright.planner.display.plan_text import describe_cost, describe_risk, scaling_sentences, title
from meshwright.planner.search.choice import memory_accuracy
from meshwright.planner.search.explanation.baselines import Baseline
from meshwright.planner.search.plan_result import PlanResult
from meshwright.planner.search.scaling import ScalingRow, ScalingTable
from meshwright.planner.search.settings import SettingChange
from meshwright.planner.search.trainer_rules import flop_convention, trainer_mfu
from meshwright.version import __version__

MIN_PLANS = 10
"""The plans that the page lists if the terminal lists fewer."""
PLAN_HEADINGS = (
    "",
    "layout",
    "execution",
    "step",
    "80% interval",
    "MFU",
    "memory",
    "exposed comm",
    "bubble",
    "similar",
)
BASELINE_HEADINGS = ("baseline", "plan", "step", "vs plan", "memory", "of device", "fits")
SETTING_HEADINGS = ("setting", "option", "step", "memory", "fits")
SCALING_HEADINGS = (
    "",
    "devices",
    "batch",
    "step",
    "tokens/s",
    "efficiency",
    "exposed comm",
    "useful tokens/s",
    "layout",
)


def render_plan_page(result: PlanResult, top: int) -> str:
    return template_environment().get_template("plan.html").render(page_context(result, top)).lstrip()


def page_context(result: PlanResult, top: int) -> dict[str, Any]:
    """Returns the values of the template. Pictures are SVG markup, in which plan_svg has escaped every text."""
    work, plan = result.workload, result.chosen
    schedule, schedule_note = pipeline_picture(plan)
    parameters = f"{format_count(work.model.parameters)} parameters"
    batch = f"{work.global_batch:,} samples x {work.sequence:,} tokens per step"
    return {
        "version": __version__,
        "title": title(result),
        "workload": f"{parameters}, {batch}, {work.precision}",
        "layout": describe_layout(plan.job),
        "execution": describe_execution(plan.job),
        "notes": [*work.notes, *plan.notes],
        "figures": {
            "step time": format_seconds(plan.seconds),
            "80% interval": f"{plan.interval_low:.3g} to {plan.interval_high:.3g} s",
            "tokens per second": format_count(plan.tokens_per_second),
            f"MFU as {work.trainer_name} counts it": f"{trainer_mfu(plan, work.trainer_name):.1%}",
            f"memory of {format_bytes(plan.job.cluster.device.memory)}, {work.headroom:.0%} headroom": (
                f"{format_bytes(plan.peak_memory.total)}, "
                f"{format_percent(plan.peak_memory.total / plan.job.cluster.device.memory)}"
            ),
            "exposed communication": format_percent(exposed_seconds(plan) / plan.seconds),
        },
        "uncertainty": plan.main_uncertainty,
        "memory_accuracy": f"{memory_accuracy(plan.job):.0%}",
        "memory_risk": describe_risk(plan),
        "flop_convention": flop_convention(work),
        "cost": describe_cost(result.cost) if result.cost else "",
        "baseline_headings": BASELINE_HEADINGS,
        "baselines": [baseline_row(row, plan) for row in result.baselines],
        "setting_headings": SETTING_HEADINGS,
        "settings": [setting_row(change) for change in result.settings],
        "memory_picture": Markup(memory_picture(plan)),
        "step_picture": Markup(step_picture(plan)),
        "pipeline_picture": Markup(schedule),
        "pipeline_note": schedule_note,
        "pareto_picture": Markup(pareto_picture(result)),
        "ladder": [
            {
                "name": step.name,
                "plan": describe_plan(step.estimate.job),
                "resolved": step.resolved,
                "cost": step.cost,
                "unlimited": step.bottleneck.kind == "none",
                "bottleneck": step.bottleneck.message,
                "rejected": step.rejected,
            }
            for step in result.ladder
        ],
        "ladder_summary": result.ladder_summary,
        "explanation": explanation_parts(result),
        "plan_headings": PLAN_HEADINGS,
        "plans": plan_rows(result, top),
        "chosen": result.position - 1,
        "scaling": scaling_context(result, result.scaling) if result.scaling else None,
    }


def baseline_row(row: Baseline, chosen: Estimate) -> list[str]:
    plan = row.estimate
    if plan is None:
        return [row.name, "-", "-", "-", "-", "-", f"not planned: {row.reason}"]
    used = plan.peak_memory.total
    figures = [format_seconds(plan.seconds), relative_time(plan, chosen)] if not row.reason else ["-", "-"]
    share = format_percent(used / plan.job.cluster.device.memory)
    fits = f"no: {row.reason}" if row.reason else "yes"
    return [row.name, describe_plan(plan.job), *figures, format_bytes(used), share, fits]


def setting_row(change: SettingChange) -> list[str]:
    sign = "+" if change.memory_change >= 0 else "-"
    memory = f"{sign}{format_bytes(abs(change.memory_change))}"
    return [change.name, change.option, f"{change.time_change:+.0%}", memory, "yes" if change.fits else "no"]


def explanation_parts(result: PlanResult) -> dict[str, list[str]]:
    parts = vars(result.explanation).copy()
    questions: dict[str, str] = parts.pop("questions")
    named = {f"{name[0].upper()}{name[1:]}": sentences for name, sentences in parts.items()}
    return named | {question: [answer] for question, answer in questions.items()}


def plan_rows(result: PlanResult, top: int) -> list[list[str]]:
    listed = [(row.best, row.similar) for row in result.listed[: max(top, MIN_PLANS)]]
    return [
        [
            str(position),
            describe_layout(plan.job),
            describe_execution(plan.job),
            format_seconds(plan.seconds),
            f"{plan.interval_low:.3g} to {plan.interval_high:.3g} s",
            f"{trainer_mfu(plan, result.workload.trainer_name):.1%}",
            f"{format_bytes(plan.peak_memory.total)}, "
            f"{format_percent(plan.peak_memory.total / plan.job.cluster.device.memory)}",
            format_percent(exposed_seconds(plan) / plan.seconds),
            format_percent(plan.phases.get("bubble", 0.0) / plan.seconds),
            str(similar or ""),
        ]
        for position, (plan, similar) in enumerate(listed, 1)
    ]


def scaling_context(result: PlanResult, table: ScalingTable) -> dict[str, Any]:
    return {
        "headings": SCALING_HEADINGS,
        "tables": {
            "Strong scaling: the same batch on more devices": [scaling_row(row) for row in table.strong],
            "Weak scaling: the batch grows with the devices": [scaling_row(row) for row in table.weak],
        },
        "sentences": scaling_sentences(result, table),
        "assumption": table.assumption,
    }


def scaling_row(row: ScalingRow) -> list[str]:
    start = [f"{row.factor}x", f"{row.devices:,}", f"{row.batch:,}"]
    if row.estimate is None:
        return [*start, "-", "-", "-", "-", "-", "no plan divides the batch and fits"]
    return [
        *start,
        format_seconds(row.estimate.seconds),
        format_count(row.estimate.tokens_per_second),
        f"{row.efficiency:.0%}",
        f"{row.exposed_share:.1%}",
        format_count(row.useful_tokens_per_second),
        describe_layout(row.estimate.job) + ("" if row.same_layout else " (new)"),
    ]
