"""A training run on the terminal: a header, and a live line or plain lines of progress. Torch-free."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO

from rich.live import Live
from rich.text import Text

from meshwright.base.config import RunConfig
from meshwright.base.history.step_table import RECENT_STEPS
from meshwright.base.io import format_bytes, format_clock, printable
from meshwright.base.records.events import Event
from meshwright.base.terminal.console import make_console
from meshwright.base.terminal.rollout_progress import rollout_fields
from meshwright.base.terminal.run_header import header

MIN_BAR, MAX_BAR = 4, 32
"""The cells of the progress bar."""
EXPOSED_STYLE = "red"
"""The color of exposed communication."""
PHASE_NAMES = {"sync": "exposed comm"}
"""Names of phases on the terminal, if they differ from those in the records."""


class EventDisplay(Protocol):
    def show(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Terminal:
    """Shows the events of rank 0: a live line if `stream` is a terminal, a line every `log_every` steps otherwise."""

    def __init__(self, config: RunConfig, folder: Path, attempt: int, stream: TextIO | None = None) -> None:
        self.config, self.folder, self.attempt = config, folder, attempt
        self.console = make_console(stream)
        self.recent: deque[Event] = deque(maxlen=RECENT_STEPS)
        self.rollouts: deque[Event] = deque(maxlen=RECENT_STEPS)
        """the newest `rollouts` records of a run of reinforcement learning, with the seconds of their steps"""
        self.steps, self.unit = config.steps, "tokens"
        self.live: Live | None = None
        self.checkpoint: Event | None = None
        """the newest `checkpoint` record, or the `restored` record before there is one"""

    def show(self, event: Event) -> None:
        handler: Callable[[Event], None] | None = getattr(self, f"_{event['kind']}", None)
        if event.get("attempt") == self.attempt and handler is not None:
            handler(event)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def print(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)

    def print_step(self, event: Event, text: str, style: str) -> None:
        """Prints a message about one step; steps are numbered from 0, as in the records and in `data show`."""
        self.print(f"step {event['step']}: {text}", style)

    def _start(self, event: Event) -> None:
        self.unit = event.get("unit", self.unit)
        lines = header(self.config, self.folder, self.attempt, event)
        for line in lines[: 1 if event.get("restart") else None]:  # a restart is the same run
            self.print(line)
        if self.console.is_terminal:
            self.live = Live(Text("waiting for the first step"), console=self.console, refresh_per_second=8)
            self.live.start()

    def _step(self, event: Event) -> None:
        self.recent.append(event)
        metrics = metric_fields(event)
        # The next step may have begun, and recorded its rollouts, before this one is recorded.
        rollouts = next((record for record in reversed(self.rollouts) if record["step"] == event["step"]), None)
        if rollouts is not None:
            rollouts["step_seconds"] = event["seconds"]
            metrics = rollout_fields(event, self.rollouts)
        if self.live is not None:
            width = self.console.width
            self.live.update(live_line(list(self.recent), self.steps, width, self.checkpoint, self.unit, metrics))
        elif event["step"] % self.config.log_every == 0 or event["step"] + 1 == self.steps:
            self.print(plain_line(list(self.recent), self.steps, self.checkpoint, self.unit, metrics))

    def _rollouts(self, event: Event) -> None:
        shares = ("step", "wait_seconds", "generator_seconds", "generator_idle_seconds")
        self.rollouts.append({name: event[name] for name in shares})

    def _rollout_problem(self, event: Event) -> None:
        self.print(f"rollouts: {event['message']}", "yellow")

    def _counters(self, event: Event) -> None:
        rows = [row for row in event["communication"] if row["axis"] != "control"]
        sent = ", ".join(f"{row['axis']} {row['collective']} {format_bytes(row['message_bytes'])}" for row in rows)
        memory = event["memory"]
        classes = sorted(memory["at_peak"].items(), key=lambda item: -item[1])
        shown = [f"{name} {format_bytes(size)}" for name, size in classes if size * 20 >= memory["peak_total"]]
        if pipeline := self.recent[-1].get("pipeline") if self.recent else None:
            in_flight = f"rank 0: {pipeline['live']} micro-batches in flight, idle {pipeline['idle']:.0%} of the step"
            self.print_step(event, in_flight, "dim")
        peak = f"peak memory {format_bytes(memory['peak_total'])} ({', '.join(shown)})"
        self.print_step(event, f"rank 0: sent {sent or 'nothing'}; {peak}", "dim")

    def _eval(self, event: Event) -> None:
        loss = f"held-out loss {format_value(event['loss'], '.4f')} over {event['tokens']:,} {self.unit}"
        self.print("  ".join([f"after {event['step'] + 1:>5} steps", loss, *metric_fields(event)]), "bold")

    def _restored(self, event: Event) -> None:
        self.checkpoint = event
        restored = f"restored {event['checkpoint']} in {event['seconds']:.2f} s{restored_source(event)}"
        self.print(f"{restored}; the next step is {event['step']}", "green")
        if event["changes"]:
            self.print(f"the result will not be bitwise the same: {'; '.join(event['changes'])}", "yellow")

    def _code_changed(self, event: Event) -> None:
        self.print_step(event, f"the run continues with other code: {'; '.join(event['changes'])}", "yellow")

    def _choices(self, event: Event) -> None:
        self.print(event["summary"], "dim")

    def _unfused_loss(self, event: Event) -> None:
        self.print(
            f"the head and the loss are not fused, and the logits of a micro-batch are kept: {event['reason']}",
            "yellow",
        )

    def _extended(self, event: Event) -> None:
        change = f"learning rate {event['lr']:.3e} instead of {event['lr_before']:.3e}"
        self.print_step(event, f"extended from {event['steps_before']} to {event['steps']} steps: {change}", "yellow")

    def _damaged(self, event: Event) -> None:
        for damage in event["damage"]:
            chunk = f" chunk {damage['chunk']}" if damage["chunk"] != -1 else ""
            found = f"expected {damage['expected']}, found {damage['found']}"
            where = f"{damage['file']}{chunk}: {found}"
            self.print(f"DAMAGED {event['checkpoint']}: {where}; an older checkpoint is used", "bold red")

    def _checkpoint(self, event: Event) -> None:
        self.checkpoint = event
        if event["retention_error"]:
            self.print_step(event, event["retention_error"], "yellow")

    def _save_failed(self, event: Event) -> None:
        self.print_step(event, f"SAVE FAILED: {event['message']}", "bold red")

    def _snapshot(self, event: Event) -> None:
        self.checkpoint = event

    def _snapshot_failed(self, event: Event) -> None:
        self.print_step(event, f"SNAPSHOT FAILED: {event['message']}", "yellow")

    def _straggler(self, event: Event) -> None:
        self.print_step(event, event["message"], "yellow")

    def _events_lost(self, event: Event) -> None:
        self.print(event["message"], "bold red")

    def _hang(self, event: Event) -> None:
        self.print(f"HANG: {event['message']}", "bold red")

    def _bad_sample(self, event: Event) -> None:
        sample = f"sample {event['sample']} of {event['source']} is quarantined: {event['reason']}"
        self.print_step(event, sample, "yellow")

    def _nonfinite(self, event: Event) -> None:
        where = event["module"] or "another rank"
        self.print_step(event, f"non-finite values, first in {where}; all ranks skip the update", "yellow")

    def _callback_failed(self, event: Event) -> None:
        text = f"the callback {event['callback']} failed in {event['hook']}, and the run continues: {event['message']}"
        self.print(text, "yellow")

    def _output(self, event: Event) -> None:
        self.print(printable(event["text"]))

    def _end(self, event: Event) -> None:
        self.close()
        if event.get("stopped"):
            self.print(f"stopped after {event['steps']} steps: {event['stopped']}", "bold")
        if event.get("was_complete") and not event.get("stopped"):
            self.print(f"complete: all {event['steps']} steps were done before; records in {self.folder}")
            return
        skipped = f", {event['skipped']} skipped" if event["skipped"] else ""
        loss = f", loss {format_value(event['loss'], '.4f')}" if event["steps"] else ""
        digest = event["parameters_digest"][:16]
        self.print(f"done: {event['steps']} steps{skipped}{loss}; parameters {digest}; records in {self.folder}")


class JsonLines:
    """Prints every event of rank 0 as one JSON line."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt

    def show(self, event: Event) -> None:
        if event.get("attempt") == self.attempt:
            print(json.dumps(event), flush=True)

    def close(self) -> None:
        pass


def steady_steps(recent: list[Event]) -> list[Event]:
    """Returns the steps of the window without the warm-up step and without steps slowed down by counters or the
    profiler; all steps if no others are left.
    """
    slowed = ("counted", "profiled")
    return [event for event in recent if event["step"] and not any(map(event.get, slowed))] or recent


def rates(recent: list[Event]) -> tuple[float, float]:
    """Returns (seconds per step, tokens per second, or whatever a target is) over the window."""
    steps = steady_steps(recent)
    seconds = sum(event["seconds"] for event in steps)
    return seconds / len(steps), sum(event["tokens"] for event in steps) / max(seconds, 1e-9)


def phase_shares(recent: list[Event]) -> dict[str, float]:
    """Returns each phase's share of the step over the window; `sync` includes the waits inside of other phases."""
    steps = steady_steps(recent)
    seconds = {phase: sum(event["phases"][phase] for event in steps) for phase in steps[-1]["phases"]}
    for event in steps:
        for phase, waited in event.get("waits", {}).items():
            seconds[phase] -= waited
            seconds["sync"] += waited
    total = sum(seconds.values()) or 1.0
    return {phase: spent / total for phase, spent in seconds.items()}


def metric_fields(event: Event) -> list[str]:
    """Returns the user's metrics of a step or evaluation."""
    return [f"{name} {format_value(value, '.4g')}" for name, value in event.get("metrics", {}).items()]


def recovery_field(event: Event, checkpoint: Event | None) -> str:
    """Returns what a failure after a step would cost: the age of the newest checkpoint, and the steps since then."""
    at_risk = event["step"] + 1 - (checkpoint["step"] if checkpoint is not None else 0)
    risk = f"{at_risk} step{'' if at_risk == 1 else 's'} at risk"
    if checkpoint is None:
        return f"no checkpoint, {risk}"
    if checkpoint["kind"] == "restored":  # when it was written is not on record here
        return risk
    return f"{checkpoint['kind']} {max(0.0, event['time'] - checkpoint['time']):.0f} s old, {risk}"


def restored_source(event: Event) -> str:
    """Returns from which hosts a state came, if it was in their memory, and what else there is."""
    if not (hosts := event.get("hosts")):
        return ""
    published = event.get("published_step", -1)
    newest = f"the newest checkpoint is of step {published}" if published >= 0 else "there is no checkpoint"
    named = f"host{'' if len(hosts) == 1 else 's'} {', '.join(hosts)}"
    return f" from the memory of {named} at step {event['step']}; {newest}"


def plain_line(
    recent: list[Event],
    steps: int,
    checkpoint: Event | None = None,
    unit: str = "tokens",
    metrics: list[str] | None = None,
) -> str:
    """Returns one line for the newest step; `metrics` are its fields beside the loss, by default every metric."""
    event = recent[-1]
    seconds_per_step, tokens_per_second = rates(recent)
    shares = phase_shares(recent).items()
    fields = [
        f"{event['step'] + 1:>6} of {steps} steps done",
        f"loss {format_value(event['loss'], '.4f')}",
        *(metric_fields(event) if metrics is None else metrics),
        f"lr {event['lr']:.2e}",
        f"grad norm {format_value(event['grad_norm'], '.3f')}",
        f"{tokens_per_second:,.0f} {unit}/s",
        " ".join(f"{PHASE_NAMES.get(phase, phase)} {share:.0%}" for phase, share in shares if share >= 0.005),
        f"memory {format_bytes(event['memory'])}",
        f"eta {format_clock(seconds_per_step * (steps - event['step'] - 1))}",
        recovery_field(event, checkpoint),
    ]
    return "  ".join(fields)


def live_line(
    recent: list[Event],
    steps: int,
    width: int,
    checkpoint: Event | None = None,
    unit: str = "tokens",
    metrics: list[str] | None = None,
) -> Text:
    """Returns a progress bar and as many fields as fit into `width` columns, the most important ones first."""
    event, shares = recent[-1], phase_shares(recent)
    metrics = metric_fields(event) if metrics is None else metrics
    done = event["step"] + 1
    seconds_per_step, tokens_per_second = rates(recent)
    # In the order of the line; the number is the order in which the fields are given space.
    fields: list[tuple[float, str, str]] = [
        (0, f"{done}/{steps} steps", "bold"),
        (1, f"loss {format_value(event['loss'], '.4f')}", "bold"),
        *((1 + number / 100, text, "bold") for number, text in enumerate(metrics, 1)),
        (7, f"grad norm {format_value(event['grad_norm'], '.2f')}", ""),
        (8, f"lr {event['lr']:.1e}", ""),
        (3, f"{tokens_per_second:,.0f} {unit}/s", ""),
        (10, f"data {shares['fetch'] + shares['copy']:.0%}", ""),
        (6, f"forward {shares['forward']:.0%}  backward {shares['backward']:.0%}", ""),
        (4, f"{PHASE_NAMES['sync']} {shares['sync']:.0%}", EXPOSED_STYLE),
        (11, f"update {shares['update']:.0%}", ""),
        (9, f"memory {format_bytes(event['memory'])}", ""),
        (2, f"eta {format_clock(seconds_per_step * (steps - done))}", ""),
        (5, recovery_field(event, checkpoint), ""),
    ]
    kept: set[float] = set()
    space = width - MIN_BAR - 1
    for priority, text, _ in sorted(fields):
        if len(text) + 2 <= space or not kept:
            kept.add(priority)
            space -= len(text) + 2
    cells = max(MIN_BAR, min(MAX_BAR, MIN_BAR + space))
    filled = round(cells * done / max(1, steps))
    line = Text(no_wrap=True, overflow="crop")
    line.append("━" * filled, "green").append("━" * (cells - filled), "bright_black")
    for priority, text, style in fields:
        if priority in kept:
            line.append("  ").append(text, style)
    return line


def format_value(number: float | None, spec: str) -> str:
    return "non-finite" if number is None else format(number, spec)
