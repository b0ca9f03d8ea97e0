"""Every command of the README works as typed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.base.config import load_config
from meshwright.core.data.file_sources import open_sources
from tests.docs.document_commands import ROOT, commands, prepare, recipe, run

FULL_SIZE = {"make train", "meshwright prove"}
"""Commands that take about a minute with the default model and all of its steps. `make test` runs what they do in a
smaller size: `meshwright train --steps 50` is the same run, and tests/prover/test_prove.py proves a smaller config.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all commands in their order: later commands read what earlier ones wrote."""
    return prepare(tmp_path_factory.mktemp("readme"))


def test_readme_has_the_commands_that_ci_relies_on():
    assert {"make train", "make test", "make check"} <= set(commands("README.md"))


def test_make_train_is_the_command_that_others_give_fewer_steps():
    assert recipe("train") == ["meshwright", "train"]
    assert "meshwright train --steps 50 --run runs/first" in commands("README.md")


@pytest.mark.parametrize("page", ["README.md", "docs/fine-tuning.md"])
def test_chat_example_keeps_all_chats(page, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    [command] = [line for line in commands(page) if "examples/chat.jsonl" in line]
    data = load_config(overrides=[word for word in command.split() if word.startswith("--data.")]).data
    [chats] = open_sources(replace(data, path=str(ROOT / data.path)), 256, None)
    assert chats.notes == ()


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.long if command in FULL_SIZE else ())
        for command in commands("README.md")
    ],
)
def test_readme_command_works_as_typed(command, folder):
    run(command, folder)
