"""Tests of the command line as a whole: parsing, one-line errors, exit codes, help, and start-up without torch."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from meshwright.base.cli import main
from meshwright.base.cli.args import build_parser, parse, parse_location, parse_path, parse_run, split_overrides
from meshwright.base.cli.verbs import load_verb, verbs
from meshwright.core.cli.train import train
from meshwright.planner.cli import plan

INVALID_ARGUMENTS = {
    "--model.layer=3": "unknown key model.layer = 3; did you mean model.layers?",
    "--model.layers=many": "model.layers = many has the wrong type; expected an integer",
    "--batch.micro=3": "batch.micro = 3 does not divide the 8 samples of a rank",
    "--batch.global=15": "batch.global = 15 is not divisible by the data-parallel degree 2; expected batch.global = 14",
    "--launch.threads": "--launch.threads has no value; expected --launch.threads VALUE",
    "--steps": "argument --steps: expected one argument; try meshwright train --help",
    "--stepz=3": "unknown option --stepz=3; did you mean --steps? try meshwright train --help",
    "--count-bytes-every=x": "count_bytes_every = x has the wrong type",
    "--steps=x": "steps = x has the wrong type; expected an integer",
}


@pytest.mark.parametrize("argument", INVALID_ARGUMENTS)
def test_invalid_argument_is_one_line_on_stderr_with_exit_code_2(argument, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", argument])
    stderr = capsys.readouterr().err
    assert stop.value.code == 2
    assert stderr.count("\n") == 1
    assert INVALID_ARGUMENTS[argument] in stderr


def path_arguments() -> list[tuple[str, list[str]]]:
    """(verb, arguments) for every argument of every verb that is a path, with empty text in its place."""
    found = []
    for name in verbs():
        verb = load_verb(name)
        parser = build_parser(verb, name)
        required = [action for action in parser._actions if action.required]
        for action in parser._actions:
            if action.type in (parse_path, parse_run, parse_location):
                arguments = []
                for other in {id(a): a for a in (*required, action)}.values():
                    value = "" if other is action else "1"
                    arguments += [f"{other.option_strings[0]}={value}"] if other.option_strings else [value]
                found.append((name, arguments))
    return found


@pytest.mark.parametrize(("verb", "arguments"), path_arguments())
def test_empty_path_is_refused_by_every_verb(verb, arguments, tmp_path, monkeypatch, capsys):
    """Empty text is the value of a shell variable that is not set; as a path it would be the current folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main([*verb.split(), *arguments])
    stderr = capsys.readouterr().err
    assert stop.value.code == 2
    assert stderr.count("\n") == 1
    assert "the path is empty; try meshwright" in stderr
    assert list(tmp_path.iterdir()) == []


def test_every_verb_with_a_folder_or_file_is_tested_with_an_empty_path():
    assert {verb for verb, _ in path_arguments()} == set(verbs()) - {"practice", "practice cards", "practice incident"}


def test_missing_run_file_is_one_line_with_exit_code_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", str(tmp_path / "missing.toml")])
    assert stop.value.code == 2
    assert "missing.toml cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code", "hint"), [(errno.EMFILE, 2, "ulimit -n"), (errno.EFBIG, 2, "ulimit -f"), (5, 1, "")]
)
def test_system_error_is_one_line(number, code, hint, monkeypatch, capsys):
    def fail(args):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["meshwright.base.cli.main"], "dispatch", fail)
        patch.setattr(os, "dup2", lambda *files: None)
        with pytest.raises(SystemExit) as stop:
            main(["report", "run"])
    stderr = capsys.readouterr().err
    assert stop.value.code == code
    assert stderr.count("\n") == 1
    assert os.strerror(number) in stderr
    assert hint in stderr


def test_unknown_verb_is_one_line_with_exit_code_2(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fly"])
    assert stop.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert "unknown verb 'fly'; expected one of evaluate, sample, train, checkpoint diff" in stderr


def test_group_of_verbs_lists_its_verbs(capsys):
    main(["data", "--help"])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["data", "find"],
        ["data", "prepare"],
        ["data", "show"],
    ]
    with pytest.raises(SystemExit) as stop:
        main(["data"])
    assert stop.value.code == 2
    assert "unknown verb 'data'; expected one of data find, data prepare, data show" in capsys.readouterr().err


def test_second_positional_argument_is_rejected(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "one.toml", "two.toml"])
    assert stop.value.code == 2
    assert "unknown argument two.toml" in capsys.readouterr().err


def test_config_override_accepts_equals_sign_or_next_argument():
    args = ["run.toml", "--seed", "5", "--model.tie", "True", "--steps", "3", "--batch.micro=2"]
    assert split_overrides(args, {"--steps"}) == (
        ["run.toml", "--steps", "3"],
        ("--seed=5", "--model.tie=True", "--batch.micro=2"),
    )


def test_config_override_before_a_positional_argument_keeps_its_value():
    parsed = parse(train, "train", ["--optimizer.lr", "-3e-4", "run.toml", "--ranks=2"])
    assert str(parsed["file"]) == "run.toml"
    assert parsed["ranks"] == "2"
    assert parsed["overrides"] == ("--optimizer.lr=-3e-4",)


def test_hyphens_and_underscores_name_the_same_option():
    assert parse(plan, "plan", ["tiny", "--critical_batch", "5"])["critical_batch"] == 5.0
    assert split_overrides(["--model.kv-heads=4", "--log-every=2"], set())[1] == ("--model.kv_heads=4", "--log_every=2")


def test_top_level_config_key_is_an_option_where_the_verb_has_none_of_that_name():
    assert split_overrides(["--steps", "3", "--count-bytes-every=0"], set())[1] == (
        "--steps=3",
        "--count_bytes_every=0",
    )


@pytest.mark.parametrize("verb", ["train", "simulate", "prove", "plan"])
def test_help_of_a_verb_lists_its_options_and_every_config_key(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    stdout = capsys.readouterr().out
    for key in ("--batch.global", "--optimizer.lr", "--ddp.bucket_cap_mb", "--data.mixture", "--json"):
        assert key in stdout
    assert "samples per optimizer step, over all ranks" in stdout


def test_usage_lists_every_verb(capsys):
    main(["--help"])
    stdout = capsys.readouterr().out
    for verb in ("train", "plan schedule", "data find", "checkpoint verify"):
        assert f"  {verb} " in stdout
    assert "Exit codes: 0 done" in stdout


def test_help_and_plan_do_not_import_torch():
    code = (
        "import sys; from meshwright.base.cli import main\n"
        "main(['--help']); main(['plan', 'tiny', '--cluster', 'h100:2'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("columns", ["0", "-1", "wide"])
def test_invalid_columns_variable_is_ignored(columns, monkeypatch, capsys):
    """A terminal width of zero, which some pseudo-terminals report, ended in a traceback of rich."""
    monkeypatch.setenv("COLUMNS", columns)
    main(["plan", "tiny", "--cluster", "h100:2"])
    assert "replicate 2" in capsys.readouterr().out


def test_text_that_the_encoding_does_not_have_is_printed_as_question_marks():
    command = [sys.executable, "-m", "meshwright", "plan", "tiny", "--cluster", "h100:2"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "replicate 2" in shown
    assert "?" in shown


@pytest.mark.parametrize("out", ["", "missing/certificate.json"])
def test_prove_rejects_an_output_path_that_cannot_be_written_before_it_starts(out, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("meshwright.prover.prove.run_checks", lambda config: pytest.fail("the checks have started"))
    with pytest.raises(SystemExit) as stop:
        main(["prove", "--out", str(tmp_path / out)])
    assert stop.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert "cannot be written" in stderr
