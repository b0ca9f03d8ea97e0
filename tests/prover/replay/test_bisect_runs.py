"""meshwright bisect: names the step and the parameter in which two runs part, and which run cannot be reproduced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshwright import train
from meshwright.base.checkpoint.listing import CheckpointEntry
from meshwright.base.cli import main
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import ConfigError, NumericsError
from meshwright.prover.replay import bisect as bisect_module
from meshwright.prover.replay.bisect import bisect_runs, search_checkpoints
from meshwright.prover.replay.bisect_text import describe_difference
from meshwright.prover.replay.run_difference import (
    RunDifference,
    RunDigests,
    StepDigests,
    find_first_difference,
    require_same_model,
)
from tests.kit.small_run import small_config

SAVES = ("--checkpoint.every=2", "--checkpoint.seconds=0", "--checkpoint.mode=sync", "--checkpoint.keep=9")
CHANGED = "decoder.blocks.1.ffn.up.weight"
"""The parameter of which one element of the initial weights differs."""


@contextmanager
def injected(fault: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_FAULT", fault)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run, the same with a flipped bit at step 5, and one with another weight decay."""
    folder = tmp_path_factory.mktemp("bisect")
    train(small_config(*SAVES, steps=7), run=folder / "one", quiet=True)
    with injected("step.fetch:flip@step5"):
        train(small_config(*SAVES, "--checkpoint.every=1", steps=7), run=folder / "flipped", quiet=True)
    train(small_config(*SAVES, "--optimizer.weight_decay=0.4", steps=7), run=folder / "decay", quiet=True)
    return folder


def test_bisect_of_a_run_with_itself_agrees_on_all_steps(runs, capsys):
    main(["bisect", str(runs / "one"), str(runs / "one")])
    assert capsys.readouterr().out.startswith("the runs agree on all 7 common steps\n")


def test_flipped_bit_is_found_with_its_step_and_parameter_and_the_run_is_not_reproduced(runs, capsys):
    main(["bisect", str(runs / "one"), str(runs / "flipped"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert not found["agree"]
    assert (found["equal_checkpoint"], found["different_checkpoint"], found["steps"]) == (4, 6, [4, 5])
    assert found["parameter"] == "decoder.embedding.weight"
    assert found["first"] is None
    assert found["reproduced"] == [True, False]
    assert found["settings"] == {}


def test_bisect_names_the_setting_the_step_and_the_quantity_that_differs_first(runs):
    found = bisect_runs(RunFolder(runs / "one"), RunFolder(runs / "decay"))
    assert found.settings == {"optimizer.weight_decay": (0.1, 0.4)}
    assert found.first is not None
    assert (found.step, found.first.quantity, found.parameter) == (0, "update", "decoder.embedding.weight")
    assert found.recorded_step == 1
    assert found.reproduced == (True, True)
    assert found.elements > 0
    assert 0 < found.relative < 1
    text = describe_difference(found, ("one", "decay"))
    assert text.startswith("the runs part at step 0: gradients are equal, and the update differs\n")


@pytest.mark.long
def test_bisect_names_the_one_initial_parameter_that_differs(runs, tmp_path, capsys):
    main(["checkpoint", "export", str(runs / "one"), "--to", str(tmp_path / "a"), "--format", "safetensors"])
    capsys.readouterr()
    (file,) = (tmp_path / "a").glob("*.safetensors")
    tensors = load_file(file)
    tensors[CHANGED][3, 4] += 0.25  # the new file is without the digests of the export
    (tmp_path / "b").mkdir()
    save_file(tensors, tmp_path / "b" / file.name)
    for name in ("a", "b"):
        config = replace(small_config("--checkpoint.mode=off", steps=3), init_from=str(tmp_path / name))
        train(config, run=tmp_path / f"run-{name}", quiet=True)
    found = bisect_runs(RunFolder(tmp_path / "run-a"), RunFolder(tmp_path / "run-b"))
    assert found.first is not None
    assert (found.first.quantity, found.step, found.parameter, found.elements) == ("state", 0, CHANGED, 1)
    assert found.largest == pytest.approx(0.25)


@pytest.mark.long
def test_bisect_of_runs_that_end_with_values_that_are_not_finite(tmp_path):
    for name, rate in (("a", "1e14"), ("b", "1e15")):
        settings = (*SAVES, f"--optimizer.lr={rate}", "--schedule.kind=constant", "--schedule.warmup=0")
        with pytest.raises(NumericsError):
            train(small_config(*settings, "--optimizer.clip=0", steps=3), run=tmp_path / name, quiet=True)
    found = bisect_runs(RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b"))
    assert found.first is not None
    assert (found.step, found.first.quantity, found.reproduced) == (0, "update", (True, True))


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        ("--layout.shard=parameters",),
        ("--layout.tensor=2", "--layout.replicate=1"),
        ("--layout.pipeline=2", "--layout.replicate=1", "--batch.micro=4"),
    ],
)
def test_bisect_of_runs_on_other_layouts_finds_the_update(layout, tmp_path):
    for name, decay in (("a", 0.1), ("b", 0.4)):
        settings = (*SAVES, *layout, f"--optimizer.weight_decay={decay}")
        train(small_config(*settings, steps=3, ranks=None), run=tmp_path / name, quiet=True)
    found = bisect_runs(RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b"))
    assert found.first is not None
    assert (found.step, found.first.quantity, found.reproduced) == (0, "update", (True, True))


def test_runs_of_different_models_are_rejected():
    with pytest.raises(ConfigError, match=r"different models: model.layers was 2 and is 3; expected two runs of one"):
        require_same_model({"model.layers": 2, "seed": 0}, {"model.layers": 3, "seed": 1})
    require_same_model({"model.layers": 2, "optimizer.lr": 0}, {"model.layers": 2, "optimizer.lr": 1})


def digests(parameters: dict[int, str], steps: dict[int, StepDigests]) -> RunDigests:
    named = {done: {"a": text[0], "b": text[1]} for done, text in parameters.items()}
    return RunDigests(named, steps, {})


def step_digests(samples: str = "s", loss: float = 1.0, gradients: str = "gg") -> StepDigests:
    return StepDigests(tuple(samples), loss, {"a": gradients[0], "b": gradients[1]})


BASE = digests({3: "pp", 4: "qq", 5: "rr"}, {3: step_digests(), 4: step_digests()})


@pytest.mark.parametrize(
    ("other", "quantity", "step", "parameter"),
    [
        (digests({3: "pX", 4: "qX", 5: "rX"}, {3: step_digests(), 4: step_digests()}), "state", 3, "b"),
        (digests({3: "pp", 4: "qq", 5: "XX"}, {3: step_digests(), 4: step_digests("t", 2, "XX")}), "samples", 4, "a"),
        (digests({3: "pp", 4: "XX", 5: "XX"}, {3: step_digests(loss=2.0, gradients="gX")}), "forward", 3, "b"),
        (
            digests({3: "pp", 4: "qq", 5: "XX"}, {3: step_digests(), 4: step_digests(gradients="gX")}),
            "gradient",
            4,
            "b",
        ),
        (digests({3: "pp", 4: "qX", 5: "rX"}, {3: step_digests(), 4: step_digests()}), "update", 3, "b"),
    ],
)
def test_first_difference_follows_the_order_of_computation(other, quantity, step, parameter):
    found = find_first_difference(BASE, other)
    assert found is not None
    assert (found.quantity, found.step, found.parameter) == (quantity, step, parameter)
    assert find_first_difference(BASE, BASE) is None


def test_replays_that_begin_at_different_steps_are_compared_from_the_later_one():
    later = digests({4: "qq", 5: "rX"}, {4: step_digests()})
    found = find_first_difference(BASE, later)
    assert found is not None
    assert (found.quantity, found.step, found.parameter) == ("update", 4, "b")


def test_common_checkpoints_are_searched_in_logarithmic_time(monkeypatch):
    compared = []
    monkeypatch.setattr(bisect_module, "find_damage", lambda _entry: [])

    def compare(one: CheckpointEntry, _other: CheckpointEntry) -> Iterator[str]:
        compared.append(one.step)
        yield from ["a tensor"] if one.step >= 700 else []

    monkeypatch.setattr(bisect_module, "compare_checkpoints", compare)
    pairs = [(entry(step), entry(step)) for step in range(0, 1000, 10)]
    equal, different = search_checkpoints(pairs)
    assert equal is not None
    assert different is not None
    assert (equal[0].step, different[0].step) == (690, 700)
    assert len(compared) <= 7


def entry(step: int) -> CheckpointEntry:
    return CheckpointEntry(None, f"checkpoints/step-{step:08d}.a0001", step, 1, None)  # type: ignore[arg-type]


def test_difference_between_two_checkpoints_is_a_range_of_steps():
    difference = RunDifference(9, {}, recorded_step=8, equal_checkpoint=4, different_checkpoint=8)
    assert (difference.steps, difference.step) == ((4, 7), None)
    assert describe_difference(difference, ("a", "b")).startswith("the runs part between steps 4 and 7")
    exact = RunDifference(9, {}, recorded_step=8, equal_checkpoint=7, different_checkpoint=8)
    assert exact.step == 7


def test_compared_files_count_elements_and_the_largest_difference(tmp_path):
    a = np.array([1.0, -4.0, np.nan, 2.0], dtype=np.float32)
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", a + np.array([0.5, 0, 0, 1], dtype=np.float32))
    assert bisect_module.compare_files(tmp_path / "a.npy", tmp_path / "b.npy") == (2, 1.0, 0.25)
