"""Fixtures of the tests of meshwright.core.data.prepare."""

from __future__ import annotations

import pytest

from meshwright.core.data.prepare import readers
from tests.core.data.prepare.corpus import jsonl


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """A part has a few lines, so that a small input has many."""
    monkeypatch.setattr(readers, "PART_BYTES", 512)
    monkeypatch.setattr(readers, "BATCH_ROWS", 4)


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes(jsonl())
    return tmp_path / "corpus.jsonl"
