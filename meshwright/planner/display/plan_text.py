"""A plan on the terminal: the chosen plan with its memory and time, the ranked list, the ladder and the explanation."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwright.base.io import format_bytes, format_count, format_number_of, format_percent, format_seconds, printable
from meshwright.base.terminal.console import make_console
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import (
    describe_execution,
    describe_layout,
    describe_plan,
    memory_by_class,
    memory_label,
    phase_label,
)
from meshwright.planner.display.plan_tables import baseline_table, ranking, scaling_rows, settings_table
from meshwright.planner.generation import GeneratorPlan
from meshwright.planner.search.choice import memory_accuracy, memory_risk, why_first
from meshwright.planner.search.plan_result import PlanResult
from meshwright.planner.search.run_cost import RunCost
from meshwright.planner.search.scaling import ScalingTable, nearest_exposure
from meshwright.planner.search.trainer_rules import flop_convention, trainer_mfu
from meshwright.planner.workload.trainer_profile import describe_profile
from meshwright.planner.workload.workload import Workload, count_samples

MEMORY_COLORS = {
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
PHASE_COLORS = {"forward": "blue", "backward": "cyan", "recompute": "magenta", "bubble": "yellow", "update": "green"}
OTHER_COLOR = "red"
"""The color of exposed communication and of other time without compute."""
MAX_BAR_WIDTH = 100
LABEL_WIDTH = 12
"""The columns that labels and margins take beside a bar."""
FULL, EMPTY = "█", "░"


def show_plan(result: PlanResult, top: int, explained: bool = False, console: Console | None = None) -> None:
    console = console or make_console()
    console.print(Text(printable(title(result)), "bold"))
    console.print(labeled([*summary(result), *bars(result.chosen, console.width, result.workload.headroom)]))
    console.print()
    console.print(ranking(result, top))
    if reason := why_first([row.best for row in result.listed[:top]]):
        console.print(Text(reason))
    console.print(Text(describe_search(result, top), "dim"))
    console.print()
    console.print(baseline_table(result.baselines, result.chosen))
    if result.settings:
        console.print()
        console.print(settings_table(result.settings))
    console.print(Text("\nFrom DDP to the plan", "bold"))
    show_ladder(result, console)
    if result.generators is not None:
        console.print(Text("\nGenerators", "bold"))
        show_generators(result.generators, console)
    if explained:
        show_explanation(result, console)
    if result.scaling is not None:
        show_scaling(result, result.scaling, console)


def show_generators(plan: GeneratorPlan, console: Console) -> None:
    """Prints how many generators the learner needs, and the two times that decide it."""
    group = plan.group
    parts = f"prefill {format_seconds(group.prefill)}, decode {format_seconds(group.decode)} (bound by {group.bound}), "
    console.print(
        labeled(
            [
                ("group", Text(f"{format_seconds(group.seconds)}: {parts}scoring {format_seconds(group.scoring)}")),
                (
                    "learner",
                    Text(f"{plan.groups_per_step:,} groups per step of {format_seconds(plan.learner_seconds)}"),
                ),
                *(("answer", Text(sentence)) for sentence in plan.sentences()),
            ]
        )
    )


def title(result: PlanResult) -> str:
    cluster = result.cluster
    nodes = f" in {cluster.nodes:,} nodes of {cluster.devices_per_node}" if cluster.nodes > 1 else ""
    return f"{result.workload.model.name} on {cluster.device_count:,} {cluster.device.name}{nodes}"


def labeled(rows: list[tuple[str, Text]], indent: int = 2) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=LABEL_WIDTH - 4, no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(f"{' ' * indent}{name}", text)
    return table


def trainer_text(work: Workload) -> str:
    """The trainer as `--trainer` names it, and the generation of it that its profile describes."""
    return work.trainer_name + (f": {describe_profile(work.trainer)}" if work.trainer else "")


def summary(result: PlanResult) -> list[tuple[str, Text]]:
    """Describes the workload and the chosen plan."""
    work, plan, model, job = result.workload, result.chosen, result.workload.model, result.chosen.job
    active = f" ({format_count(model.active_parameters)} active)" if model.experts else ""
    step = f"{count_samples(work.global_batch)} x {work.sequence:,} tokens per step"
    position = f" [plan {result.position} of the list]" if result.position > 1 else ""
    interval = f"{format_seconds(plan.interval_low)} to {format_seconds(plan.interval_high)}"
    uncertainty = f"80% interval {interval}; largest source of uncertainty: {plan.main_uncertainty}"
    layout = Text(describe_layout(job), "bold green")
    rate = f"{format_count(plan.tokens_per_second)} tokens/s, MFU {trainer_mfu(plan, work.trainer_name):.1%}"
    return [
        ("model", Text(f"{format_count(model.parameters)} parameters{active}, {step}, {work.precision}")),
        ("plan", layout.append(f"; {describe_execution(job)}{position}", "default not bold")),
        ("step", Text(f"{format_seconds(plan.seconds)}, {rate}")),
        ("", Text(uncertainty, "dim")),
        ("trainer", Text(f"{trainer_text(work)}; MFU counts {flop_convention(work)}")),
        *([("cost", Text(describe_cost(result.cost)))] if result.cost else []),
        *(("note", Text(printable(note), "yellow")) for note in (*work.notes, *plan.notes)),
    ]


def describe_risk(plan: Estimate) -> str:
    risk = memory_risk(plan)
    return f"a risk of {format_percent(risk)}" if risk >= 0.001 else "a risk below 0.1%"


def describe_cost(cost: RunCost) -> str:
    """Says what a token budget costs; goodput and failures are not counted."""
    hours = f"{format_count(cost.gpu_hours)} GPU-hours ({format_count(cost.gpu_hours_low)} to "
    parts = [f"{format_count(cost.tokens)} tokens: {cost.days:,.1f} days, {hours}{format_count(cost.gpu_hours_high)})"]
    if cost.money is not None:
        parts.append(f"{format_count(cost.money)} at {cost.price:g} per GPU-hour")
    if cost.megawatt_hours is not None:
        digits = 0 if cost.megawatt_hours >= 10 else 2
        parts.append(f"{cost.megawatt_hours:,.{digits}f} MWh at {cost.watts:g} W per device")
    return ", ".join(parts)


def bars(plan: Estimate, width: int, headroom: float) -> list[tuple[str, Text]]:
    """Draws the peak memory of a rank within the device's memory, and the step time by phase."""
    cells = max(10, min(MAX_BAR_WIDTH, width - LABEL_WIDTH))
    memory, capacity = memory_by_class(plan.peak_memory), plan.job.cluster.device.memory
    total = plan.peak_memory.total
    stage = f" on pipeline rank {plan.peak_memory.rank}" if len(plan.memory_by_rank) > 1 else ""
    used = f"{format_bytes(total)} of {format_bytes(capacity)}, {format_percent(total / capacity)}{stage}"
    sizes = {memory_label(name): (size, format_bytes(size), name) for name, size in memory.items()}
    times = {phase_label(phase): (spent, format_seconds(spent), phase) for phase, spent in plan.phases.items()}
    accuracy = f"predicted within {memory_accuracy(plan.job):.0%} in 80% of runs"
    risk = f"{accuracy}; {describe_risk(plan)} that it does not fit"
    return [
        ("", Text()),
        ("memory", bar(memory, capacity, cells, MEMORY_COLORS)),
        ("", Text(f"{used}; {headroom:.0%} are kept free as headroom")),
        ("", Text(risk, "dim")),
        ("", legend(sizes, total, MEMORY_COLORS, width - LABEL_WIDTH)),
        ("time", bar(plan.phases, plan.seconds, cells, PHASE_COLORS)),
        ("", legend(times, plan.seconds, PHASE_COLORS, width - LABEL_WIDTH)),
    ]


def bar(values: dict[str, float], total: float, cells: int, colors: dict[str, str]) -> Text:
    """Draws values as parts of a bar; cumulative sums are rounded, so that the parts fill exactly their share."""
    text, drawn, cumulative = Text(), 0, 0.0
    for name, value in values.items():
        cumulative += value
        end = min(cells, round(cumulative / total * cells))
        text.append(FULL * (end - drawn), colors.get(name, OTHER_COLOR))
        drawn = max(drawn, end)
    return text.append(EMPTY * (cells - drawn), "bright_black")


def legend(values: dict[str, tuple[float, str, str]], total: float, colors: dict[str, str], width: int) -> Text:
    """Lists (value, text, color name) by label, from the largest value down to 1% of the total, without breaking a
    label between lines.
    """
    text, column = Text(), 0
    for name, (value, formatted, color) in sorted(values.items(), key=lambda row: -row[1][0]):
        if value < total / 100:
            continue
        label = f"{name} {formatted}"
        if column and column + len(label) + 2 > width:
            text.append("\n")
            column = 0
        text.append("■ ", colors.get(color, OTHER_COLOR)).append(label + "   ")
        column += len(label) + 5
    text.rstrip()
    return text


def describe_search(result: PlanResult, top: int) -> str:
    search = result.search
    smallest = search.pareto_front[-1]
    hidden = len(search.ranked) - min(top, len(result.listed))
    more = f" (--all lists similar ones, --top more; {hidden:,} are not shown)" if hidden > 0 else ""
    return (
        f"{format_number_of(len(search.ranked), 'feasible layout')}{more}; {search.timed:,} candidates timed, memory "
        f"estimated for {search.memory_estimates:,}; least memory: {format_bytes(smallest.peak_memory.total)} at "
        f"{format_seconds(smallest.seconds)} ({describe_plan(smallest.job)})"
    )


def show_ladder(result: PlanResult, console: Console) -> None:
    for step in result.ladder:
        console.print(Text(f"  {step.name}", "bold"))
        rows = [("plan", Text(describe_plan(step.estimate.job), "green"))]
        if step.resolved:
            rows += [("effect", Text(step.resolved)), ("change", Text(step.cost))]
        rows.append(
            ("bottleneck", Text(step.bottleneck.message, "green" if step.bottleneck.kind == "none" else "yellow"))
        )
        rows += [("later", Text(alternative, "dim")) for alternative in step.rejected]
        console.print(labeled(rows, indent=4))
    console.print(Padding(Text(result.ladder_summary), (0, 0, 0, 2), expand=False))


def show_explanation(result: PlanResult, console: Console) -> None:
    """Prints the five parts, then the questions and answers."""
    parts = vars(result.explanation).copy()
    questions: dict[str, str] = parts.pop("questions")
    for name, sentences in [*parts.items(), *((question, [answer]) for question, answer in questions.items())]:
        console.print(Text(f"\n{name[0].upper()}{name[1:]}", "bold"))
        for sentence in sentences:
            console.print(Padding(Text(printable(sentence)), (0, 0, 0, 2), expand=False))


def show_scaling(result: PlanResult, table: ScalingTable, console: Console) -> None:
    strong, weak = "Strong scaling: the same batch on more devices", "Weak scaling: the batch grows with the devices"
    for name, rows in ((strong, table.strong), (weak, table.weak)):
        console.print(Text(f"\n{name}", "bold"))
        console.print(scaling_rows(rows))
        for row in rows:
            if row.estimate is not None and not row.same_layout:
                new = Text(f"new plan at {row.factor}x: {describe_plan(row.estimate.job)}", "dim")
                console.print(Padding(new, (0, 0, 0, 2), expand=False))
    for line in scaling_sentences(result, table):
        console.print(Text(line))
    console.print(Text(table.assumption, "dim"))


def scaling_sentences(result: PlanResult, table: ScalingTable) -> list[str]:
    """Says what limits the scaling: the batch, the next exposed collective, serial time and the critical batch."""
    tokens, largest = result.workload.tokens_per_step, table.largest
    last = largest.job.layout.ranks
    sentences = []
    if last < table.strong[-1].devices:
        sentences.append(f"limit: with the same batch, the layout of the plan divides and fits up to {last:,} devices")
    for name, exposure, devices in (
        ("the same batch", table.strong_exposure, last),
        ("a batch that grows", table.weak_exposure, table.weak[-1].devices),
    ):
        none = f"no further collective of the plan up to {devices:,} devices"
        nearest = f"{none}; {nearest_exposure(largest)}" if devices == last else none
        sentences.append(f"next exposed, {name}: {exposure.message if exposure else nearest}")
    sentences.append(
        f"Amdahl's law: {format_seconds(table.serial_seconds)} of a step do not get shorter on more devices: "
        f"{table.serial_fraction:.2%} of the step on {table.strong[0].devices:,} devices, "
        f"{format_percent(table.serial_seconds / largest.seconds)} of the step on {last:,}. Stragglers, congestion and "
        "failures are not counted."
    )
    worth = 1 / (1 + tokens / table.critical_batch)
    sentences.append(
        f"batch: {format_count(tokens)} tokens per step, {tokens / table.critical_batch:.2g} of the critical batch; a "
        f"token is worth {worth:.0%} of a token in a small batch"
    )
    return sentences
