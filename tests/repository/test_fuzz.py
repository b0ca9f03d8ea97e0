"""The fuzzer: its episodes run, are derived from the seed, and report what differs from the expectation."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fuzz.configs import draw_config, is_supported, on_one_rank, parse, with_layout, with_placement
from fuzz.jobs import Ended
from fuzz.kinds import KINDS, draw_kind
from fuzz.mutations import mutate_json, mutate_toml
from fuzz.oracle import Finding, Outcome, check_close, check_ended, check_same, check_temporary_folder, tree_digest
from meshwright.base.config import identity

ROOT = Path(__file__).parents[2]
UNDISTURBED = Outcome({0: 5.5, 1: 5.25}, "b60d86dc6d4d599c", "0123456789abcdef")
WRONG_DIGEST = """
from dataclasses import replace
from fuzz.__main__ import main
from fuzz.episode import Episode
reference = Episode.reference
def with_wrong_digest(episode, tree):
    known = reference(episode, tree)
    return replace(known, outcome=replace(known.outcome, parameters="f" * 16))
Episode.reference = with_wrong_digest
raise SystemExit(main(["--seed=358", "--episodes=1", "--only=fault", "--workers=1"]))
"""

FAILING_WORKERS = """
import os
from fuzz import __main__
def run_episode(seed, number, *_):
    if number == 0:
        raise OSError("no space left")
    os.kill(os.getpid(), 9)
__main__.run_episode = run_episode
raise SystemExit(__main__.main(["--seed=358", "--episodes=9", "--workers=2"]))
"""


def run(*args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TMPDIR": str(folder)}
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.long
def test_episodes_run_and_leave_nothing_behind(tmp_path):
    ended = run("-m", "fuzz", "--seed=358", "--episodes=4", folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "seed 358: 4 episodes" in ended.stdout
    assert "0 findings" in ended.stdout
    assert not list(tmp_path.glob("meshwright-*"))


def test_wrong_digest_is_a_finding_with_its_reproduction(tmp_path):
    ended = run("-c", WRONG_DIGEST, folder=tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert f"expected: parameters {'f' * 16}" in ended.stdout
    assert "python -m meshwright train" in ended.stdout
    assert "python -m fuzz --replay 358:0 --only fault" in ended.stdout
    assert list(tmp_path.glob("*/episode-0/run"))


def test_worker_that_fails_is_a_finding(tmp_path):
    ended = run("-c", FAILING_WORKERS, folder=tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "OSError: no space left" in ended.stderr
    assert "found:    exit code 1" in ended.stdout
    assert "found:    signal 9" in ended.stdout
    assert "2 findings" in ended.stdout


@pytest.mark.parametrize(
    "found",
    [
        replace(UNDISTURBED, parameters="b60d86dc6d4d599d"),
        replace(UNDISTURBED, state="another"),
        replace(UNDISTURBED, losses={0: 5.5, 1: 5.25 + 1e-15}),
        replace(UNDISTURBED, losses={0: 5.5}),
    ],
)
def test_state_loss_or_missing_step_that_differs_is_a_finding(found):
    check_same(UNDISTURBED, UNDISTURBED)
    with pytest.raises(Finding):
        check_same(found, UNDISTURBED)


def test_losses_of_another_layout_may_differ_by_rounding_only():
    check_close({0: 5.5 * (1 + 1e-12)}, {0: 5.5})
    with pytest.raises(Finding, match="of one rank at step 0"):
        check_close({0: 5.5 * (1 + 1e-8)}, {0: 5.5})


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (Ended(1, "meshwright: no", 0.1, 0), "exit code 0"),
        (Ended(0, 'Traceback (most recent call last):\n  File "x"', 0.1, 0), "no traceback"),
        (Ended(-6, "Fatal Python error: Aborted", 60.0, 0, timed_out=True), "within the time limit"),
    ],
)
def test_undocumented_exit_code_traceback_or_hang_is_a_finding(ended, expected):
    with pytest.raises(Finding, match=expected):
        check_ended(ended, (0,))


def test_temporary_folder_that_remains_is_a_finding(tmp_path):
    check_temporary_folder(tmp_path)
    (tmp_path / "meshwright-ranks-1-2-x").mkdir()
    with pytest.raises(Finding, match="meshwright-ranks"):
        check_temporary_folder(tmp_path)


def test_tree_digest_sees_content_names_links_and_permissions(tmp_path):
    digests = {tree_digest(tmp_path)}
    (tmp_path / "file").write_text("a")
    digests.add(tree_digest(tmp_path))
    (tmp_path / "file").write_text("b")
    digests.add(tree_digest(tmp_path))
    (tmp_path / "file").chmod(0o600)
    digests.add(tree_digest(tmp_path))
    (tmp_path / "link").symlink_to("file")
    digests.add(tree_digest(tmp_path))
    assert len(digests) == 5


def test_drawn_configs_are_supported_and_variants_have_the_same_identity(tmp_path):
    for number in range(40):
        rng = random.Random(number)
        tree = draw_config(rng, tmp_path)
        for variant in (with_layout(rng, tree), with_placement(rng, tree), on_one_rank(tree)):
            assert is_supported(variant)
            same = {key: value for key, value in identity(parse(variant)).items() if not key.startswith("checkpoint")}
            assert same.items() <= identity(parse(tree)).items()


def test_everything_is_derived_from_the_seed(tmp_path):
    draws = [
        (
            [draw_kind(7, number) for number in range(50)],
            draw_config(rng, tmp_path),
            mutate_toml(rng, {"a": {"b": 1}}),
            mutate_json(rng, '{"a": [1, 2]}'),
        )
        for rng in (random.Random(7), random.Random(7))
    ]
    assert draws[0] == draws[1]
    assert set(draws[0][0]) <= KINDS.keys()
