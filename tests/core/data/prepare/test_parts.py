"""Tests of core.data.prepare.parts: files that are not those of data prepare are neither removed nor written."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from meshwright.core.data.prepare import parts
from meshwright.core.data.prepare import prepare as prepare_module
from meshwright.errors import ConfigError, DataError
from tests.core.data.prepare.corpus import documents, prepare


@pytest.mark.parametrize("finished", [False, True])
def test_folder_of_parts_that_is_a_link_or_a_file_is_refused(corpus, tmp_path, finished):
    out, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()
    (other / "00000000.part").write_text("precious")
    if finished:
        prepare(corpus, out)
    else:
        out.mkdir()
        (out / ".lock").touch()
    (out / ".parts").symlink_to(other)
    with pytest.raises(DataError, match="symbolic link or not a folder"):
        prepare(corpus, out)
    assert [(file.name, file.read_text()) for file in other.iterdir()] == [("00000000.part", "precious")]
    (out / ".parts").unlink()
    (out / ".parts").touch()
    with pytest.raises(DataError, match="symbolic link or not a folder"):
        prepare(corpus, out)


def test_files_that_are_not_parts_stay_and_do_not_fail_the_result(corpus, tmp_path):
    out = tmp_path / "out"
    (out / ".parts" / "00000000.folder").mkdir(parents=True)
    (out / ".parts" / "notes.txt").write_text("precious")
    (out / ".lock").touch()
    assert prepare(corpus, out) == prepare(corpus, out)
    assert {file.name for file in (out / ".parts").iterdir()} == {"00000000.folder", "notes.txt"}


def test_links_with_the_names_of_temporary_files_are_not_followed(corpus, tmp_path):
    prepare(corpus, tmp_path / "whole")
    out, precious = tmp_path / "out", tmp_path / "precious"
    precious.write_text("precious")
    out.mkdir()
    (out / ".lock").touch()
    for name in (".tokens-00000.bin", ".documents-00001.bin", "tokens-00002.bin"):
        (out / name).symlink_to(precious)
    (out / "index.json").symlink_to(tmp_path / "missing")
    prepare(corpus, out)
    assert precious.read_text() == "precious"
    assert not (tmp_path / "missing").exists()
    assert documents(out) == documents(tmp_path / "whole")


def test_lock_that_is_a_link_is_refused(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").symlink_to(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare(corpus, tmp_path / "out")
    assert not (tmp_path / "missing").exists()


def test_parts_of_other_code_are_written_again_and_a_whole_output_stays(corpus, tmp_path, monkeypatch):
    out, written = tmp_path / "out", []
    real, assemble = parts.PartFolder.write, prepare_module.assemble
    monkeypatch.setattr(parts.PartFolder, "write", lambda *args, **named: (written.append(1), real(*args, **named))[1])

    def prepare_with(code, fails):
        def assemble_or_fail(*args):
            if fails:
                raise DataError("a full disk")
            return assemble(*args)

        written.clear()
        monkeypatch.setattr(parts, "tokenizing_code", lambda: code)
        monkeypatch.setattr(prepare_module, "assemble", assemble_or_fail)
        with pytest.raises(DataError, match="a full disk") if fails else nullcontext():
            prepare(corpus, out, workers=1)
        return len(written)

    count = prepare_with("a", fails=True)
    assert [prepare_with(code, fails) for code, fails in (("a", True), ("b", True), ("b", False), ("c", False))] == [
        *(0, count, 0, 0)
    ]
    assert count > 1
