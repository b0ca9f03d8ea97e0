"""`meshwright train`: trains a model, and resumes from the run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from meshwright.base.cli.args import NO_ENTRY_POINTS, Json, Ranks, RunFile, RunLocation, flag, option
from meshwright.base.terminal.output import emit
from meshwright.errors import ConfigError

if TYPE_CHECKING:
    from meshwright.base.config import RunConfig


def train(
    file: RunFile = None,
    # torchrun has an option --run-path, and takes --run for its abbreviation: --run-dir is unambiguous there.
    run: Annotated[
        RunLocation | None,
        option("DIR", "run folder or URL (default: runs/PRESET, or runs/NAME of --model)", "--run-dir"),
    ] = None,
    ranks: Ranks = None,
    steps: Annotated[str | None, option("N", "number of optimizer steps of the whole run")] = None,
    restarts: Annotated[
        str | None, option("N", "restarts in a row without progress before giving up (launch.restarts)")
    ] = None,
    fresh: Annotated[bool, flag("start again from step 0; an existing run folder is renamed, not deleted")] = False,
    fork: Annotated[
        bool, flag("continue from the newest checkpoint with different settings, as a new timeline")
    ] = False,
    accept_code: Annotated[
        bool,
        flag("continue although the code of --model, --loss, --collate, --source or --reward changed, and record it"),
    ] = False,
    no_fallback: Annotated[
        bool, flag("exit with code 4 if the newest checkpoint is damaged, instead of using an older one")
    ] = False,
    plan: Annotated[
        str | None, option("PLAN", "take the layout from the planner: best, or a PLAN.toml; other options override it")
    ] = None,
    cluster: Annotated[
        str | None, option("CLUSTER", "cluster that --plan and step-time predictions assume (default: this machine)")
    ] = None,
    profile: Annotated[
        str | None, option("STEPS", "profile these steps, such as 10:13, with torch.profiler (profile.steps)")
    ] = None,
    json: Json = False,
    *,
    training_entry_points: Mapping[str, str] = NO_ENTRY_POINTS,
    overrides: tuple[str, ...] = (),
) -> None:
    """Train: train a model; settings come from the preset, then the run file, then the command line."""
    from meshwright.base.environment import started_by_torchrun
    from meshwright.base.terminal.terminal import JsonLines
    from meshwright.base.topology.unsupported import validate
    from meshwright.core import api, faults

    if restarts is not None:
        overrides = (*overrides, f"--launch.restarts={restarts}")
    if profile is not None:
        overrides = (*overrides, f"--profile.steps={profile}")
    if plan == "best" and "model" in training_entry_points:
        raise ConfigError(
            "--plan best plans the model of the config",
            "try meshwright plan --model ... --out PLAN.toml, then --plan PLAN.toml",
        )
    config = resolve_config(plan, cluster, file, overrides, ranks, steps, json, "model" in training_entry_points)
    validate(config, own_model="model" in training_entry_points)
    faults.parse_faults(os.environ.get("MESHWRIGHT_FAULT", ""))  # a misspelled fault is reported before ranks start
    display = JsonLines if json else None
    train_config = api.train_as_rank if started_by_torchrun() else api.train_with_fork_server
    train_config(
        config,
        run,
        display,
        training_entry_points,
        fresh=fresh,
        fork=fork,
        accept_code=accept_code,
        fallback=not no_fallback,
        cluster=cluster,
    )


def resolve_config(
    plan: str | None,
    cluster: str | None,
    file: Path | None,
    overrides: tuple[str, ...],
    ranks: str | None,
    steps: str | None,
    json: bool,
    own_model: bool,
) -> RunConfig:
    """Loads the config, with the layout of a plan if one is requested; rank 0 prints which plan it is."""
    from meshwright.base.models.initial_model import load_run_config

    if cluster is not None:
        from meshwright.base.hardware.resolve_cluster import resolve_cluster

        resolve_cluster(cluster)  # a misspelled cluster is reported before ranks start
    if plan is None:
        return load_run_config(file, overrides, ranks, steps, own_model=own_model)
    from dataclasses import asdict

    from meshwright.base.environment import started_by_torchrun
    from meshwright.planner.search.plan_to_config import BEST, resolve_plan

    if plan == BEST and ranks is None and started_by_torchrun():
        ranks = os.environ["WORLD_SIZE"]
    planned = resolve_plan(plan, cluster, file, overrides, ranks, steps)
    if os.environ.get("RANK", "0") == "0":
        record = {
            "kind": "plan",
            "message": planned.message,
            "layout": asdict(planned.config.layout),
            "seconds": planned.seconds,
        }
        emit(json, record, planned.message)
    return planned.config
