"""A run on the terminal: headline signals, goodput account, loss, ranks, checkpoints, incidents, log. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from meshwright.base.history.account import GoodputAccount
from meshwright.base.history.goodput import goodput
from meshwright.base.history.rollout_table import INDEX
from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.signals import ADVANCING, Signals, read_signals
from meshwright.base.io import format_bytes, format_clock, format_percent, format_seconds, printable
from meshwright.base.records.incidents import tail_lines
from meshwright.base.terminal.console import make_console
from meshwright.base.terminal.rollout_progress import SHORT_NAMES
from meshwright.insight.terminal.rollout_text import account_rows

REFRESH_SECONDS = 1.0
MAX_RANKS, MAX_CHECKPOINTS, MAX_INCIDENTS, MAX_LOG_LINES = 8, 3, 3, 4
"""Rows of each table."""
PHASE_COLUMNS = {
    "data": ("fetch", "copy"),
    "forward": ("forward",),
    "backward": ("backward",),
    "update": ("update",),
}
"""The columns of local time in the table of ranks, and the phases in each."""
SPARKS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {
    "progressing": "green",
    "complete": "green",
    "starting": "cyan",
    "replaying": "yellow",
    "skipping": "yellow",
    "waiting": "bold red",
    "stalled": "bold red",
    "restarting": "yellow",
    "stopped": "yellow",
    "failed": "bold red",
}
PART_STYLES = {
    "productive": "green",
    "data": "cyan",
    "exposed communication": "red",
    "bubble": "magenta",
    "straggler": "bright_red",
    "checkpoint": "blue",
    "evaluation": "bright_blue",
    "lost work": "yellow",
    "restart": "bright_yellow",
}
"""The colors of the parts of the account; the others are grey."""
MIN_SHARE = 0.0005
"""Smaller parts of the account are not listed."""


@dataclass(frozen=True)
class RankSnapshot:
    """One rank: where it is, and its newest steps."""

    rank: int
    step: int
    phase: str
    waiting: bool
    local: dict[str, float]
    """phase -> mean seconds per step that the rank spends by itself, not waiting for others"""
    exposed: float
    """mean seconds per step in which the rank waits for others"""

    @property
    def local_seconds(self) -> float:
        return sum(self.local.values())


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment."""

    history: RunHistory
    now: float
    account: GoodputAccount
    signals: Signals
    ranks: list[RankSnapshot]
    """slowest first"""


def take_snapshot(history: RunHistory, now: float) -> RunSnapshot:
    """The snapshot of a history as it was last updated."""
    account = goodput(history, now)
    return RunSnapshot(history, now, account, read_signals(history, now, account), rank_snapshots(history))


def rank_snapshots(history: RunHistory) -> list[RankSnapshot]:
    """Every rank of the newest attempt that has records or a heartbeat, slowest first."""
    found = []
    for rank in sorted({*history.ranks, *history.heartbeats}):
        recent = history.steps(rank).recent_timed()
        reading = history.heartbeats.get(rank)
        found.append(
            RankSnapshot(
                rank,
                reading.step if reading is not None else int(recent.step[-1]) if len(recent) else -1,
                reading.phase if reading is not None else "",
                reading is not None and reading.waiting,
                {phase: mean(values) for phase, values in recent.local.items()},
                mean(recent.exposed),
            )
        )
    return sorted(found, key=lambda snapshot: (-snapshot.local_seconds, snapshot.rank))


def mean(values: NDArray[np.float64]) -> float:
    """The mean of what was recorded, or 0."""
    recorded = values[~np.isnan(values)]
    return float(recorded.mean()) if len(recorded) else 0.0


def watch_in_terminal(histories: Sequence[RunHistory], *, once: bool, console: Console | None = None) -> None:
    """Shows runs, again every second until Ctrl-C; once if `once` is set or standard output is not a terminal."""
    console = console or make_console()
    if once or not console.is_terminal:
        for history in histories:
            console.print(render(take_snapshot(history, time.time()), console, len(histories) > 1))
        return
    with Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop") as live:
        while True:
            for history in histories:
                history.update()
            snapshots = [take_snapshot(history, time.time()) for history in histories]
            views = [render(snapshot, console, len(histories) > 1) for snapshot in snapshots]
            live.update(Group(*views), refresh=True)
            time.sleep(REFRESH_SECONDS)


def render(snapshot: RunSnapshot, console: Console, short: bool = False) -> RenderableType:
    """One run; with `short`, without ranks, checkpoints, incidents and log."""
    width, has_colors = console.width, console.color_system is not None
    parts: list[RenderableType] = [*header(snapshot), *signal_lines(snapshot, width)]
    parts += account_lines(snapshot, width, has_colors)
    parts += loss_lines(snapshot, width)
    parts += rollout_lines(snapshot, width)
    if not short:
        parts += [*rank_table(snapshot), *checkpoint_lines(snapshot), *incident_lines(snapshot), *log_lines(snapshot)]
    return Group(*parts, Text())


def line(label: str, text: str | Text, style: str = "") -> Text:
    """One line of the view; what the records say is shown without control characters."""
    shown = Text(no_wrap=True, overflow="ellipsis")
    shown.append(f"{label:<14}", "bold")
    return shown.append(text) if isinstance(text, Text) else shown.append(printable(text), style)


def header(snapshot: RunSnapshot) -> list[Text]:
    history, signals = snapshot.history, snapshot.signals
    attempt = history.newest_attempt
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(printable(str(history.folder.root)), "bold")
    title.append(f"  attempt {attempt.number}" if attempt is not None else "  no attempt")
    title.append("  ").append(signals.state, STATE_STYLES[signals.state])
    return [title, Text(printable(signals.sentence))]


def signal_lines(snapshot: RunSnapshot, width: int) -> list[Text]:
    """The three headline signals."""
    return [row for name, figures in headline(snapshot).items() for row in wrapped(name, map(Text, figures), width)]


def wrapped(label: str, pieces: Iterable[Text], width: int) -> list[Text]:
    """Lines with a label that contain all pieces, none of which is divided between two lines."""
    rows: list[Text] = []
    for piece in pieces:
        if rows and len(rows[-1]) + 2 + len(piece) <= width - 14:
            rows[-1].append("  ").append(piece)
        else:
            rows.append(piece)
    return [line("" if number else label, row) for number, row in enumerate(rows)]


def headline(snapshot: RunSnapshot) -> dict[str, list[str]]:
    """The three headline signals in words, figure by figure."""
    progress, communication = snapshot.signals.progress, snapshot.signals.communication
    unit = (snapshot.history.newest_attempt.start if snapshot.history.newest_attempt else {}).get("unit")
    unit = unit if unit in ("samples", "targets") else "tokens"
    words = [f"{progress.done:,} of {progress.steps:,} steps done" if progress.steps else "no step done"]
    if progress.steps_per_second is not None:
        words.append(f"{progress.steps_per_second:.3g} steps/s")
    if progress.eta_seconds and snapshot.signals.state in ADVANCING:
        words.append(f"eta {format_clock(progress.eta_seconds)}")
    words.append(f"goodput {progress.goodput or 0:,.3g} samples/s")
    if progress.samples_per_second is not None:
        words.append(f"now {progress.samples_per_second:,.0f} samples/s")
        if unit != "samples":
            words.append(f"{progress.tokens_per_second or 0:,.0f} {unit}/s")
    exposed = ["nothing is recorded yet"]
    if communication.exposed_seconds is not None:
        share = format_percent(communication.share)
        figures = f"exposed {format_seconds(communication.exposed_seconds)} per step, {share} of the step time"
        exposed = [f"{figures} ({communication.source})"]
    return {"progress": words, "communication": exposed, "recovery": recovery_words(snapshot)}


def recovery_words(snapshot: RunSnapshot) -> list[str]:
    recovery = snapshot.signals.recovery
    words = ["no checkpoint"]
    if recovery.checkpoint_step is not None:
        words = [f"checkpoint after {recovery.checkpoint_step:,} steps"]
        if recovery.checkpoint_age_seconds is not None:
            words[0] += f", {format_age(recovery.checkpoint_age_seconds)} old"
    at_risk = f"{recovery.steps_at_risk:,} step{'' if recovery.steps_at_risk == 1 else 's'}"
    if recovery.seconds_at_risk:
        at_risk += f" ({format_age(recovery.seconds_at_risk)})"
    return [*words, f"{at_risk} at risk", f"{recovery.restarts} restart{'' if recovery.restarts == 1 else 's'}"]


def format_age(seconds: float) -> str:
    """Formats an age: in seconds below two minutes, then as a clock."""
    return (
        f"{seconds:.0f} s"
        if 10 <= seconds < 120
        else format_seconds(seconds)
        if seconds < 10
        else format_clock(seconds)
    )


def account_lines(snapshot: RunSnapshot, width: int, has_colors: bool) -> list[Text]:
    """The wall time with its parts in words, and as a bar if colors can tell them apart."""
    shares = {part: share for part, share in snapshot.account.shares.items() if share >= MIN_SHARE}
    if not shares:
        return []
    bar, cells, done = Text(), max(20, min(width - 14, 100)), 0.0
    for part, share in shares.items():
        count = round((done + share) * cells) - round(done * cells)
        bar.append("█" * count, PART_STYLES.get(part, "bright_black"))
        done += share
    words = [Text(format_clock(snapshot.account.wall_seconds), "bold")]
    words += [
        Text.assemble((part, PART_STYLES.get(part, "bright_black")), f" {format_percent(share)}")
        for part, share in shares.items()
    ]
    return [*wrapped("wall time", words, width), *([line("", bar)] if has_colors else [])]


def loss_lines(snapshot: RunSnapshot, width: int) -> list[Text]:
    """The newest loss with its curve, over all steps."""
    kept = snapshot.history.steps().survived()
    recorded = kept.select(~np.isnan(kept.loss))
    if not len(recorded):
        return []
    bins = recorded.decimated(max(10, min(width - 24, 100)))
    return [line("loss", f"{recorded.loss[-1]:<8.4f} {sparkline(bins.mean.loss)}")]


def sparkline(values: Iterable[float]) -> str:
    """One character per value, between the smallest and the largest."""
    numbers = [float(value) for value in values]
    low, high = min(numbers), max(numbers)
    span = (high - low) or 1.0
    return "".join(SPARKS[min(len(SPARKS) - 1, int((number - low) / span * len(SPARKS)))] for number in numbers)


def rollout_lines(snapshot: RunSnapshot, width: int) -> list[Text]:
    """What the newest step of reinforcement learning measured, and what became of all rollouts."""
    rollouts = snapshot.history.rollouts
    if rollouts.counts is None:
        return []
    newest, recent = rollouts.table.rows[-1], rollouts.table.recent()
    figures = [
        f"{name} {newest[INDEX[column]]:.3g}"
        for column, name in SHORT_NAMES.items()
        if not np.isnan(newest[INDEX[column]])
    ]
    shares = {"generators idle": recent.generator_idle_share, "learner waits": recent.learner_idle_share}
    figures += [f"{name} {share:.0%}" for name, share in shares.items() if share is not None]
    account = account_rows(rollouts.counts.to_json())
    parts = [f"{amount:,} {part}" if not sign else f"{sign} {amount:,} {part}" for sign, part, amount, _ in account]
    return [*wrapped("policy", map(Text, figures), width), *wrapped("rollouts", map(Text, parts), width)]


def rank_table(snapshot: RunSnapshot) -> list[RenderableType]:
    """The local time of every rank by phase, and its exposed communication, slowest ranks first."""
    if not snapshot.ranks:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False, pad_edge=False)
    table.add_column("rank", justify="right", no_wrap=True, min_width=4)
    table.add_column("at step")
    for name in (*PHASE_COLUMNS, "local time", "exposed"):
        table.add_column(name, justify="right", no_wrap=True)
    for found in snapshot.ranks[:MAX_RANKS]:
        place = f"{found.step}, {found.phase}" if found.step >= 0 else found.phase
        columns = [sum(found.local[phase] for phase in phases) for phases in PHASE_COLUMNS.values()]
        times = map(format_seconds, (*columns, found.local_seconds, found.exposed))
        style = "bright_red" if found.rank == snapshot.signals.rank else ""
        waits = ", waits" if found.waiting else ""
        table.add_row(str(found.rank), printable(place + waits), *times, style=style)
    more = len(snapshot.ranks) - MAX_RANKS
    return [table, *([Text(f"and {more} faster ranks", "dim")] if more > 0 else [])]


def checkpoint_lines(snapshot: RunSnapshot) -> list[Text]:
    lines: list[Text] = []
    for found in reversed(snapshot.history.checkpoints[-MAX_CHECKPOINTS:]):
        words = [f"{found.name} {found.state}"]
        if found.time is not None:
            words.append(f"{format_age(max(0.0, snapshot.now - found.time))} ago")
        if found.bytes is not None:
            words.append(format_bytes(found.bytes))
        if found.stall_seconds is not None:
            words.append(f"stall {format_seconds(found.stall_seconds)}")
        lines.append(line("" if lines else "checkpoints", "  ".join(words)))
    return lines


def incident_lines(snapshot: RunSnapshot) -> list[Text]:
    """What went wrong, newest first: failed attempts, stragglers, failed saves, values that are not finite."""
    history = snapshot.history
    found = [
        (attempt.ended or 0.0, f"attempt {attempt.number} {attempt.outcome}: {first_line(attempt.incident.message)}")
        for attempt in history.attempts
        if attempt.incident is not None and attempt.outcome not in ("complete", "running")
    ]
    for events in (history.stragglers, history.save_failures, history.lost_events):
        found += [(event["time"] or 0.0, first_line(event["message"])) for event in events]
    found += [(event["time"] or 0.0, f"step {event['step']}: non-finite values") for event in history.nonfinite]
    newest = sorted(found, key=lambda item: -item[0])[:MAX_INCIDENTS]
    return [line("" if number else "incidents", text, "yellow") for number, (_, text) in enumerate(newest)]


def first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def log_lines(snapshot: RunSnapshot) -> list[Text]:
    """The last lines that the rank in question has printed, or rank 0."""
    attempt = snapshot.history.newest_attempt
    if attempt is None:
        return []
    rank = snapshot.signals.rank or 0
    texts = [text for text in tail_lines(snapshot.history.folder.log(attempt.number, rank)) if text.strip()]
    label = f"log of rank {rank}"
    return [line("" if number else label, text, "dim") for number, text in enumerate(texts[-MAX_LOG_LINES:])]
