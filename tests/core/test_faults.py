"""Fault injection: parsing, arming by rank, step and restart, and reproducible probabilities."""

from __future__ import annotations

import pytest

from meshwright.core import faults
from meshwright.core.faults import ACTIONS, FAIL_POINTS, REQUIRED_POINT, Fault, InjectedFault
from meshwright.errors import ConfigError


@pytest.fixture(autouse=True)
def disarmed():
    yield
    faults.ARMED_FAULTS.clear()


def arm(text, rank=0, restart=0, seed="0"):
    faults.arm(rank, restart, {"MESHWRIGHT_FAULT": text, "MESHWRIGHT_FAULT_SEED": seed})


def test_fault_parse():
    assert Fault.parse("save.after_shard:rank1:kill@step20") == Fault("save.after_shard", "kill", 1, 20)
    assert Fault.parse("step.forward:slow=0.5@25%x3") == Fault("step.forward", "slow", chance=25.0, value=0.5, times=3)
    assert Fault.parse("end:raise#4") == Fault("end", "raise", restart=4)
    assert Fault.parse("save.begin:kill@step7+#2") == Fault("save.begin", "kill", step=7, restart=2, later=True)


@pytest.mark.parametrize(
    "text", ["", " , ", "step.forwards:kill", "step.forward:explode", "step.forward", "kill@step20", "a b", ":::"]
)
def test_misspelled_fault_is_refused_with_the_expected_values(text):
    if not text.strip(" ,"):
        assert faults.parse_faults(text) == []
        return
    with pytest.raises(ConfigError, match="expected "):
        faults.parse_faults(text)


def test_fail_points_do_nothing_by_default():
    arm("")
    assert all(faults.fail_point(point, 3) == "" for point in FAIL_POINTS)


def test_fault_applies_to_its_rank_step_and_attempt_only():
    for rank, restart, step, applies in [(1, 0, 5, True), (0, 0, 5, False), (1, 1, 5, False), (1, 0, 6, False)]:
        arm("step.update:rank1:raise@step5", rank, restart)
        if applies:
            with pytest.raises(InjectedFault, match=r"injected at step.update, rank 1, step 5"):
                faults.fail_point("step.update", step)
        else:
            assert faults.fail_point("step.update", step) == ""


def test_step_with_a_plus_applies_to_later_steps_too():
    assert [Fault.parse("evaluate:kill@step5+").applies_to(step) for step in (4, 5, 6)] == [False, True, True]
    assert [Fault.parse("evaluate:kill@step5").applies_to(step) for step in (4, 5, 6)] == [False, True, False]


def test_every_selects_the_steps_that_it_divides():
    fault = Fault.parse("step.update:rank1:slow=0.2@every4")
    assert fault == Fault("step.update", "slow", 1, value=0.2, every=4)
    assert [step for step in range(10) if fault.applies_to(step)] == [0, 4, 8]
    with pytest.raises(ConfigError, match="cannot be parsed"):
        Fault.parse("step.update:slow=0.2@every0")


def test_times_and_restart_select_the_attempts():
    assert [Fault.parse("end:killx3").is_armed(0, restart) for restart in range(5)] == [True, True, True, False, False]
    assert [Fault.parse("end:kill#2").is_armed(0, restart) for restart in range(4)] == [False, False, True, False]


def test_probability_is_drawn_from_the_seed():
    def flipped(seed):
        arm("step.fetch:flip@30%", seed=seed)
        return [faults.fail_point("step.fetch", step) == "flip" for step in range(2000)]

    assert flipped("1") == flipped("1") != flipped("2")
    assert 500 < sum(flipped("1")) < 700


def test_actions_that_do_not_end_the_process():
    for action, error in {"raise": InjectedFault, "oom": MemoryError, "enospc": OSError, "eio": OSError}.items():
        arm(f"end:{action}")
        with pytest.raises(error):
            faults.fail_point("end", 0)
    for action, point in REQUIRED_POINT.items():
        arm(f"{point}:{action}")
        assert faults.fail_point(point, 0) == action
        with pytest.raises(ConfigError, match=f"expected the point {point}"):
            faults.parse_faults(f"end:{action}")
    assert set(ACTIONS) >= {"kill", "exit", "term", "stop", "hang", "spin", "lock", "slow"}
