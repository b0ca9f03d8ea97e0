"""Every command of the pages in docs/, and of CONTRIBUTING.md, is valid, and works as typed."""

from __future__ import annotations

import re
import shlex
import tomllib

import pytest

from meshwright.base.cli.args import parse
from meshwright.base.cli.verbs import load_verb, verbs
from meshwright.base.config import load_config
from tests.docs.document_commands import PAGES, ROOT, commands, files, prepare, run

COMMANDS = [(page, command) for page in ("CONTRIBUTING.md", *PAGES) for command in commands(page)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """One folder per page: later commands of a page read what earlier ones wrote."""
    folders = {}

    def get(page):
        if page not in folders:
            folders[page] = prepare(tmp_path_factory.mktemp("page"), page)
        return folders[page]

    return get


def test_pages_have_commands():
    assert len(COMMANDS) > 10


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_page_command_is_valid(page, command):
    """The verb, its options and the settings exist; the command itself runs in the long suite."""
    args = [arg for arg in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", arg)]
    if args[0] == "meshwright" and "--help" not in args:
        name = max((verb for verb in verbs() if args[1 : 1 + len(verb.split())] == verb.split()), key=len)
        values = parse(load_verb(name), name, args[1 + len(name.split()) :])
        load_config(overrides=[override for override in values.get("overrides", ()) if "layout." not in override])
    elif args[0] == "python":
        assert args[1] == "-m" or (ROOT / args[1]).exists()


@pytest.mark.parametrize("page", [page for page in PAGES if files(page)])
def test_files_of_a_page_are_valid(page):
    for name, text in files(page).items():
        compile(text, name, "exec") if name.endswith(".py") else tomllib.loads(text)


@pytest.mark.long
@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_page_command_works_as_typed(page, command, folder_of):
    run(command, folder_of(page))
