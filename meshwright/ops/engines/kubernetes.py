"""Kubernetes: writes a JobSet or a TrainJob of Kubeflow with one supervisor per pod, and applies it. Torch-free."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from meshwright.base.io import read_regular_file
from meshwright.errors import ConfigError
from meshwright.ops.engines.engine_job import NO_OPTIONS, EngineJob, LaunchedJob, checked, describe_job, write_files
from meshwright.ops.engines.kubernetes_pods import CONFIG_FOLDER, NAME, PodSettings, job_set_spec
from meshwright.ops.engines.yaml_text import yaml_documents

Kind = Literal["jobset", "trainjob"]
MAX_RUN_FILE = 1 << 19
"""Bytes of a run file: a ConfigMap has room for 1 MiB."""


def manifests(job: EngineJob, settings: PodSettings, kind: Kind, run_text: str) -> list[dict[str, Any]]:
    """The objects of a job except its secret."""
    metadata = {"name": job.name, "namespace": settings.namespace}
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata | {"name": f"{job.name}-run"},
            "data": {"run.toml": run_text},
        }
    ]
    if not settings.claim:
        spec: dict[str, Any] = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": settings.storage}},
        }
        spec |= {"storageClassName": settings.storage_class} if settings.storage_class else {}
        objects.append(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": metadata | {"name": f"{job.name}-run"},
                "spec": spec,
            }
        )
    if kind == "jobset":
        job_set = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata}
        return [*objects, job_set | {"spec": job_set_spec(job, settings)}]
    trainer = {"apiVersion": "trainer.kubeflow.org/v1alpha1"}
    hosts = job.hosts + job.spares
    runtime = {"mlPolicy": {"numNodes": hosts}, "template": {"spec": job_set_spec(job, settings, trainer=True)}}
    return [
        *objects,
        trainer | {"kind": "TrainingRuntime", "metadata": metadata, "spec": runtime},
        trainer
        | {
            "kind": "TrainJob",
            "metadata": metadata,
            "spec": {
                "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
                "trainer": {"numNodes": hosts, "image": settings.image},
            },
        },
    ]


def secret_manifest(job: EngineJob, settings: PodSettings) -> dict[str, Any]:
    """The object with a new secret of the job."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{job.name}-secret", "namespace": settings.namespace},
        "type": "Opaque",
        "stringData": {"secret": secrets.token_hex(32)},
    }


def launch_kubernetes(
    run_file: str | Path,
    image: str,
    *,
    name: str = "",
    kind: Kind = "jobset",
    hosts: int | None = None,
    spares: int = 0,
    cpus: int | None = None,
    namespace: str = "default",
    claim: str = "",
    storage: str = "100Gi",
    storage_class: str = "",
    env_from: str = "",
    restarts: int = 3,
    python: str = "python",
    overrides: Sequence[str] = (),
    entry_points: Mapping[str, str] = NO_OPTIONS,
    write: str | Path | None = None,
) -> LaunchedJob:
    """Writes the manifests of a run on Kubernetes, and applies them with kubectl.

    Args:
        run_file: the run file. The pods get it as a ConfigMap; other paths in it are those inside of the image.
        image: the image of the pods, with Meshwright and the user's code.
        name: the name of the job, and of its folder on the volume. Default: that of the run file.
        kind: ``jobset`` (jobset.x-k8s.io) or ``trainjob`` (trainer.kubeflow.org).
        hosts: the pods that train, each on a node of its own. Default: ``launch.hosts`` of the run file.
        spares: pods beyond them, which wait until one of them fails.
        cpus: the CPU cores that a pod requests. Default: one per thread and data worker of a rank.
        namespace: the namespace of all objects.
        claim: an existing PersistentVolumeClaim that all pods can write. Default: a new one.
        storage, storage_class: size and class of the new claim.
        env_from: an existing Secret whose keys become variables of the pods, such as credentials of a bucket.
        restarts: how often the whole job starts again after a failure.
        python: the interpreter in the image.
        overrides: settings as ``"--key=value"``.
        entry_points: the options of `meshwright train` that name objects of the user's code.
        write: the folder for the manifests; nothing is then applied. Default: runs/NAME.launch, and they are applied.
    """
    file = Path(run_file)
    job = describe_job(
        file,
        Path("runs") / (name or file.stem),
        hosts=hosts,
        spares=spares,
        cpus=cpus,
        overrides=overrides,
        entry_points=entry_points,
        write=write,
    )
    if file.is_dir():
        raise ConfigError(f"{file} is a folder", "expected a run file, such as RUN/run.toml")
    if job.config.init_from and not Path(read_init_from(job)).is_absolute():
        raise ConfigError("init_from is relative to the run file", "expected a path inside of the image or the volume")
    settings = PodSettings(
        image=checked(image, "--image"),
        namespace=checked(namespace, "--namespace", NAME),
        claim=claim and checked(claim, "--claim", NAME),
        storage=checked(storage, "--storage", r"[0-9]+[A-Za-z]*"),
        storage_class=storage_class and checked(storage_class, "--storage-class", NAME),
        env_from=env_from and checked(env_from, "--env-from", NAME),
        restarts=restarts,
        python=python,
    )
    text = read_regular_file(file, MAX_RUN_FILE, f"run file {file}", "a TOML file").decode()
    objects = manifests(job, settings, kind, text)
    names = {f"{kind}.yaml": header(job, kind) + yaml_documents(objects)}
    names["secret.yaml"] = yaml_documents([secret_manifest(job, settings)])
    files = write_files(job.folder, names, private=("secret.yaml",))
    command = ("kubectl", "apply", *(f"--filename={path}" for path in reversed(files)))
    if write is not None:
        return LaunchedJob("kubernetes", files, command)
    return LaunchedJob("kubernetes", files, command, apply(command, job))


def read_init_from(job: EngineJob) -> str:
    """`init_from` as the run file gives it; a config has it as an absolute path."""
    import tomllib

    given = [option.partition("=")[2] for option in job.options if option.startswith("--init_from=")]
    tree = tomllib.loads(job.run_file.read_text())
    return given[-1] if given else str(tree.get("init_from", ""))


def header(job: EngineJob, kind: Kind) -> str:
    hosts = f"{job.hosts} host(s)" + (f" and {job.spares} spare(s)" if job.spares else "")
    return (
        f"# Trains {job.run_file.name} on {hosts}. Written by `meshwright launch kubernetes`; it is yours to edit.\n"
        f"# The secret of the job is in secret.yaml. Pods read {CONFIG_FOLDER}/run.toml, and write to the volume.\n"
        + ("# Needs the JobSet controller.\n" if kind == "jobset" else "# Needs Kubeflow Trainer.\n")
    )


def apply(command: Sequence[str], job: EngineJob) -> str:
    """Applies the manifests with kubectl and returns the name of the job."""
    if shutil.which(command[0]) is None:
        raise ConfigError("kubectl is not on this machine", f"try {' '.join(command)} where it is")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stderr.split())[:500]
        raise ConfigError(f"kubectl refused the manifests in {job.folder}: {reason}", "try kubectl apply again")
    return job.name
