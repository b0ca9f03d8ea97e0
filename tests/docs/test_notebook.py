"""examples/pipeline.ipynb runs from top to bottom on a CPU, and is stored without outputs."""

from __future__ import annotations

import re

import pytest
from meshwright_practice.labs.grader import grade
from meshwright_practice.labs.registry import load_lab

from tests.docs.document_commands import ROOT
from tests.practice.labs.lab_gradings import verdict

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
NOTEBOOK = ROOT / "examples" / "pipeline.ipynb"


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_notebook_is_stored_without_outputs_and_paths(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell.id for cell in code if cell.outputs or cell.execution_count is not None]
    assert not re.search(r"[\"'(\s]/(?:home|root|tmp|work|content|Users)/", "".join(cell.source for cell in code))


def test_notebook_answers_the_four_questions_in_order(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    headings = re.findall(r"^## \d+\. (.*)$", text, re.MULTILINE)
    parts = [
        "Config",
        "Dataset",
        "One process",
        "Partition",
        "Several ranks",
        "Checkpoint",
        "The same",
        "Phases",
        "DDP",
    ]
    assert [heading for heading, part in zip(headings, parts, strict=True) if not heading.startswith(part)] == []
    assert text.count("Question") >= 3


def test_checkpoint_of_the_notebook_survives_a_crash_at_any_time(notebook, tmp_path):
    """The lab on crash-safe checkpoints grades it."""
    [source] = [cell.source for cell in notebook.cells if "def save(folder, step, payload)" in cell.source]
    path = tmp_path / "checkpoint.py"
    path.write_text(f"import hashlib\nimport os\n\n\n{source}\n")
    grading = grade(load_lab("crash_safe_checkpoint"), path)
    assert grading.passed, verdict(grading)


@pytest.mark.timeout(420)
def test_notebook_runs_from_top_to_bottom(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = str(NOTEBOOK.parent)
    client = nbclient.NotebookClient(
        notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    client.execute()
    shown = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "same bits: True" in shown
    assert "resumed, bit by bit: True" in shown
