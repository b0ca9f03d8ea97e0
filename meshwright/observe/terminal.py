"""A run on the terminal: what it is, one live line while it goes, plain lines where there is no terminal.
Torch-free.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO, TypeVar

from rich.console import Console as Rich
from rich.live import Live
from rich.text import Text

from meshwright.config import RunConfig
from meshwright.io import format_bytes, format_clock
from meshwright.telemetry.events import Event
from meshwright.version import __version__

RATE_WINDOW = 20
"""Steps that the shown rates are averaged over."""

Item = TypeVar("Item")
MAX_GROUPS = 8
"""Groups of an axis, or hosts, that are listed."""
EXPOSED = "red"
"""The colour of time in which a rank waits for others."""


class EventDisplay(Protocol):
    def show(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Terminal:
    """Shows rank 0's events. `stream` decides: a terminal gets the live line, anything else a plain line every
    `log_every` steps.
    """

    def __init__(self, config: RunConfig, folder: Path, attempt: int, stream: TextIO | None = None) -> None:
        self.config, self.folder, self.attempt = config, folder, attempt
        self.rich = Rich(file=stream or sys.stdout, highlight=False)
        self.recent: deque[Event] = deque(maxlen=RATE_WINDOW)
        self.steps = config.steps
        self.live: Live | None = None
        self.saved = -1

    def show(self, event: Event) -> None:
        handler: Callable[[Event], None] | None = getattr(self, f"_{event['kind']}", None)
        if event.get("attempt") == self.attempt and handler is not None:
            handler(event)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def say(self, text: str, style: str = "") -> None:
        self.rich.print(Text(text, style=style), soft_wrap=True)

    def _start(self, event: Event) -> None:
        lines = header(self.config, self.folder, self.attempt, event)
        for line in lines[: 1 if event.get("restart") else None]:  # a restart is the same run
            self.say(line)
        if self.rich.is_terminal:
            self.live = Live(Text("first step ..."), console=self.rich, refresh_per_second=8)
            self.live.start()

    def _step(self, event: Event) -> None:
        self.recent.append(event)
        if self.live is not None:
            self.live.update(live_line(list(self.recent), self.steps, self.rich.width, self.saved))
        elif event["step"] % self.config.log_every == 0 or event["step"] + 1 == self.steps:
            self.say(plain_line(list(self.recent), self.steps, self.saved))

    def _counters(self, event: Event) -> None:
        rows = [row for row in event["traffic"] if row["axis"] != "control"]
        sent = ", ".join(f"{row['axis']} {row['collective']} {format_bytes(row['message_bytes'])}" for row in rows)
        memory = event["memory"]
        classes = sorted(memory["at_peak"].items(), key=lambda item: -item[1])
        held = ", ".join(
            f"{kind} {format_bytes(count)}" for kind, count in classes if count * 20 >= memory["peak_total"]
        )
        if pipe := self.recent[-1].get("pipeline") if self.recent else None:
            self.note(event, f"rank 0 held {pipe['live']} live micro-batches, idle {pipe['idle']:.0%}", "dim")
        self.note(
            event,
            f"rank 0 sent {sent or 'nothing'}; held {format_bytes(memory['peak_total'])} at its peak: {held}",
            "dim",
        )

    def _eval(self, event: Event) -> None:
        loss = f"held-out loss {format_value(event['loss'], '.4f')} over {event['tokens']:,} tokens"
        self.say(f"after {event['step'] + 1:>5} steps  {loss}", "bold")

    def _restored(self, event: Event) -> None:
        self.say(f"restored {event['checkpoint']} in {event['seconds']:.2f} s: step {event['step']} is next", "green")
        if event["changes"]:
            self.say(f"not bitwise as before: {'; '.join(event['changes'])}", "yellow")

    def _extended(self, event: Event) -> None:
        change = f"learning rate {event['lr']:.3e} instead of {event['lr_before']:.3e}"
        self.note(event, f"extended from {event['steps_before']} to {event['steps']} steps: {change}", "yellow")

    def _damaged(self, event: Event) -> None:
        for damage in event["damage"]:
            what = "{file} chunk {chunk}: expected {expected}, found {found}".format(**damage)
            self.say(f"DAMAGED {event['checkpoint']}: {what.replace(' chunk -1', '')}; passed over", "bold red")

    def _checkpoint(self, event: Event) -> None:
        self.saved = event["step"]
        if event["retention_error"]:
            self.note(event, event["retention_error"], "yellow")

    def _save_failed(self, event: Event) -> None:
        self.note(event, f"SAVE FAILED: {event['message']}", "bold red")

    def _straggler(self, event: Event) -> None:
        self.note(event, event["message"], "yellow")

    def _hang(self, event: Event) -> None:
        self.say(f"HANG: {event['message']}", "bold red")

    def _bad_sample(self, event: Event) -> None:
        self.note(event, f"quarantined sample {event['sample']} of {event['source']}: {event['reason']}", "yellow")

    def _nonfinite(self, event: Event) -> None:
        where = event["module"] or "another rank"
        self.note(event, f"not finite, first in {where}: update skipped on every rank", "yellow")

    def note(self, event: Event, text: str, style: str) -> None:
        self.say(f"step {event['step']}: {text}", style)  # counted from 0, as records and `data show` count

    def _end(self, event: Event) -> None:
        self.close()
        if event.get("was_complete"):
            self.say(f"complete: {event['steps']} steps were done before; records in {self.folder}")
            return
        skipped = f", {event['skipped']} skipped" if event["skipped"] else ""
        loss = f", loss {format_value(event['loss'], '.4f')}" if event["steps"] else ""
        digest = event["parameters_digest"][:16]
        self.say(f"done: {event['steps']} steps{skipped}{loss}; parameters {digest}; records in {self.folder}")


class JsonLines:
    """Every event of rank 0 as one JSON line."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt

    def show(self, event: Event) -> None:
        if event.get("attempt") == self.attempt:
            print(json.dumps(event), flush=True)

    def close(self) -> None:
        pass


def header(config: RunConfig, folder: Path, attempt: int, start: Event) -> list[str]:
    """What the run is, before its first step."""
    m, o = config.model, config.optimizer
    shape = f"{m.layers} layers x {m.width} wide, {m.heads} heads ({m.kv_heads} kv), ffn {m.ffn}, vocab {m.vocab:,}"
    experts = f", {m.experts} experts ({m.experts_active} active)" if m.experts else ""
    tokens = config.batch.global_ * config.data.sequence
    threads = f"{start['threads']} thread{'s' if start['threads'] > 1 else ''} each"
    data = f"{', '.join(start['sources'])}: {start['samples']:,} samples, {start['held_out']:,} held out"
    optimizer = f"AdamW lr {o.lr:g} {config.schedule.kind}, clip {o.clip:g}"
    watch = [] if start.get("supervised", True) else ["  watch   by torchrun: hung and slow ranks are not named here"]
    fingerprints = f"identity {start['identity']}  placement {start['placement']}"
    return [
        f"meshwright {__version__}  run {folder}  attempt {attempt}",
        f"  model   {start['parameters']:,} parameters" + (f": {shape}{experts}" if start["decoder"] else ""),
        f"  data    {data}; an epoch is {start['epoch_steps']:,} steps",
        f"  batch   {start['batch']}" + (f" ({tokens:,} tokens a step)" if start["decoder"] else ""),
        f"  train   {config.steps:,} steps, {optimizer}, {config.precision.compute}, seed {config.seed}",
        f"  ranks   {start['ranks']} on {start['device']}, {threads}; {start['layout']}; torch {start['torch']}",
        *mesh_lines(start),
        *pipeline_lines(start),
        *(f"  note    {note}" for note in start.get("notes", ())),
        f"  config  {folder / 'run.toml'}  {fingerprints}",
        *watch,
    ]


def mesh_lines(start: Event) -> list[str]:
    """Which ranks form which group, and on which hosts they are."""
    groups: dict[str, list[list[int]]] = start.get("groups", {})
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(start.get("hosts", ())):
        hosts.setdefault(host, []).append(rank)
    where = "; ".join(f"{host} has {format_ranks(ranks)}" for host, ranks in first_groups(list(hosts.items())))
    lines: list[str] = []
    for axis, members in groups.items():
        what = f" ({start['shard']})" if axis == "shard" else ""
        shown = " ".join(f"[{format_ranks(ranks)}]" for ranks in first_groups(members))
        more = f" and {len(members) - MAX_GROUPS} more" if len(members) > MAX_GROUPS else ""
        lines.append(f"  {'mesh' if not lines else '':<7} {axis} {len(members[0])}{what}: {shown}{more}")
    return lines + ([f"  hosts   {where}"] if where else [])


def pipeline_lines(start: Event) -> list[str]:
    """The schedule, and what it promises to rank 0: steps record what was measured."""
    if not (pipe := start.get("pipeline")):
        return []
    stages = ", ".join(f"{stage} (blocks {first}-{last})" for stage, (first, last) in pipe["stages"].items())
    bubble = f"; idle {pipe['bubble']:.0%} by the schedule alone" if pipe["bubble"] is not None else ""
    return [f"  pipe    {pipe['schedule']}: rank 0 has stages {stages}, {pipe['live']} live micro-batches{bubble}"]


def first_groups(items: list[Item]) -> list[Item]:
    return items[:MAX_GROUPS]


def format_ranks(ranks: list[int]) -> str:
    """Ranks as a person would write them: 0-7, or 0,8,..,56."""
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]},{ranks[1]},..,{ranks[-1]}"


def steady_steps(recent: list[Event]) -> list[Event]:
    """The window without the first step, which pays for warming up, and those that were counted, unless all are."""
    return [event for event in recent if event["step"] and not event.get("counted")] or recent


def rates(recent: list[Event]) -> tuple[float, float]:
    """(seconds a step, tokens a second) over the window."""
    steps = steady_steps(recent)
    seconds = sum(event["seconds"] for event in steps)
    return seconds / len(steps), sum(event["tokens"] for event in steps) / max(seconds, 1e-9)


def phase_shares(recent: list[Event]) -> dict[str, float]:
    """Each phase's share of the step over the window."""
    steps = steady_steps(recent)
    spent = {phase: sum(event["phases"][phase] for event in steps) for phase in steps[-1]["phases"]}
    whole = sum(spent.values()) or 1.0
    return {phase: seconds / whole for phase, seconds in spent.items()}


def plain_line(recent: list[Event], steps: int, saved: int = -1) -> str:
    event = recent[-1]
    step_seconds, tokens_second = rates(recent)
    phases = " ".join(f"{phase} {share:.0%}" for phase, share in phase_shares(recent).items() if share >= 0.005)
    numbers = f"loss {format_value(event['loss'], '.4f')}  lr {event['lr']:.2e}  norm {format_value(event['grad_norm'], '.3f')}"  # noqa: E501
    left = format_clock(step_seconds * (steps - event["step"] - 1))
    speed = f"{tokens_second:,.0f} tok/s  {phases}  mem {format_bytes(event['memory'])}  eta {left}"
    speed += f"  saved {saved}" if saved >= 0 else ""
    return f"{event['step'] + 1:>6} of {steps} steps done  {numbers}  {speed}"


def live_line(recent: list[Event], steps: int, width: int, saved: int = -1) -> Text:
    """One line for any width: a bar of what is left over, the numbers, the phases with exposed communication in red."""
    event, part = recent[-1], phase_shares(recent)
    step_seconds, rate = rates(recent)
    left = format_clock(step_seconds * (steps - event["step"] - 1))
    loss, norm = format_value(event["loss"], ".4f"), format_value(event["grad_norm"], ".2f")
    data = part["fetch"] + part["copy"]
    text = Text()
    if width >= 140:
        text.append(f" {event['step'] + 1} of {steps} steps done  loss {loss}", "bold")
        text.append(f"  lr {event['lr']:.1e}  norm {norm}  {rate:,.0f} tok/s ")
        names = {"data": data, "fwd": part["forward"], "bwd": part["backward"], "update": part["update"]}
        text.append("".join(f" {name} {share:.0%}" for name, share in names.items()))
        text.append(f" exposed {part['sync']:.0%}", EXPOSED)
        text.append(f"  mem {format_bytes(event['memory'])}  eta {left}" + (f"  saved {saved}" if saved >= 0 else ""))
    else:
        text.append(f" {event['step'] + 1}/{steps} done loss {loss}", "bold")
        text.append(f" lr {event['lr']:.0e} g {norm} {rate / 1000:,.1f}k tok/s")
        text.append(f" f{part['forward']:.0%} b{part['backward']:.0%}").append(f" x{part['sync']:.0%}", EXPOSED)
        text.append(f" {format_bytes(event['memory']).replace(' ', '')} {left}")
    cells = max(4, min(32, width - len(text.plain) - 1))
    done = round(cells * (event["step"] + 1) / max(1, steps))
    bar = (
        Text(no_wrap=True, overflow="ellipsis").append("━" * done, "green").append("━" * (cells - done), "bright_black")
    )
    return bar.append_text(text)


def format_value(number: float | None, form: str) -> str:
    return "not finite" if number is None else format(number, form)
