"""The JobSet of a job: pods with their command, volumes and probes, and what happens when one ends. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.base.environment import python_command
from meshwright.ops.engines.engine_job import EngineJob
from meshwright.ops.engines.exit_codes import FAIL_CODES

NAME = r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?"
"""Names of Kubernetes objects."""
CONFIG_FOLDER, SECRET_FOLDER, RUN_VOLUME = "/etc/meshwright", "/etc/meshwright-secret", "/runs"
CONTAINER = "node"
"""Kubeflow Trainer takes the container with this name, of the job with this name, for the one that trains."""
SECONDS_AFTER_GRACE = 30
"""Seconds that a pod has beyond launch.grace_period, to publish its checkpoint and end."""


@dataclass(frozen=True)
class PodSettings:
    """What the user chooses for the pods."""

    image: str
    namespace: str = "default"
    claim: str = ""
    storage: str = "100Gi"
    storage_class: str = ""
    env_from: str = ""
    restarts: int = 3
    python: str = "python"


def job_set_spec(job: EngineJob, settings: PodSettings, trainer: bool = False) -> dict[str, Any]:
    """The JobSet: one indexed job with a pod per host, which reach each other through its headless service."""
    pods = job.hosts + job.spares
    template: dict[str, Any] = {"spec": job_spec(job, settings, pods)}
    if trainer:
        template["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        # A job that podFailurePolicy ended would end in the same way again; any other failure restarts the JobSet.
        "failurePolicy": {
            "maxRestarts": settings.restarts,
            "rules": [{"name": "finalExitCode", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": template}],
    }


def job_spec(job: EngineJob, settings: PodSettings, pods: int) -> dict[str, Any]:
    """A pod that ends is replaced, and its supervisor joins the others; how it ended decides whether that counts."""
    return {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": pods,
        "podReplacementPolicy": "Failed",  # not before the old pod has ended: its ranks may still save
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(FAIL_CODES)},
                },
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "Ignore",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [143]},
                },
            ]
        },
        "template": {
            "metadata": {"labels": {"app.kubernetes.io/name": "meshwright", "app.kubernetes.io/instance": job.name}},
            "spec": pod_spec(job, settings),
        },
    }


def pod_spec(job: EngineJob, settings: PodSettings) -> dict[str, Any]:
    claim = settings.claim or f"{job.name}-run"
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(job.config.launch.grace_period) + SECONDS_AFTER_GRACE,
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": job.name}},
                        "topologyKey": "kubernetes.io/hostname",
                    }
                ]
            }
        },
        "containers": [container(job, settings)],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "config", "configMap": {"name": f"{job.name}-run"}},
            {"name": "secret", "secret": {"secretName": f"{job.name}-secret", "defaultMode": 0o400}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def container(job: EngineJob, settings: PodSettings) -> dict[str, Any]:
    """The supervisor is process 1 of its container, so that Kubernetes' signals reach it."""
    run = f"{RUN_VOLUME}/{job.name}"
    limits = {"nvidia.com/gpu": str(job.gpus_per_host)} if job.gpus_per_host else {}
    starter = "meshwright.ops.engines.start_supervisor", f"{SECRET_FOLDER}/secret", run
    probe = "meshwright.ops.engines.probe", run, "--limit", str(round(2 * job.config.launch.hang_timeout))
    value: dict[str, Any] = {
        "name": CONTAINER,
        "image": settings.image,
        "command": [
            *python_command(*starter, python=settings.python),
            *job.train_command(settings.python, f"{CONFIG_FOLDER}/run.toml", run),
        ],
        "env": [
            field("MESHWRIGHT_HOST_NAME", "spec.nodeName"),
            field("MESHWRIGHT_HOST_ADDRESS", "status.podIP"),
        ],
    }
    if settings.env_from:
        value["envFrom"] = [{"secretRef": {"name": settings.env_from}}]
    return value | {
        "resources": {"requests": {"cpu": str(job.cpus_per_host)}} | ({"limits": limits} if limits else {}),
        "volumeMounts": [
            {"name": "run", "mountPath": RUN_VOLUME},
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
        # The supervisor itself finds a rank that hangs; the probe finds a supervisor that does not.
        "livenessProbe": {
            "exec": {"command": python_command(*probe, python=settings.python)},
            "initialDelaySeconds": 60,
            "periodSeconds": 30,
            "timeoutSeconds": 20,
            "failureThreshold": 3,
        },
        # SIGTERM makes the job save a checkpoint; a second one, which Kubernetes sends next, would kill the ranks.
        "lifecycle": {
            "preStop": {
                "exec": {"command": ["sh", "-c", "kill -TERM 1; while kill -0 1 2>/dev/null; do sleep 1; done"]}
            }
        },
    }


def field(name: str, path: str) -> dict[str, Any]:
    """An environment variable with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
