"""meshwright replay: a replayed step is bitwise that of the record, and names the sample that spikes the loss."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from meshwright import train
from meshwright.base.cli import main
from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.user_code.user_code import UserCode
from meshwright.errors import ConfigError, NumericsError
from meshwright.prover.replay.records import RunRecords
from meshwright.prover.replay.replay import replay_step
from meshwright.prover.replay.replay_text import compare_text, describe_replay
from meshwright.prover.replay.start import ReplaySource
from meshwright.prover.replay.step_detail import SampleDetail, StepReplay, find_culprit
from tests.kit.small_run import small_config

SAVES = ("--checkpoint.every=4", "--checkpoint.seconds=0", "--checkpoint.mode=sync", "--checkpoint.keep=2")
POISON = 60
"""The sample that is unlike all others."""


def folder_state(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def poisoned_run(tmp_path_factory):
    """A run on 128 samples of one byte, of which one has random bytes; the checkpoint of step 8 is left."""
    folder = tmp_path_factory.mktemp("poisoned")
    text = bytearray(b"ab" * 16 * 128)
    text[POISON * 16 : POISON * 16 + 17] = bytes((37 * i + 11) % 256 for i in range(17))
    (folder / "text.txt").write_bytes(bytes(text))
    config = small_config(
        *SAVES, "--data.kind=text", f"--data.path={folder / 'text.txt'}", "--data.end_of_document=none", steps=10
    )
    train(replace(config, eval=replace(config.eval, holdout=0.0)), run=folder / "run", quiet=True)
    return folder / "run"


def step_of_poison(run: Path, capsys) -> int:
    main(["data", "find", str(run), "--sample", str(POISON), "--json"])
    return json.loads(capsys.readouterr().out)["occurrences"][0]["step"]


def test_replay_names_the_poisoned_sample_and_is_bitwise_equal_to_the_record(poisoned_run, capsys):
    step, before = step_of_poison(poisoned_run, capsys), folder_state(poisoned_run)
    main(["replay", str(poisoned_run), "--step", str(step), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["equals_record"]
    assert shown["culprit"]["sample"] == POISON
    assert len(shown["samples"]) == 16
    assert sum(sample["text"].startswith("abab") for sample in shown["samples"]) == 15
    assert {row["layer"] for row in shown["layers"]} >= {"decoder.embedding", "decoder.blocks.0", "decoder.blocks.1"}
    assert [module["name"] for module in shown["modules"] if module["block"]] == [
        "decoder.blocks.0",
        "decoder.blocks.1",
    ]
    norm = sum(row["gradient_norm"] ** 2 for row in shown["layers"]) ** 0.5
    assert norm == pytest.approx(shown["record"]["grad_norm"], rel=1e-5)  # float32
    assert folder_state(poisoned_run) == before


def test_replay_of_a_step_without_the_poisoned_sample_blames_no_sample(poisoned_run, capsys):
    step = 9 if step_of_poison(poisoned_run, capsys) != 9 else 8
    replay = replay_step(RunFolder(poisoned_run), step)
    assert replay.checkpoint.startswith("step-00000008")
    assert replay.equals_record
    assert replay.culprit is None
    on_one_rank = replay_step(RunFolder(poisoned_run), step, ranks=1)
    assert on_one_rank.loss == pytest.approx(replay.loss)
    assert "recorded on the layout replicate 2" in on_one_rank.notes[0]
    text = describe_replay(replay, "RUN")
    assert "bitwise equal to the record" in text
    assert "no sample stands out" in text


def test_replay_rejects_a_step_that_the_run_does_not_have(poisoned_run):
    with pytest.raises(ConfigError, match="the run has steps 0 to 9"):
        replay_step(RunFolder(poisoned_run), 10)
    with pytest.raises(ConfigError, match=r"the settings of its run: optimizer\.lr was 0\.003 and is 1"):
        replay_step(RunFolder(poisoned_run), 9, overrides=["optimizer.lr=1"])


def test_replay_leaves_nothing_behind_after_ctrl_c(poisoned_run, tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    code = (
        "import time, meshwright.prover.replay.replay as r; from meshwright.base.cli import main\n"
        "r.sample_losses = lambda *_: (print('ready\\n', end='', flush=True), time.sleep(60))\n"
        f"main(['replay', {str(poisoned_run)!r}, '--step', '9'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert list(tmp_path.iterdir())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_replay_of_an_extended_and_of_a_forked_run_has_the_settings_of_the_step(tmp_path):
    run, folder = tmp_path / "run", RunFolder(tmp_path / "run")
    train(small_config(*SAVES, steps=6), run=run, quiet=True)
    train(small_config(*SAVES, steps=8), run=run, quiet=True)
    assert replay_step(folder, 5).equals_record  # its learning rate is that of a run of 6 steps
    assert replay_step(folder, 7).equals_record
    train(small_config(*SAVES, "--optimizer.lr=0.01", steps=10), run=run, fork=True, quiet=True)
    with pytest.raises(ConfigError, match="earlier steps had the settings before the fork at step 8"):
        replay_step(folder, 5)
    assert replay_step(folder, 9).equals_record


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        ((), "cpu", "NOT equal to the record, from step 3 on; in this step loss 2.0 (recorded 2.5)"),
        ((), "NVIDIA H100", "the run did not use deterministic algorithms (precision.deterministic)"),
        (("--precision.deterministic=true",), "NVIDIA H100", "NOT equal to the record"),
    ],
)
def test_replay_that_differs_tells_a_run_without_deterministic_algorithms(tmp_path, settings, device, expected):
    events = [{"kind": "start", "device": device}, {"kind": "step", "step": 3, "loss": 2.5, "seconds": 0.1}]
    head = {"attempt": 1, "rank": 0, "time": 1.0}
    lines = [json.dumps(event | head, separators=(",", ":")) + "\n" for event in events]
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank-00000.jsonl").write_text("".join(lines))
    folder = RunFolder(tmp_path)
    source = ReplaySource(folder, small_config(*settings), {}, RunRecords(RunHistory(folder)))
    numbers = (2.0, 1.0, 0.1, 8, None, False)
    differences = {"loss": (2.0, 2.5)}
    replay = StepReplay(3, "", 3, "replicate 2", *numbers, source.records.steps[3], differences, 3, [], [], [])
    assert expected in compare_text(replace(replay, deterministic=source.is_deterministic(3)))


def test_replay_of_a_step_that_is_not_finite_names_the_module_and_goes_on(tmp_path):
    settings = ("--checkpoint.mode=off", "--optimizer.lr=1e30", "--optimizer.clip=0", "--schedule.kind=constant")
    with pytest.raises(NumericsError):
        train(small_config(*settings, "--schedule.warmup=0", "--launch.restarts=0"), run=tmp_path / "run", quiet=True)
    replay = replay_step(RunFolder(tmp_path / "run"), 1)
    assert replay.equals_record
    assert replay.skipped
    assert replay.first_nonfinite
    assert f"not finite first in {replay.first_nonfinite}" in describe_replay(replay, "RUN")


def test_replay_of_a_custom_model_uses_the_names_of_the_model(tmp_path):
    user = UserCode(model=tiny_model, loss=squared_error, source=SOURCE)
    config = small_config("--checkpoint.mode=off", steps=3)
    train(config, model=tiny_model, loss=squared_error, source=SOURCE, run=tmp_path / "run", quiet=True)
    replay = replay_step(RunFolder(tmp_path / "run"), 2, user=user)
    assert replay.equals_record
    assert [parameter.name for parameter in replay.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {"0", "1", "2"} <= {module.name for module in replay.modules}
    largest = next(sample for sample in replay.samples if sample.sample == max(s.sample for s in replay.samples))
    value = largest.index / 64
    assert largest.text == f"entry 0: shape 4, from {value:.4g} to {value:.4g}; entry 1: {2 * value:.4g}"


def tiny_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).sum()


SOURCE = [(np.full(4, index / 64, np.float32), np.array([index / 32], np.float32)) for index in range(64)]


def sample(number: int, loss: float) -> SampleDetail:
    return SampleDetail(number, "source", number, loss, 16)


@pytest.mark.parametrize(
    ("losses", "culprit"),
    [
        ([5.0, 5.1, 4.9, 5.05, 9.0], 4),
        ([5.0, 5.1, 4.9, 5.05, 5.3], None),
        ([5.0, 5.1, float("nan"), 5.05, 5.3], 2),
        ([5.0, 5.1, 4.9, 5.0, 5.1, 9.0, 9.1], None),  # two of them
        ([1.0, 9.0], None),  # too few for a median
    ],
)
def test_culprit_is_the_one_sample_whose_loss_stands_out(losses, culprit):
    found = find_culprit([sample(number, loss) for number, loss in enumerate(losses)])
    assert (found.sample if found is not None else None) == culprit


LAYOUTS = {
    "fsdp": ("--layout.shard=parameters",),
    "tensor": ("--layout.tensor=2",),
    "context": ("--layout.context=2",),
    "pipeline": ("--layout.pipeline=2", "--batch.micro=4"),
    "fp16": ("--precision.compute=fp16",),
    "selective": ("--activation_checkpoint.mode=selective",),
    "experts": ("--model.experts=4", "--model.experts_active=2"),
}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replay_is_bitwise_equal_to_the_record_on_every_axis(layout, tmp_path):
    ranks = 2 if layout in ("fsdp", "fp16", "selective", "experts") else None
    train(small_config(*SAVES, *LAYOUTS[layout], ranks=ranks), run=tmp_path / "run", quiet=True)
    replay = replay_step(RunFolder(tmp_path / "run"), 5)
    assert replay.checkpoint.startswith("step-00000004")
    assert replay.equals_record
    mean = sum(s.loss * s.targets for s in replay.samples) / sum(s.targets for s in replay.samples)
    assert mean == pytest.approx(replay.loss, rel=1e-3)
    assert replay.parameters
