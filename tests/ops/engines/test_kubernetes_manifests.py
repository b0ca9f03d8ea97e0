"""The manifests of Kubernetes: valid by the published schemas and models; their exit codes, secrets and stops."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.base.cli.main import main
from meshwright.errors import ConfigError
from meshwright.ops.engines.exit_codes import EXIT_CODES
from meshwright.ops.engines.kubernetes import launch_kubernetes
from meshwright.ops.engines.yaml_text import yaml_text
from tests.ops.engines.engine_runs import write_run_file

yaml = pytest.importorskip("yaml")
IMAGE = "registry.example/team/trainer:1.0"


def written(tmp_path: Path, **options) -> list[dict]:
    """The objects that `launch_kubernetes` writes, secret included."""
    launched = launch_kubernetes(write_run_file(tmp_path), IMAGE, write=tmp_path / "job", **options)
    return [document for file in launched.files for document in yaml.safe_load_all(file.read_text())]


def find(objects: list[dict], kind: str) -> dict:
    return next(entry for entry in objects if entry["kind"] == kind)


def job_of(objects: list[dict]) -> dict:
    return find(objects, "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("options", [{}, {"hosts": 2, "spares": 1, "claim": "shared", "env_from": "bucket"}])
def test_core_objects_are_valid_by_the_schemas_of_kubernetes(tmp_path, kind, options):
    validate = pytest.importorskip("kubernetes_validate")
    objects = written(tmp_path, kind=kind, **options)
    core = [entry for entry in objects if entry["apiVersion"] == "v1"]
    assert {entry["kind"] for entry in core} >= {"ConfigMap", "Secret"}
    for entry in core:
        validate.validate(entry, validate.latest_version(), strict=True)
    container = find(objects, "JobSet") if kind == "jobset" else find(objects, "TrainingRuntime")["spec"]["template"]
    template = container["spec"]["replicatedJobs"][0]["template"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **{"spec": template["spec"]}}
    validate.validate(job, validate.latest_version(), strict=True)


@pytest.mark.parametrize("options", [{}, {"hosts": 2, "spares": 1, "storage_class": "fast", "env_from": "bucket"}])
def test_custom_objects_are_valid_by_the_models_of_kubeflow_trainer(tmp_path, options):
    """The models of kubeflow-trainer-api are generated from the CRDs of JobSet and Trainer. A field that they do not
    know would be lost on the way through them.
    """
    models = pytest.importorskip("kubeflow_trainer_api.models")
    classes = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    seen = set()
    for kind in ("jobset", "trainjob"):
        for entry in written(tmp_path, kind=kind, **options):
            if entry["kind"] in classes:
                seen.add(entry["kind"])
                assert classes[entry["kind"]].from_dict(entry).to_dict() == entry
    assert seen == set(classes)


def test_every_exit_code_has_its_action_in_the_pod_failure_policy(tmp_path):
    rules = job_of(written(tmp_path))["podFailurePolicy"]["rules"]

    def action(code: int) -> str:
        return next(
            (rule["action"] for rule in rules if code in rule.get("onExitCodes", {}).get("values", [])), "Count"
        )

    expected = {"fail": "FailJob", "requeue": "Ignore", "retry": "Count"}
    for entry in EXIT_CODES[1:]:
        assert action(entry.code) == expected[entry.action]
    assert rules[1]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_pods_have_hosts_and_spares_on_nodes_of_their_own(tmp_path):
    job = job_of(written(tmp_path, hosts=2, spares=1))
    assert job["completions"] == job["parallelism"] == 3
    pod = job["template"]["spec"]
    terms = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert terms[0]["labelSelector"]["matchLabels"].items() <= job["template"]["metadata"]["labels"].items()
    assert "--launch.hosts=2" in pod["containers"][0]["command"]
    assert pod["terminationGracePeriodSeconds"] > 30


def test_gpus_are_requested_unless_the_run_is_on_cpus(tmp_path):
    on_cpu = job_of(written(tmp_path))["template"]["spec"]["containers"][0]["resources"]
    assert "limits" not in on_cpu
    on_gpu = job_of(written(tmp_path, overrides=["--launch.device=cuda"]))["template"]["spec"]["containers"][0]
    assert on_gpu["resources"]["limits"] == {"nvidia.com/gpu": "2"}


def test_secret_is_private_new_each_time_and_not_printed(tmp_path, capsys):
    file = write_run_file(tmp_path)
    seen = set()
    for name in ("one", "two"):
        main(["launch", "kubernetes", str(file), "--image", IMAGE, "--write", str(tmp_path / name), "--json"])
        path = tmp_path / name / "secret.yaml"
        secret = yaml.safe_load(path.read_text())["stringData"]["secret"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        printed = capsys.readouterr().out
        assert secret not in printed
        assert json.loads(printed)["files"] == [str(tmp_path / name / "jobset.yaml"), str(path)]
        assert secret not in (tmp_path / name / "jobset.yaml").read_text()
        seen.add(secret)
    assert len(seen) == 2


def test_run_file_reaches_the_pods_unchanged(tmp_path):
    text = write_run_file(tmp_path).read_text()
    assert find(written(tmp_path), "ConfigMap")["data"]["run.toml"] == text


@pytest.mark.parametrize(
    ("option", "value"), [("namespace", "Bad Name"), ("claim", "a\nb"), ("storage", "1 Gi"), ("env_from", "x: y")]
)
def test_names_that_kubernetes_does_not_accept_are_refused(tmp_path, option, value):
    with pytest.raises(ConfigError, match="is not a name"):
        written(tmp_path, **{option: value})


def test_relative_initial_weights_are_refused(tmp_path):
    file = write_run_file(tmp_path)
    file.write_text('init_from = "weights"\n' + file.read_text())
    (tmp_path / "weights").mkdir()
    with pytest.raises(ConfigError, match="init_from is relative"):
        launch_kubernetes(file, IMAGE, write=tmp_path / "job")


def test_kubectl_that_refuses_is_reported_with_its_reason(tmp_path, monkeypatch):
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text("#!/bin/sh\necho 'no server' >&2\nexit 1\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{kubectl.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"kubectl refused the manifests in .*runs/small.launch: no server"):
        launch_kubernetes(write_run_file(tmp_path), IMAGE)


def test_yaml_keeps_every_value():
    value = {
        "plain": "text",
        "words": ["yes", "on", "null", "true", "1", "1.5", "", "a: b", "# no", "- x", "{}", "é", "\t", "a\nb"],
        "numbers": [0, 1, -1, 1.5, True, False, None],
        "empty": [{}, [], {"a": {}, "b": []}],
        "block": "first\n  second: [\n\nthird\n",
        "not a block": " leading\nlines\n",
        "nested": {"a": [{"b": [{"c": 1, "d": {"e": "f"}}]}, {"g": "h"}]},
    }
    assert yaml.safe_load(yaml_text(value)) == value


def test_probe_and_start_of_a_pod_are_quick_and_do_not_import_torch(tmp_path):
    for module in ("probe", "start_supervisor", "slurm_exit"):
        code = f"import sys, meshwright.ops.engines.{module}; assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True)
