"""`meshwright launch`: writes the files that start a run on SLURM, Kubernetes or Ray, and starts them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from meshwright.base.cli.args import NO_ENTRY_POINTS, Json, option, positional
from meshwright.base.terminal.output import emit

LaunchFile = Annotated[Path, positional("RUN.toml", "run file, or a run folder")]
RunDir = Annotated[Path | None, option("DIR", "run folder, which all hosts share (default: runs/NAME of NAME.toml)")]
Hosts = Annotated[int | None, option("N", "hosts that train (default: launch.hosts)")]
Spares = Annotated[int, option("K", "hosts beyond them, which wait until one of them fails")]
Cpus = Annotated[
    int | None,
    option("N", "CPU cores per host (default: whole nodes on SLURM, else one per thread and data worker of a rank)"),
]
Write = Annotated[
    Path | None, option("DIR", "write the files to DIR and start nothing (default: RUN.launch, and start)")
]


def launch_slurm(
    file: LaunchFile,
    run: RunDir = None,
    hosts: Hosts = None,
    spares: Spares = 0,
    cpus: Cpus = None,
    partition: Annotated[str, option("NAME", "partition (default: that of the cluster)")] = "",
    account: Annotated[str, option("NAME", "account (default: that of the user)")] = "",
    time: Annotated[str, option("TIME", "time limit of one start, such as 1-00:00:00")] = "",
    requeues: Annotated[int, option("N", "requeues in a row after failures without a new checkpoint")] = 3,
    blame_limit: Annotated[int, option("K", "incidents of a node after which a requeue excludes it")] = 2,
    python: Annotated[str, option("FILE", "Python interpreter of the nodes")] = sys.executable,
    write: Write = None,
    json: Json = False,
    *,
    training_entry_points: Mapping[str, str] = NO_ENTRY_POINTS,
    overrides: tuple[str, ...] = (),
) -> None:
    """Launch slurm: write a batch script with one supervisor per node, and submit it."""
    from meshwright.ops.engines.slurm import launch_slurm as launch

    launched = launch(
        file,
        run,
        hosts=hosts,
        spares=spares,
        cpus=cpus,
        partition=partition,
        account=account,
        time=time,
        requeues=requeues,
        blame_limit=blame_limit,
        python=python,
        overrides=overrides,
        entry_points=training_entry_points,
        write=write,
    )
    emit(json, launched.to_json(), launched.text())


def launch_kubernetes(
    file: LaunchFile,
    image: Annotated[str, option("IMAGE", "image of the pods, with Meshwright and your code")],
    name: Annotated[
        str, option("NAME", "name of the job, and of its run on the volume (default: NAME of NAME.toml)")
    ] = "",
    kind: Annotated[
        Literal["jobset", "trainjob"], option("KIND", "jobset (jobset.x-k8s.io) or trainjob (trainer.kubeflow.org)")
    ] = "jobset",
    hosts: Hosts = None,
    spares: Spares = 0,
    cpus: Cpus = None,
    namespace: Annotated[str, option("NAME", "namespace of all objects")] = "default",
    claim: Annotated[str, option("NAME", "existing PersistentVolumeClaim for the run (default: a new one)")] = "",
    storage: Annotated[str, option("SIZE", "size of the new claim")] = "100Gi",
    storage_class: Annotated[str, option("NAME", "storage class of the new claim")] = "",
    env_from: Annotated[str, option("SECRET", "existing Secret whose keys become environment variables")] = "",
    restarts: Annotated[int, option("N", "restarts of the whole job after failures")] = 3,
    python: Annotated[str, option("FILE", "Python interpreter in the image")] = "python",
    write: Write = None,
    json: Json = False,
    *,
    training_entry_points: Mapping[str, str] = NO_ENTRY_POINTS,
    overrides: tuple[str, ...] = (),
) -> None:
    """Launch kubernetes: write a JobSet or a TrainJob with one supervisor per pod, and apply it."""
    from meshwright.ops.engines.kubernetes import launch_kubernetes as launch

    launched = launch(
        file,
        image,
        name=name,
        kind=kind,
        hosts=hosts,
        spares=spares,
        cpus=cpus,
        namespace=namespace,
        claim=claim,
        storage=storage,
        storage_class=storage_class,
        env_from=env_from,
        restarts=restarts,
        python=python,
        overrides=overrides,
        entry_points=training_entry_points,
        write=write,
    )
    emit(json, launched.to_json(), launched.text())


def launch_ray(
    file: LaunchFile,
    run: RunDir = None,
    hosts: Hosts = None,
    spares: Spares = 0,
    cpus: Cpus = None,
    ray_address: Annotated[str, option("ADDRESS", "Ray cluster; auto: the one that runs on this machine")] = "auto",
    retries: Annotated[int, option("N", "restarts in a row without a new checkpoint")] = 3,
    python: Annotated[str, option("FILE", "Python interpreter of the nodes")] = sys.executable,
    write: Write = None,
    json: Json = False,
    *,
    training_entry_points: Mapping[str, str] = NO_ENTRY_POINTS,
    overrides: tuple[str, ...] = (),
) -> None:
    """Launch ray: write a script with one supervisor per node, and run it until the run is complete."""
    from meshwright.ops.engines.ray_script import launch_ray as launch

    launched = launch(
        file,
        run,
        hosts=hosts,
        spares=spares,
        cpus=cpus,
        ray_address=ray_address,
        retries=retries,
        python=python,
        overrides=overrides,
        entry_points=training_entry_points,
        write=write,
    )
    emit(json, launched.to_json(), launched.text())
