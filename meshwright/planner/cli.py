"""`meshwright plan`: finds the best layout of a model on a cluster, draws schedules, and measures this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from meshwright.base.cli.args import NO_ENTRY_POINTS, Json, flag, option, positional
from meshwright.base.terminal.output import emit_json, emit_text
from meshwright.errors import ConfigError

MAX_SIZE = 1 << 24
DEFAULT_CLUSTER, DEFAULT_TRAINER, DEFAULT_TOP = "h100", "meshwright", 5


def plan(
    config: Annotated[
        str | None, positional("MODEL", "preset, run file, or config.json of a Hugging Face model; or --model")
    ] = None,
    cluster: Annotated[
        str | None,
        option(
            "CLUSTER",
            "h100 (one node), h100:4 (devices), h100:8x16 (16 nodes of 8), a cluster file, or here (this machine) "
            "(default: h100)",
        ),
    ] = None,
    ranks: Annotated[int | None, option("N", "number of devices to use (default: all of the cluster)")] = None,
    batch: Annotated[int | None, option("N", "samples per optimizer step, over all ranks (default: the run's)")] = None,
    sequence: Annotated[int | None, option("N", "tokens per sample (default: the run's)")] = None,
    precision: Annotated[str | None, option("DTYPE", "fp32, bf16, fp16, fp64, fp8 or fp4 (default: the run's)")] = None,
    trainer: Annotated[
        str | None,
        option(
            "NAME",
            "trainer to plan for: meshwright, megatron, nemo, torchtitan, deepspeed, llm-foundry, nanotron, meta-2024, "
            "hai-llm; its layouts, speed and FLOP count (default: meshwright)",
        ),
    ] = None,
    headroom: Annotated[
        float | None, option("SHARE", "share of device memory that a plan leaves free (default: 0.08)")
    ] = None,
    expert_load: Annotated[
        str | None,
        option(
            "LOAD",
            "load of the busiest expert-parallel rank relative to the mean, such as 1.3, or a run folder with measured "
            "loads (default: 1)",
        ),
    ] = None,
    top: Annotated[int | None, option("K", "number of plans to list (default: 5)")] = None,
    all: Annotated[bool, flag("list similar plans, too, not only the best one of each family of layouts")] = False,
    tokens: Annotated[
        str | None, option("TOKENS", "token budget, such as 15T or 300B: also state its GPU-hours and energy")
    ] = None,
    price: Annotated[float | None, option("PRICE", "price of a GPU-hour, for the cost of --tokens")] = None,
    explain: Annotated[
        tuple[int, ...] | None, option("K", "explain the best plan, or the K-th of the list, in five parts")
    ] = None,
    scale: Annotated[bool, flag("show how the plan scales to 64 times the devices")] = False,
    critical_batch: Annotated[
        float | None, option("TOKENS", "critical batch size in tokens, for --scale (default: estimated)")
    ] = None,
    json: Json = False,
    html: Annotated[Path | None, option("FILE", "write the full result as one HTML page")] = None,
    replay: Annotated[
        Path | None,
        option("RUNS", "predict the published runs of a file, or replay a folder of own runs; show the errors"),
    ] = None,
    leave_one_out: Annotated[
        bool, flag("with --replay: also the errors of constants fitted without each source, and without each device")
    ] = False,
    out: Annotated[
        Path | None, option("PLAN.toml", "write the plan as a run file, and its figures as JSON next to it")
    ] = None,
    *,
    entry_points: Mapping[str, str] = NO_ENTRY_POINTS,
    overrides: tuple[str, ...] = (),
) -> None:
    """Plan: find the best layout of a model on a cluster, and explain it; config keys that you set are kept."""
    if leave_one_out and (replay is None or replay.is_dir()):
        raise ConfigError("--leave-one-out is for published runs", "expected --replay RUNS.json, too")
    if replay is not None:
        if config is not None:
            raise ConfigError(f"--replay plans no model, but {config} is given", "try it without the model")
        plan_options = {
            "--cluster": cluster, "--ranks": ranks, "--batch": batch, "--sequence": sequence, "--precision": precision,
            "--trainer": trainer, "--headroom": headroom, "--expert-load": expert_load, "--top": top,
            "--all": all or None, "--tokens": tokens, "--price": price, "--explain": explain, "--scale": scale or None,
            "--critical-batch": critical_batch, "--html": html, "--out": out,
        }  # fmt: skip
        refuse_plan_options(plan_options, entry_points, overrides)
        if replay.is_dir():
            replay_own_runs(replay, json)
        else:
            replay_published_runs(replay, json, leave_one_out)
        return
    if config is None and "model" not in entry_points:
        raise ConfigError("no model is given", "try meshwright plan MODEL, or meshwright plan --replay RUNS.json")
    from json import dumps

    from meshwright.base.io import output_file, write_output
    from meshwright.base.user_code.entry_points import load_user_code
    from meshwright.planner.api import plan_run, plan_workload
    from meshwright.planner.calibration.prediction import prediction_record
    from meshwright.planner.display.plan_text import show_plan
    from meshwright.planner.search.plan_result import plan_json, plan_toml, trainable_config
    from meshwright.planner.search.run_cost import parse_tokens

    cluster = DEFAULT_CLUSTER if cluster is None else cluster
    trainer = DEFAULT_TRAINER if trainer is None else trainer
    top = DEFAULT_TOP if top is None else top
    for name, number in (("--ranks", ranks), ("--batch", batch), ("--sequence", sequence), ("--top", top)):
        if number is not None and not 1 <= number <= MAX_SIZE:
            raise ConfigError(f"{name} {str(number)[:24]} is out of range", f"expected 1 to {MAX_SIZE:,}")
    if explain is not None and len(explain) > 1:
        raise ConfigError(f"--explain {' '.join(map(str, explain))} names more than one plan", "expected --explain K")
    if explain and not 1 <= explain[0] <= top:
        raise ConfigError(
            f"--explain {explain[0]}: the list has {top} plans", f"expected 1 to {top}, or a larger --top"
        )
    if out is not None and out.suffix != ".toml":
        raise ConfigError(f"--out {out} is not a TOML file", "expected a name that ends in .toml")
    if out is not None and html in (out, out.with_suffix(".json")):
        raise ConfigError(f"--html {html} is also written by --out", "expected a different name")
    written = [(out, "--out"), (out.with_suffix(".json") if out else None, "--out"), (html, "--html")]
    for path, argument in written:
        if path is not None:
            output_file(path, argument)
    user = load_user_code(entry_points)
    workload = plan_workload(
        config, user, cluster, overrides, batch, sequence, precision, headroom, trainer, expert_load
    )
    if out is not None:
        trainable_config(workload)
    choice, file = explain[0] if explain else 1, str(out or "PLAN.toml")
    budget = parse_tokens(tokens) if tokens is not None else None
    result = plan_run(workload, cluster, ranks, choice, top, scale, critical_batch, file, all, budget, price)
    if out is not None:
        write_output(out, plan_toml(result), "--out")
        write_output(out.with_suffix(".json"), dumps(prediction_record(result.chosen), indent=1) + "\n", "--out")
    if html is not None:
        from meshwright.planner.display.plan_page import render_plan_page

        write_output(html, render_plan_page(result, top), "--html")
    if json:
        emit_json(plan_json(result, top))
        return
    show_plan(result, top, explained=explain is not None)
    for path, _ in written:
        if path is not None:
            emit_text(f"written: {path}")


def refuse_plan_options(
    options: Mapping[str, object], entry_points: Mapping[str, str], overrides: tuple[str, ...]
) -> None:
    """Raises ConfigError if an option of a plan is given to --replay, which would ignore it."""
    given = [name for name, value in options.items() if value is not None]
    given += [f"--{name.replace('_', '-')}" for name in entry_points]
    given += [setting.partition("=")[0] for setting in overrides]
    if given:
        raise ConfigError(f"--replay plans no model, but {given[0]} is given", f"try it without {given[0]}")


def replay_published_runs(records: Path, json: bool, leave_one_out: bool) -> None:
    """Predicts published runs and shows the error of each prediction."""
    from meshwright.planner.calibration.replay import replay
    from meshwright.planner.display.replay_text import show_replay

    result = replay(records, leave_one_out)
    if json:
        emit_json(result)
    else:
        show_replay(result)


def replay_own_runs(folder: Path, json: bool) -> None:
    """Shows the error of the predictions of finished runs, before and after corrections by the other runs."""
    from meshwright.planner.calibration import own_runs
    from meshwright.planner.display.own_runs_text import show_own_runs

    result = own_runs.replay_own_runs(folder)
    if json:
        emit_json(result)
    else:
        show_own_runs(result)


def plan_schedule(
    kind: Annotated[str | None, positional("SCHEDULE", "schedule to draw (default: compare all schedules)")] = None,
    ranks: Annotated[int, option("P", "pipeline-parallel degree")] = 4,
    micro: Annotated[int, option("M", "micro-batches per step")] = 8,
    stages: Annotated[
        int | None, option("V", "stages per rank (default: 2 for schedules with several stages per rank, else 1)")
    ] = None,
    forward: Annotated[int, option("N", "time slots of a forward pass through one stage")] = 1,
    backward_input: Annotated[int, option("N", "time slots of the gradient of a stage's input")] = 1,
    weight: Annotated[int, option("N", "time slots of the gradient of a stage's weights")] = 1,
    svg: Annotated[Path | None, option("FILE", "also write the drawing as an SVG file")] = None,
    json: Json = False,
) -> None:
    """Plan schedule: draw a pipeline schedule with its bubble and micro-batches in flight per rank, or compare all."""
    from meshwright.base.topology.schedule_timeline import build_timeline, compare_schedules
    from meshwright.planner.display import schedule_text
    from meshwright.planner.display.schedule_svg import write_svg

    costs = schedule_text.integer_costs(forward, backward_input, weight)
    if kind is None:
        if svg is not None:
            raise ConfigError("--svg draws one schedule", "try meshwright plan schedule SCHEDULE --svg FILE")
        timelines = compare_schedules(ranks, micro, stages, costs)
        if json:
            emit_json(schedule_text.schedules_json(timelines, costs))
        else:
            schedule_text.show_schedules(timelines)
        return
    drawn = build_timeline(kind, ranks, micro, stages, costs)
    if svg is not None:
        write_svg(drawn, costs, svg)
    if json:
        emit_json(schedule_text.schedule_json(drawn, costs))
    else:
        schedule_text.show_schedule(drawn, costs)


def plan_measure(
    out: Annotated[
        Path | None,
        option("FILE", "cluster file to write (default: ~/.meshwright/machine.toml, which --cluster here reads)"),
    ] = None,
    seconds: Annotated[float, option("N", "approximate duration of the measurement")] = 30.0,
    ranks: Annotated[
        int | None, option("N", "number of ranks (default: one per GPU; without GPUs, one per core, at most 4)")
    ] = None,
    json: Json = False,
) -> None:
    """Plan measure: measure matmul, memory and collective rates of this machine, for plan --cluster here."""
    from meshwright.base.hardware.cluster import cluster_json
    from meshwright.base.hardware.resolve_cluster import measurement_file, write_cluster
    from meshwright.planner.display.machine_text import show_machine

    file = measurement_file(out)
    from meshwright.ops.measure.machine import measure

    cluster, remarks = measure(seconds, ranks)
    write_cluster(cluster, remarks, file)
    if json:
        emit_json({"file": str(file), "remarks": remarks, **cluster_json(cluster)})
    else:
        show_machine(cluster, remarks, file)
