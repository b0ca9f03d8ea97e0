"""Published policies: complete or absent, verified by digest, of any layout, loaded into the model of a generator."""

from __future__ import annotations

import copy
import os
import signal

import pytest
import torch

from meshwright.base.checkpoint.listing import RunLineage, checkpoint_folder
from meshwright.base.store.posix import PosixStore
from meshwright.base.topology.layout import Layout
from meshwright.core import faults
from meshwright.core.checkpoint.state import collect_state, parameters_digest
from meshwright.core.parallel.world import World
from meshwright.errors import CheckpointError
from meshwright.rl.generator.policy_model import ModulePolicy
from meshwright.rl.policies import DamagedPolicy, PolicyPublisher, PolicyStore, PolicyUnavailable
from meshwright.rl.version import PolicyVersion
from meshwright.testing import run_ranks
from tests.kit.small_policies import family_policy

LINEAGE = RunLineage("0123abcd", 1, {})
FIELDS = {"layout": {"replicate": 1}, "identity": {"seed": 0}, "made_by": {"torch": "2"}}
SAVE_POINTS = [point for point in faults.FAIL_POINTS if point.startswith("save.")]


def publisher_of(module: torch.nn.Module, folder, attempt: int = 1, prefix: str = "", world=None) -> PolicyPublisher:
    state = {
        name.replace("/", f"/{prefix}", 1): tensor
        for name, tensor in collect_state(module, dict(module.named_parameters()), {}).items()
    }
    return PolicyPublisher(PosixStore(folder), world or World(), LINEAGE, attempt, FIELDS, lambda: state)


def publish(module: torch.nn.Module, folder, *versions: PolicyVersion, **options) -> list[str]:
    publisher = publisher_of(module, folder, **options)
    try:
        return [publisher.publish(version) for version in versions]
    finally:
        publisher.close()


def open_policies(folder) -> PolicyStore:
    return PolicyStore(PosixStore(folder), LINEAGE.run)


def weights_digest(module: torch.nn.Module) -> str:
    return parameters_digest(module.named_parameters())


V0, V1, V2 = PolicyVersion(1, 0), PolicyVersion(1, 1), PolicyVersion(2, 1)


def test_loaded_policy_has_the_bits_and_the_digest_of_the_published_one(tmp_path):
    published, target = family_policy(seed=1), family_policy(seed=2)
    (digest,) = publish(published.module, tmp_path, V1)
    assert open_policies(tmp_path).load(V1, target, digest) == digest
    assert weights_digest(target.module) == weights_digest(published.module)
    assert open_policies(tmp_path).versions() == [V1]


def test_policy_of_a_user_module_is_loaded_by_the_names_of_the_module(tmp_path):
    module = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 7))
    target = ModulePolicy(copy.deepcopy(module))
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor += 1
    publish(module, tmp_path, V1, prefix="model.")
    open_policies(tmp_path).load(V1, target)
    expected = module.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in target.module.state_dict().items())


def test_version_that_is_not_published_is_unavailable(tmp_path):
    publish(family_policy().module, tmp_path, V1)
    with pytest.raises(PolicyUnavailable, match=r"policy 2\.1 is not published"):
        open_policies(tmp_path).load(V2, family_policy())


def test_policy_with_another_digest_is_refused(tmp_path):
    (digest,) = publish(family_policy().module, tmp_path, V1)
    with pytest.raises(DamagedPolicy, match=f"has digest {digest}, expected {'0' * 32}"):
        open_policies(tmp_path).load(V1, family_policy(), "0" * 32)


def test_damaged_policy_is_refused_with_its_file(tmp_path):
    publish(family_policy().module, tmp_path, V1)
    folder = tmp_path / checkpoint_folder(1, 1)
    shard = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DamagedPolicy, match=rf"policy 1\.1 is damaged: {shard.name}.*expected.*found"):
        open_policies(tmp_path).load(V1, family_policy())


def test_policy_of_another_run_is_refused(tmp_path):
    publish(family_policy().module, tmp_path, V1)
    with pytest.raises(DamagedPolicy, match="belongs to run 0123abcd, expected run other"):
        PolicyStore(PosixStore(tmp_path), "other").load(V1, family_policy())


def test_policy_of_another_model_is_refused(tmp_path):
    publish(torch.nn.Linear(3, 2), tmp_path, V1)
    with pytest.raises(DamagedPolicy, match="does not fit the model: it has bias, which the model does not have"):
        open_policies(tmp_path).load(V1, family_policy())


def test_version_is_published_once(tmp_path):
    """A learner that resumes from the checkpoint of a step publishes its version again, and the first one stays."""
    first = publish(family_policy().module, tmp_path, V1)
    assert publish(family_policy().module, tmp_path, V1, attempt=2) == first


def test_retention_keeps_needed_and_later_versions(tmp_path):
    publish(family_policy().module, tmp_path, V0, V1, V2, PolicyVersion(2, 2))
    store = open_policies(tmp_path)
    assert store.remove_except([]) == []
    assert store.remove_except([V0, V2]) == [V1]
    assert store.versions() == [V0, V2, PolicyVersion(2, 2)]
    assert not (tmp_path / checkpoint_folder(1, 1)).exists()
    with pytest.raises(PolicyUnavailable):
        store.load(V1, family_policy())


@pytest.mark.parametrize("point", SAVE_POINTS)
def test_publication_that_is_killed_is_complete_or_absent(tmp_path, point):
    """Killed at every fail point of a save; the next attempt publishes the version."""
    module = family_policy(seed=3).module
    publish(module, tmp_path, V0)
    if not (child := os.fork()):
        try:
            faults.ARMED_FAULTS[:] = faults.parse_faults(f"{point}:kill@step1")
            publish(module, tmp_path, V1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    store, target = open_policies(tmp_path), family_policy(seed=4)
    if point == "save.after_publish":
        store.load(V1, target)
    else:
        assert store.versions() == [V0]
        with pytest.raises(PolicyUnavailable):
            store.load(V1, target)
    publish(module, tmp_path, V1, attempt=2)
    store.load(V1, target)
    assert weights_digest(target.module) == weights_digest(module)


def test_failed_publication_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "ARMED_FAULTS", faults.parse_faults("save.write:enospc@step1"))
    with pytest.raises(CheckpointError, match="No space left on device"):
        publish(family_policy().module, tmp_path, V1)
    assert open_policies(tmp_path).versions() == []


def publish_sharded(world: World, folder: str) -> str:
    """An FSDP model over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = family_policy(seed=5).module
    fully_shard(module, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    state = collect_state(module, dict(module.named_parameters()), {})
    publisher = PolicyPublisher(PosixStore(folder), world, LINEAGE, 1, FIELDS, lambda: state, Layout(shard=2))
    digest = publisher.publish(V1)
    assert publisher.publish(V1) == digest
    publisher.close()
    return digest


def test_policy_of_a_sharded_learner_is_loaded_whole(tmp_path):
    digest, other = run_ranks(publish_sharded, 2, str(tmp_path))
    assert other == ""
    target = family_policy(seed=6)
    open_policies(tmp_path).load(V1, target, digest)
    assert weights_digest(target.module) == weights_digest(family_policy(seed=5).module)
