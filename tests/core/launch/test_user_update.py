"""An optimizer and a schedule of the user's: what `train` records of them, and what it refuses before ranks start."""

from __future__ import annotations

import sys

import pytest
import torch

from meshwright import train
from meshwright.base.config import load_config
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.topology.layout import Layout
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.launch.user_code import update as update_module
from meshwright.core.launch.user_code.update import examine_or_error, open_user_update
from meshwright.errors import ConfigError, IdentityError
from tests.kit.small_run import small_config


def rmsprop(groups):
    return torch.optim.RMSprop(groups, alpha=0.9)


def other_rmsprop(groups):
    return torch.optim.RMSprop(groups, alpha=0.8)


def halving(step, steps):
    return 0.5 ** (step / steps)


class LARS(torch.optim.SGD):
    """Scales each update by the norm of its parameter."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(p.detach().norm() / p.grad.norm())
        return super().step()


@pytest.fixture
def in_this_process(monkeypatch):
    """Examines optimizers without a process of their own."""
    monkeypatch.setattr(
        update_module, "run_ranks", lambda function, ranks, *args: [examine_or_error(None, *args)] * ranks
    )


def opened(layout=None, **code):
    return open_user_update(small_config(), UserCode(**code), layout or Layout())


def test_config_records_the_optimizer_and_the_schedule(in_this_process):
    config, update = opened(optimizer=rmsprop, schedule=halving)
    assert (config.optimizer.kind, config.optimizer.state) == ("custom", "step:scalar square_avg")
    assert config.optimizer.factory.endswith(".rmsprop")
    assert (config.schedule.kind, config.schedule.function.rpartition(".")[2]) == ("custom", "halving")
    assert any(name.endswith("rmsprop") for name in update.code["parts"])


def test_changed_code_of_a_factory_changes_its_fingerprint(in_this_process):
    _, one = opened(optimizer=rmsprop)
    _, other = opened(optimizer=other_rmsprop)
    assert one.code["fingerprint"] != other.code["fingerprint"]


def test_optimizer_that_is_not_elementwise_trains_on_replicas_alone(in_this_process):
    opened(Layout(replicate=2), optimizer=LARS)
    for layout in (Layout(shard=2), Layout(tensor=2), Layout(pipeline=2)):
        with pytest.raises(ConfigError, match="LARS is not elementwise") as error:
            opened(layout, optimizer=LARS)
        assert "layout.shard = none" in error.value.hint


def test_exception_in_a_factory_is_reported_with_its_name(in_this_process):
    with pytest.raises(ConfigError, match=r"the optimizer .*LBFGS raised"):
        opened(optimizer=torch.optim.LBFGS)


def test_config_of_a_run_with_an_own_optimizer_needs_it():
    config = load_config(overrides=["--optimizer.kind=custom", "--optimizer.factory=mine.rms"])
    with pytest.raises(ConfigError, match=r"mine.rms.*no optimizer is given"):
        open_user_update(config, UserCode(), Layout())


@pytest.mark.parametrize("argument", ["optimizer", "schedule"])
def test_run_file_cannot_name_code(argument, tmp_path):
    (tmp_path / "run.toml").write_text(f'{argument} = "{__name__}:rmsprop"\n')
    with pytest.raises(ConfigError, match="never imported from a run file"):
        load_config(tmp_path / "run.toml")


def test_run_with_own_optimizer_and_schedule_is_extended_on_another_layout_and_refused_with_another_kind(tmp_path):
    run, options = tmp_path / "run", {"optimizer": rmsprop, "schedule": halving, "quiet": True}
    config = small_config("--layout.shard=parameters", "--optimizer.groups=[{pattern='*norm*',frozen=true}]", steps=3)
    train(config, run=run, **options)
    longer = small_config("--optimizer.groups=[{pattern='*norm*',frozen=true}]", ranks=1, steps=5)
    assert train(longer, run=run, **options).steps == 5
    [extended] = [event for event in read_events(RunFolder(run).events(0)) if event["kind"] == "extended"]
    assert extended["lr_before"] == config.optimizer.lr * halving(3, 3)
    assert extended["lr"] == config.optimizer.lr * halving(3, 5)
    with pytest.raises(IdentityError, match=r"optimizer\.kind was 'custom' and is 'adamw'"):
        train(longer, run=run, quiet=True)
    assert "rmsprop" in (run / "identity.json").read_text()
    assert sys.modules[__name__].__name__ in (run / "run.toml").read_text()
