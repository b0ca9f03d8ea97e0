"""The header of a training run on the terminal: model, data, batch, mesh and settings, in lines. Torch-free."""

from __future__ import annotations

from pathlib import Path

from meshwright.base.config import RunConfig
from meshwright.base.records.events import Event
from meshwright.base.terminal.rollout_progress import rollout_header
from meshwright.version import __version__

MAX_GROUPS = 8
"""The process groups of an axis, or hosts, that the header lists."""


def header(config: RunConfig, folder: Path, attempt: int, start: Event) -> list[str]:
    """Returns the lines that describe a run before its first step."""
    model, optimizer = config.model, config.optimizer
    heads = f"{model.heads} heads ({model.kv_heads} kv heads)"
    shape = f"{model.layers} layers, width {model.width}, {heads}, ffn {model.ffn}, vocab {model.vocab:,}"
    experts = f", {model.experts} experts ({model.experts_active} active)" if model.experts else ""
    threads = f"{start['threads']} thread{'s' if start['threads'] > 1 else ''} each"
    kind, schedule = start.get("optimizer", optimizer.kind), start.get("schedule", config.schedule.kind)
    update = f"{kind}, lr {optimizer.lr:g} {schedule}, clip {optimizer.clip:g}"
    precision = start["precision"] + (" with float8" if start.get("float8") else "")
    lines = [
        f"meshwright {__version__}  run {folder}  attempt {attempt}",
        f"  model   {start['parameters']:,} parameters" + (f": {shape}{experts}" if start["decoder"] else ""),
        *(rollout_header(config, start) if config.rl.enabled else sample_lines(config, start)),
        f"  train   {config.steps:,} steps, {update}, {precision}, seed {config.seed}",
        f"  ranks   {start['ranks']} on {start['device']}, {threads}; {start['layout']}; torch {start['torch']}",
        *mesh_lines(start),
        *pipeline_lines(start),
        *(f"  spec    {line}" for line in start.get("inferred", ())),
        *(f"  note    {note}" for note in start.get("notes", ())),
        f"  config  {folder / 'run.toml'}  identity {start['identity']}  placement {start['placement']}",
    ]
    supervised = start.get("supervised", True)
    if supervised and start.get("user_code"):
        logs = folder / "attempts" / f"{attempt:04d}" / "*.log"
        lines.append(f"  output  what rank 0 prints is shown here; what all processes print is in {logs}")
    if not supervised:
        lines.append("  watch   torchrun supervises the ranks: Meshwright does not report hangs and stragglers here")
    return lines


def sample_lines(config: RunConfig, start: Event) -> list[str]:
    """Returns the data and the batch of a run that trains on samples."""
    tokens = config.batch.global_ * config.data.sequence
    data = f"{', '.join(start['sources'])}: {start['samples']:,} samples, {start['held_out']:,} held out"
    return [
        f"  data    {data}; {start['epoch_steps']:,} steps per epoch",
        f"  batch   {start['batch']}" + (f" ({tokens:,} tokens per step)" if start["decoder"] else ""),
    ]


def mesh_lines(start: Event) -> list[str]:
    """Returns the process groups of each axis, and the ranks of each host."""
    groups: dict[str, list[list[int]]] = start.get("groups", {})
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(start.get("hosts", ())):
        hosts.setdefault(host, []).append(rank)
    lines: list[str] = []
    for axis, members in groups.items():
        sharding = f" ({start['shard']})" if axis == "shard" else ""
        shown = " ".join(f"[{format_ranks(ranks)}]" for ranks in members[:MAX_GROUPS])
        more = f" and {len(members) - MAX_GROUPS} more" if len(members) > MAX_GROUPS else ""
        lines.append(f"  {'mesh' if not lines else '':<7} {axis} {len(members[0])}{sharding}: ranks {shown}{more}")
    if hosts:
        shown = "; ".join(f"{host}: ranks {format_ranks(ranks)}" for host, ranks in list(hosts.items())[:MAX_GROUPS])
        lines.append(f"  hosts   {shown}")
    return lines


def pipeline_lines(start: Event) -> list[str]:
    """Returns the pipeline schedule with the in-flight micro-batches and the bubble that it predicts for rank 0."""
    if not (pipeline := start.get("pipeline")):
        return []
    stages = ", ".join(f"{stage} (blocks {first}-{last})" for stage, (first, last) in pipeline["stages"].items())
    bubble = f", bubble {pipeline['bubble']:.0%}" if pipeline["bubble"] is not None else ""
    in_flight = f"{pipeline['live']} micro-batches in flight"
    return [f"  pipe    {pipeline['schedule']}: rank 0 has stages {stages}, {in_flight}{bubble}"]


def format_ranks(ranks: list[int]) -> str:
    """Formats a list of ranks: "0-7", or "0,8,..,56"."""
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]},{ranks[1]},..,{ranks[-1]}"
