"""Tables of runs: vTrain's columns are read, and other files are a one-line error."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.planner.calibration.published.published_runs import read_published_runs
from meshwright.planner.calibration.published.published_tables import COLUMNS, SECONDS
from meshwright.planner.calibration.replay import replay_run


def test_single_node_table_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "single_node.csv"
    header = (
        "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
        "data parallelism,pipeline parallelism,iteration time (ms)"
    )
    path.write_text(f"{header}\n4,16,4,2048,16,24,1024,1,2,2,410.490577\n8,32,2,1024,16,16,1024,4,2,1,457.697031\n")
    runs, excluded = read_published_runs(path)
    assert not excluded
    assert [run.seconds for run in runs] == [pytest.approx(0.410490577), pytest.approx(0.457697031)]
    assert all(run.fully_stated for run in runs)
    assert all(abs(replay_run(run).error or 1.0) < 0.2 for run in runs)


@pytest.mark.parametrize(
    ("text", "message"), [("a,b\n1,2\n", "without the column '# GPUs'"), ("", "without the column"), ("x", "without")]
)
def test_other_tables_are_a_one_line_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_published_runs(path)


@pytest.mark.parametrize("cell", ["", "many"])
def test_cell_without_a_number_is_named(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(
        f"{','.join((*COLUMNS, SECONDS))}\n4,16,4,2048,16,24,1024,1,2,{cell or '2'}{'' if not cell else ',4'}\n"
    )
    with pytest.raises(ConfigError, match="line 2 has no number in the column"):
        read_published_runs(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x" * 200_000 + ",b\n1,2\n", "a line has more than 4,096 characters"),
        ("x," * 2_000_000, "a line has more than 4,096 characters"),
        (f"{','.join((*COLUMNS, SECONDS))}\n" + '"' + "9\n" * 100_000, "a quoted cell does not end"),
        (f"{','.join((*COLUMNS, SECONDS))}\n{'4,' * 11}4\n", "line 2 has more cells than the header"),
    ],
    ids=["long name", "many columns", "long cell", "more cells"],
)
def test_table_of_another_form_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"is not valid: {message}"):
        read_published_runs(path)
