"""A diagnosis on the terminal: the findings, best first, and where the time of each rank goes. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwright.base.io import format_bytes, format_count, format_percent, format_seconds, printable
from meshwright.base.terminal.console import make_console
from meshwright.insight.diagnose.finding import BROKEN, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.trial import ChangeTrial
from meshwright.insight.diagnose.trace.diagnose import RankDiagnosis, TraceDiagnosis

UNITS: dict[str, Callable[[float], str]] = {
    "s": format_seconds,
    "B": format_bytes,
    "B/s": lambda value: f"{format_bytes(value)}/s",
    "/s": lambda value: f"{format_count(value)}/s",
    "share": lambda value: format_percent(value),
    "count": lambda value: f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}",
    "ratio": lambda value: f"{value:.2f} x",
}
"""Unit of a figure -> how it is written."""
MAX_RANKS = 16
"""Ranks that the table of breakdowns lists."""


def show_trace_diagnosis(diagnosis: TraceDiagnosis, console: Console | None = None) -> None:
    """Prints the findings in traces, what is missing from the traces, and the breakdown of each rank."""
    console = console or make_console()
    show_findings(diagnosis.findings, console)
    console.print(Text("Where the time goes", "bold"))
    console.print(breakdown_table(diagnosis.ranks))
    if len(diagnosis.ranks) > MAX_RANKS:
        console.print(Text(f"and {len(diagnosis.ranks) - MAX_RANKS} more ranks; --json lists all", "dim"))
    for rank in diagnosis.ranks:
        for note in rank.notes:
            console.print(Text(printable(f"note: {rank.path.name}: {note}"), "yellow"))


def show_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Prints findings, the first one as the verdict."""
    console = console or make_console()
    for finding in findings:
        console.print(heading(finding))
        console.print(Padding(details(finding), (0, 0, 1, 2)))


def show_trial(trial: ChangeTrial, console: Console | None = None) -> None:
    """Prints whether the prediction of a change came true."""
    console = console or make_console()
    start = f"from the checkpoint of step {trial.first_step}" if trial.first_step else "from the initial state"
    console.print(Text("trial", "bold green" if trial.came_true else "bold red"))
    text = f"{trial.sentence}; {trial.steps} steps {start}"
    if trial.changes_numbers:
        text += "; the settings change the numbers, so that the run adopts them with --fork only"
    console.print(Padding(Text(printable(text)), (0, 0, 1, 2)))


def heading(finding: Finding) -> Text:
    """The cause, and what a change can win back."""
    style = "bold green" if finding.cause == "healthy" else "bold red" if finding.cause in BROKEN else "bold yellow"
    text = Text().append(printable(finding.cause + (f": {finding.variant}" if finding.variant else "")), style)
    if finding.share:
        text.append(f"   {finding.share_text}, {finding.confidence} confidence", "dim")
    return text


def details(finding: Finding) -> RenderableType:
    """The sentence, the evidence, the change and the command that checks it."""
    figures = Table.grid(padding=(0, 2))
    figures.add_column(justify="right", no_wrap=True)
    figures.add_column(overflow="fold")
    for figure in finding.evidence:
        figures.add_row(*figure_cells(figure))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    if finding.evidence:
        grid.add_row("evidence", figures)
    label = "change"
    for setting in finding.change.settings:
        grid.add_row(label, Text(printable(setting), "bold cyan"))
        label = ""
    if finding.change.action:
        grid.add_row(label, Text(printable(finding.change.action)))
    if finding.change.predicted_seconds is not None:
        source = f" ({finding.change.predicted_by})" if finding.change.predicted_by else ""
        grid.add_row("predicted", Text(f"{format_seconds(finding.change.predicted_seconds)} per step{source}"))
    if finding.check:
        grid.add_row("check", Text(printable(finding.check), "cyan"))
    whole = Table.grid()
    whole.add_row(Text(printable(finding.sentence)))
    whole.add_row(grid)
    return whole


def figure_cells(figure: MeasuredFigure) -> tuple[Text, Text]:
    """A figure with its unit; what it is, and what it is compared with."""
    text = Text(printable(figure.figure))
    if figure.compared is not None:
        compared = format_figure(figure.compared, figure.unit)
        text.append(f" ({printable(figure.compared_with)}: {compared})", "dim")
    return Text(format_figure(figure.value, figure.unit), "bold"), text


def format_figure(value: float, unit: str) -> str:
    return UNITS[unit](value) if unit in UNITS else f"{value:.4g} {printable(unit)}"


def breakdown_table(ranks: Sequence[RankDiagnosis]) -> Table:
    """Shares of the time of each rank: compute, exposed communication, copies and idle add up to 100 %."""
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "time", "compute", "exposed comm", "copies", "idle", "overlap", "idle because of"):
        table.add_column(name, justify="left" if name == "idle because of" else "right", overflow="fold")
    for rank in ranks[:MAX_RANKS]:
        parts = rank.breakdown
        causes = sorted(parts.idle_causes.items(), key=lambda item: -item[1])
        reasons = ", ".join(
            f"{cause} {format_percent(parts.share(seconds))}"
            for cause, seconds in causes
            if parts.share(seconds) >= 0.01
        )
        if not rank.is_judged:
            table.add_row(str(rank.rank), format_seconds(parts.seconds), *"-----", Text("not judged", "dim"))
            continue
        shares = (parts.compute, parts.exposed, parts.memory, parts.idle)
        table.add_row(
            str(rank.rank),
            format_seconds(parts.seconds),
            *(f"{parts.share(seconds):.1%}" for seconds in shares),
            f"{parts.overlap:.0%}" if parts.communication else "-",
            Text(reasons, "dim"),
        )
    return table
