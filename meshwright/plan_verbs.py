"""The verbs of the planner: their words, and what they lead to. Imports lazily, as all verbs do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from meshwright.errors import ConfigError
from meshwright.words import Json, flag, tell, word

if TYPE_CHECKING:
    from meshwright.config import RunConfig


MOST = 1 << 24


def plan(
    model: Annotated[
        str | None, Positional, word("[MODEL]", "a preset, a run file, or a published config.json")
    ] = None,
    cluster: Annotated[
        str, word("CLUSTER", "h100 (a node), h100:4, h100:8x16 (16 nodes of 8), a cluster file, or here")
    ] = "h100",
    ranks: Annotated[int | None, word("N", "use so many of the devices (default: all)")] = None,
    batch: Annotated[int | None, word("GLOBAL", "samples a step, over all ranks (default: the run's)")] = None,
    sequence: Annotated[int | None, word("S", "tokens a sample (default: the run's)")] = None,
    precision: Annotated[str | None, word("P", "fp32, bf16, fp16, fp8, ... (default: the run's)")] = None,
    top: Annotated[int, arg(metavar="K", help="plans in the list")] = 5,
    explain: Annotated[tuple[int, ...] | None, word("[K]", "why this plan, or the K-th of the list")] = None,
    scale: Annotated[bool, flag("the plan on 1 to 64 times the devices")] = False,
    critical_batch: Annotated[float | None, word("TOKENS", "where larger batches stop paying, for --scale")] = None,
    json: Json = False,
    html: Annotated[Path | None, word("FILE", "write it all as one page")] = None,
    replay: Annotated[Path | None, word("RUNS.json", "predict published runs instead, and show the error")] = None,
    out: Annotated[Path | None, word("PLAN.toml", "write the plan as a run file, its figures beside it")] = None,
    *,
    overrides: tuple[str, ...] = (),
) -> None:
    """Plan: the best layout of a model on a cluster, the way to it and why; given keys of the run are kept."""
    if replay is not None:
        show_error(replay, json)
        return
    if model is None:
        raise ConfigError("no model is given", "allowed: meshwright plan MODEL, or meshwright plan --replay RUNS.json")
    from json import dumps

    from meshwright.io import write_output
    from meshwright.observe.plan_text import show
    from meshwright.planner.calibration.prediction import prediction_record
    from meshwright.planner.hardware.resolve_cluster import resolve_cluster, with_whole_nodes
    from meshwright.planner.search.plan_result import as_json, make_plan, plan_toml
    from meshwright.planner.workload.workload_args import build_workload

    for name, number in (("--ranks", ranks), ("--batch", batch), ("--sequence", sequence), ("--top", top)):
        if number is not None and not 1 <= number <= MOST:
            raise ConfigError(f"{name} {str(number)[:24]} is out of range", f"allowed: 1 to {MOST:,}")
    if critical_batch is not None and not 0 < critical_batch < float("inf"):
        raise ConfigError(f"--critical-batch {critical_batch} is out of range", "allowed: tokens, above 0")
    if explain is not None and len(explain) > 1:
        raise ConfigError(f"--explain {' '.join(map(str, explain))} is more than one plan", "allowed: --explain K")
    if out is not None and out.suffix != ".toml":
        raise ConfigError(f"--out {out} is no run file", "allowed: a name that ends in .toml")
    if out is not None and html in (out, out.with_suffix(".json")):
        raise ConfigError(f"--html {html} is also written by --out", "allowed: another name")
    devices = resolve_cluster(cluster)
    if ranks is not None:
        if ranks > devices.device_count:
            raise ConfigError(
                f"--ranks {ranks} of {devices.device_count} devices", f"allowed: 1 to {devices.device_count}"
            )
        devices = with_whole_nodes(devices, ranks)
    work = build_workload(model, overrides, batch, sequence, precision)
    place = explain[0] if explain else 1
    whole = make_plan(work, devices, place, top, scale, critical_batch, str(out or "PLAN.toml"))
    if out is not None:
        write_output(out, [plan_toml(whole)], "--out")
        write_output(out.with_suffix(".json"), [dumps(prediction_record(whole.chosen), indent=1), "\n"], "--out")
    if html is not None:
        from meshwright.observe.plan_page import page

        write_output(html, page(whole, top), "--html")
    if json:
        tell(True, as_json(whole, top), "")
        return
    show(whole, top, explained=explain is not None)
    for path in filter(None, (out, out and out.with_suffix(".json"), html)):
        tell(False, {}, f"written: {path}")


def show_error(records: Path, json: bool) -> None:
    from meshwright.observe.replay_text import show_replay
    from meshwright.planner.calibration.replay import replay

    found = replay(records)
    tell(True, found, "") if json else show_replay(found)


def plan_schedule(
    kind: Annotated[
        str | None, Positional, word("[KIND]", "a schedule, to draw it (default: compare them all)")
    ] = None,
    ranks: Annotated[int, arg(metavar="P", help="ranks of the pipeline")] = 4,
    micro: Annotated[int, arg(metavar="M", help="micro-batches of a step")] = 8,
    stages: Annotated[
        int | None, word("V", "stages a rank (default: 2 where the schedule takes more than one)")
    ] = None,
    forward: Annotated[int, arg(metavar="N", help="slots of a forward pass through one stage")] = 1,
    backward_input: Annotated[int, arg(metavar="N", help="slots of the input's gradient")] = 1,
    weight: Annotated[int, arg(metavar="N", help="slots of the weights' gradient")] = 1,
    svg: Annotated[Path | None, word("FILE", "write the picture there, too")] = None,
    json: Json = False,
) -> None:
    """Plan schedule: a pipeline schedule slot by slot, its bubble and what each rank holds; or all kinds compared."""
    from meshwright.observe import schedule_text
    from meshwright.observe.schedule_svg import write_svg
    from meshwright.topology.schedule_timeline import build_timeline, compare_schedules

    costs = schedule_text.integer_costs(forward, backward_input, weight)
    if kind is None:
        if svg is not None:
            raise ConfigError("--svg draws one schedule", "allowed: meshwright plan schedule KIND --svg FILE")
        found = compare_schedules(ranks, micro, stages, costs)
        tell(True, schedule_text.schedules_json(found, costs), "") if json else schedule_text.show_all(found)
        return
    drawn = build_timeline(kind, ranks, micro, stages, costs)
    if svg is not None:
        write_svg(drawn, costs, svg)
    tell(True, schedule_text.schedule_json(drawn, costs), "") if json else schedule_text.show(drawn, costs)


def plan_measure(
    out: Annotated[Path | None, word("FILE", "where the result goes (default: ~/.meshwright/machine.toml)")] = None,
    seconds: Annotated[float, arg(metavar="N", help="about how long to measure")] = 30.0,
    ranks: Annotated[int | None, word("N", "ranks (default: one a GPU; without GPUs one a core, 4 at most)")] = None,
    json: Json = False,
) -> None:
    """Plan measure: what this machine computes, moves and exchanges, for plans with --cluster here."""
    from dataclasses import asdict

    from meshwright.measure.machine import measure
    from meshwright.observe.machine_text import show_machine
    from meshwright.planner.hardware.resolve_cluster import measurement_file, write_cluster

    file = measurement_file(out)
    cluster, remarks = measure(seconds, ranks)
    write_cluster(cluster, remarks, file)
    if json:
        tell(True, {"file": str(file), "remarks": remarks, **asdict(cluster)}, "")
    else:
        show_machine(cluster, remarks, file)


def settings(
    plan: str | None,
    cluster: str | None,
    file: Path | None,
    overrides: tuple[str, ...],
    ranks: str | None,
    steps: str | None,
    json: bool,
) -> RunConfig:
    """Of `meshwright train`, by a plan where one is given; says which one it is, once for all ranks."""
    from dataclasses import asdict

    from meshwright.config import load_config

    if cluster is not None:
        from meshwright.planner.hardware.resolve_cluster import resolve_cluster

        resolve_cluster(cluster)  # what is misspelt is refused here, in one line
    if plan is None:
        return load_config(file, overrides, ranks, steps)
    from meshwright.launch.environment import started_by_torchrun
    from meshwright.planner.search.plan_to_config import BEST, resolve_plan

    if plan == BEST and ranks is None and started_by_torchrun():
        ranks = os.environ["WORLD_SIZE"]
    found = resolve_plan(plan, cluster, file, overrides, ranks, steps)
    if os.environ.get("RANK", "0") == "0":
        layout = asdict(found.config.layout)
        tell(
            json, {"kind": "plan", "message": found.message, "layout": layout, "seconds": found.seconds}, found.message
        )
    return found.config
