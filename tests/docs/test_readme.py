"""Every command of the README works as typed."""

from __future__ import annotations

import pytest
from document_commands import commands, prepare, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all commands in their order: later commands read what earlier ones wrote."""
    return prepare(tmp_path_factory.mktemp("readme"))


def test_readme_has_the_commands_that_ci_relies_on():
    assert {"make train", "make test", "make check"} <= set(commands("README.md"))


@pytest.mark.parametrize("command", commands("README.md"))
def test_readme_command_works_as_typed(command, folder):
    run(command, folder)
