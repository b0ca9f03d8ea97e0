"""Every command of the pages in docs/, and of CONTRIBUTING.md, works as typed."""

from __future__ import annotations

import pytest
from document_commands import PAGES, commands, prepare, run

COMMANDS = [(page, command) for page in ("CONTRIBUTING.md", *PAGES) for command in commands(page)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """One folder per page: later commands of a page read what earlier ones wrote."""
    folders = {}

    def get(page):
        if page not in folders:
            folders[page] = prepare(tmp_path_factory.mktemp("page"))
        return folders[page]

    return get


def test_pages_have_commands():
    assert len(COMMANDS) > 10


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_page_command_works_as_typed(page, command, folder_of):
    run(command, folder_of(page))
