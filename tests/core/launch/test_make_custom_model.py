"""What verbs do with a user's model before they use it: when its code is compared, and when its first batch runs."""

from __future__ import annotations

import pytest
from torch import nn

from meshwright import plan, report, simulate
from meshwright.base.config import load_config
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.launch.job import make_job
from meshwright.core.launch.user_code import make_custom_model
from meshwright.core.launch.user_code.make_custom_model import open_model_with_values
from meshwright.core.parallel.parallel_spec import ParallelSpec
from meshwright.errors import IdentityError
from tests.kit.custom_model import Points, custom_config, custom_model, run_custom, summed_cross_entropy

GIVEN = {"loss": summed_cross_entropy, "source": Points()}


def zeros(name, tensor):
    tensor.zero_()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run_custom(folder, custom_config(1, ranks=1))
    return folder


@pytest.fixture
def no_first_batch(monkeypatch):
    def fail(*_args):
        raise AssertionError("the first batch was run")

    monkeypatch.setattr(make_custom_model, "prepare_custom_model", fail)


def test_config_of_one_run_trains_other_code_in_another_folder(trained, tmp_path):
    config, other = load_config(trained), UserCode(nn.Linear(4, 3), **GIVEN)
    job = make_job(config, RunFolder(tmp_path / "b"), other)
    assert job.config.custom_model.class_ == "torch.nn.modules.linear.Linear"
    with pytest.raises(IdentityError, match="the config is of a run of the model"):
        simulate(config, model=nn.Linear(4, 3), **GIVEN)


def test_report_takes_a_spec_and_compares_the_code_without_the_first_batch(trained, no_first_batch):
    found = report(trained, model=custom_model(), parallel_spec=ParallelSpec(), **GIVEN)
    assert "custom model" in found.notes[0]
    with pytest.raises(IdentityError, match="is not that of the run of the config"):
        report(trained, model=custom_model(), init=zeros, **GIVEN)


def test_plan_and_simulate_take_the_init_of_a_model_on_the_meta_device(no_first_batch):
    config, model = custom_config(1, ranks=1), nn.Linear(4, 3, device="meta")
    assert simulate(config, model=model, init=zeros, **GIVEN).results
    assert plan(config, "h100:1", model=model, init=zeros, **GIVEN).chosen


def test_prove_leaves_the_first_batch_to_its_own_claim(no_first_batch):
    user = UserCode(nn.Linear(4, 3), nn.functional.cross_entropy, Points())
    assert open_model_with_values(custom_config(1, ranks=1), user).custom.batch is not None
