"""Forked ranks return trained weights without /dev/shm; spawned ranks refuse weights that do not fit there."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from meshwright.core.launch import shared_weights
from meshwright.core.launch.shared_weights import share_weights
from meshwright.errors import ConfigError


def tied_model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight
    return model


def test_forked_process_changes_the_weights_of_its_parent_without_dev_shm(monkeypatch):
    """In a container /dev/shm has 64 MB, and writing beyond that ends the process with SIGBUS."""

    def full(*_args):
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "share_memory_", full)
    model = tied_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    share_weights([model, model], spawned=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[2].weight is model[0].weight
    if (child := os.fork()) == 0:
        with torch.no_grad():
            model[0].weight.fill_(3.0)
            model[1].running_mean.fill_(5.0)
        os._exit(0)
    os.waitpid(child, 0)
    assert torch.equal(model[2].weight, torch.full((7, 4), 3.0))
    assert torch.equal(model[1].running_mean, torch.full((4,), 5.0))


def test_views_of_one_storage_still_share_it():
    flat = torch.arange(6.0)
    first, second = nn.Parameter(flat[:2]), nn.Parameter(flat[2:])
    module = nn.ParameterList([first, second])
    share_weights([module], spawned=False)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert torch.equal(second, torch.arange(2.0, 6.0))


def test_weights_of_spawned_ranks_that_do_not_fit_in_dev_shm_are_refused(monkeypatch):
    monkeypatch.setattr(shared_weights, "free_shared_memory", lambda: 64_000_000)
    model = nn.Linear(5000, 5000, bias=False, device="meta").to_empty(device="cpu")
    with pytest.raises(ConfigError, match=r"need 100 MB of shared memory, and /dev/shm has 64 MB free; try docker run"):
        share_weights([model], spawned=True)
    assert not model.weight.is_shared()
