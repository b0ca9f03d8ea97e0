"""Tests of the verbs as entry points: those of other distributions, and of areas that are not there."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint

import pytest

from meshwright.base.cli import main, verbs
from meshwright.base.environment import FIRST_TORCH, NEXT_TORCH, require_torch
from meshwright.errors import ConfigError


@pytest.fixture
def installed(monkeypatch):
    """Installs entry points in addition to those of this environment."""
    found = list(verbs.extensions(verbs.GROUP))

    def install(**values: str) -> None:
        added = [EntryPoint(name.replace("_", "."), value, verbs.GROUP) for name, value in values.items()]
        monkeypatch.setattr(verbs, "extensions", lambda group: [*added, *found])
        verbs.verbs.cache_clear()

    yield install
    verbs.verbs.cache_clear()


def refused(args: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        main(args)
    stderr = capsys.readouterr().err
    assert stop.value.code == 2
    assert stderr.count("\n") == 1
    return stderr


def test_verb_of_another_distribution_runs_and_is_listed(installed, tmp_path, monkeypatch, capsys):
    verb = 'def show() -> None:\n    """Team show: print the name of the team."""\n    print("ours")\n'
    (tmp_path / "team_tools.py").write_text(f'"""Tools of a team."""\n\n{verb}')
    monkeypatch.syspath_prepend(tmp_path)
    installed(team_show="team_tools:show")
    main(["team", "show"])
    assert capsys.readouterr().out == "ours\n"
    main(["--help"])
    text = capsys.readouterr().out
    assert "\nteam_tools: Tools of a team.\n  team show" in text
    assert text.index("meshwright.ops:") < text.index("team_tools:")


def test_verb_of_another_distribution_that_cannot_be_imported_does_not_end_the_help(
    installed, tmp_path, monkeypatch, capsys
):
    (tmp_path / "broken_tools").mkdir()
    (tmp_path / "broken_tools" / "__init__.py").touch()
    (tmp_path / "broken_tools" / "verbs.py").write_text("import a_module_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    installed(broken_verb="broken_tools.verbs:verb")
    main(["--help"])
    assert "broken_tools: \n  broken verb        cannot be imported: ModuleNotFoundError" in capsys.readouterr().out


def test_copy_that_is_not_installed_says_so(monkeypatch, capsys):
    monkeypatch.setattr(verbs, "extensions", lambda group: [])
    verbs.verbs.cache_clear()
    assert "this copy of Meshwright is not installed" in refused(["train"], capsys)
    verbs.verbs.cache_clear()


def test_verb_of_another_distribution_does_not_replace_one_of_meshwright(installed):
    installed(train="team_tools:train")
    assert verbs.verbs()["train"].module == "meshwright.core.cli.train"


def test_verb_of_an_area_that_is_left_out_says_so(installed, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "meshwright.prover", None)
    for name in [name for name in sys.modules if name.startswith("meshwright.prover.")]:
        monkeypatch.delitem(sys.modules, name)
    assert "prove is part of meshwright.prover, which is not installed" in refused(["prove"], capsys)
    main(["--help"])
    assert "\nmeshwright.prover: not installed\n  bisect" in capsys.readouterr().out


def test_practice_without_its_distribution_names_it(installed, monkeypatch, capsys):
    ours = [entry for entry in verbs.extensions(verbs.GROUP) if entry.module.startswith("meshwright.")]
    monkeypatch.setattr(verbs, "extensions", lambda group: ours)
    verbs.verbs.cache_clear()
    assert "practice is not installed; try pip install meshwright-practice" in refused(["practice"], capsys)


@pytest.mark.parametrize(
    ("version", "supported"),
    [("2.13.0+cpu", True), ("2.11.0a0+nv26.01", True), ("2.10.1", False), ("2.14.0", False), ("main", True)],
)
def test_torch_of_a_container_is_used_within_the_supported_versions(version, supported, monkeypatch):
    monkeypatch.setattr("meshwright.base.environment.version", lambda name: version)
    if supported:
        require_torch()
        return
    with pytest.raises(ConfigError, match=r"torch .* is not supported; expected 2\.11 <= torch < 2\.14"):
        require_torch()


def test_supported_versions_of_torch_are_those_of_the_distribution():
    from importlib.metadata import requires

    (requirement,) = [text for text in requires("meshwright") or [] if re.match(r"torch[<>]", text)]
    bounds = {f">={'.'.join(map(str, FIRST_TORCH))}", f"<{'.'.join(map(str, NEXT_TORCH))}"}
    assert set(requirement.partition(";")[0].removeprefix("torch").split(",")) == bounds


def test_training_without_torch_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("meshwright.base.environment.find_spec", lambda name: None)
    assert "try pip install 'meshwright[train]'" in refused(["train", "--run", str(tmp_path / "run")], capsys)
    assert not (tmp_path / "run").exists()
