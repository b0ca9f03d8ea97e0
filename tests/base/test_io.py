"""Tests of atomic writes, bounded reads of untrusted files, and number formatting."""

from __future__ import annotations

import os

import pytest

from meshwright.base.io import (
    atomic_write,
    create_file,
    finite,
    format_bytes,
    format_clock,
    format_count,
    format_percent,
    format_seconds,
    open_descriptor,
    output_file,
    printable,
    read_json,
    read_regular_file,
    write_output,
)
from meshwright.errors import ConfigError


def test_atomic_write_replaces_the_file_and_leaves_no_temporary_file(tmp_path):
    file = tmp_path / "file.txt"
    atomic_write(file, "one")
    atomic_write(file, ["t", "wo"])
    assert file.read_text() == "two"
    assert os.listdir(file.parent) == ["file.txt"]


def test_atomic_write_that_fails_keeps_the_old_file(tmp_path):
    file = tmp_path / "file.txt"
    file.write_text("old")

    def lines():
        yield "new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        atomic_write(file, lines())
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_atomic_write_does_not_create_a_folder_that_is_gone(tmp_path):
    with pytest.raises(FileNotFoundError):
        atomic_write(tmp_path / "gone" / "file.txt", "text")
    assert os.listdir(tmp_path) == []


def test_symbolic_link_of_a_run_folder_is_replaced_and_one_that_the_user_names_is_followed(tmp_path):
    (tmp_path / "target").write_text("outside")
    for name in ("run", "user"):
        (tmp_path / name).symlink_to(tmp_path / "target")
    atomic_write(tmp_path / "run", "text")
    assert not (tmp_path / "run").is_symlink()
    assert (tmp_path / "target").read_text() == "outside"
    write_output(tmp_path / "user", "text", "--out")
    assert (tmp_path / "user").is_symlink()
    assert (tmp_path / "target").read_text() == "text"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_file_of_a_run_folder_is_opened_only_if_it_is_regular(tmp_path, kind):
    path = tmp_path / "file"
    (tmp_path / "target").write_text("outside")
    {"link": lambda: path.symlink_to(tmp_path / "target"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[
        kind
    ]()
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_APPEND):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            open_descriptor(path, flags)
    with pytest.raises(ConfigError, match="file cannot be written: File exists"):
        create_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_json(path)
    assert (tmp_path / "target").read_text() == "outside"


def test_untrusted_file_that_is_a_pipe_or_too_large_raises_config_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file; expected a page"):
        read_regular_file(tmp_path / "pipe", 10, "the page", "a page")
    (tmp_path / "large").write_bytes(b"x" * 11)
    with pytest.raises(ConfigError, match="the page is larger than 10 bytes"):
        read_regular_file(tmp_path / "large", 10, "the page", "a page")
    assert read_regular_file(tmp_path / "large", 11, "the page", "a page") == b"x" * 11


@pytest.mark.parametrize("content", ["{", "[1"])
def test_invalid_json_raises_config_error_with_the_path(tmp_path, content):
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(ConfigError, match=r"file\.json is not JSON"):
        read_json(tmp_path / "file.json")


def test_output_file_must_be_creatable(tmp_path):
    assert output_file(tmp_path / "new.txt", "--out") == tmp_path / "new.txt"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path, tmp_path / "missing" / "file", tmp_path / "loop", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(ConfigError, match=r"--out .* cannot be written"):
            write_output(path, "text", "--out")


def test_control_characters_and_nonfinite_numbers_are_replaced():
    assert printable("a\x1b[2Jb\nc") == "a?[2Jb\nc"
    assert finite({"a": [1.0, float("inf")], "b": float("nan")}) == {"a": [1.0, None], "b": None}


def test_numbers_have_three_significant_digits():
    assert [format_bytes(n) for n in (5, 2048, 5 << 20, 1536 << 20)] == ["5 B", "2 KiB", "5 MiB", "1.5 GiB"]
    assert [format_seconds(s) for s in (0, 3e-6, 0.01234, 4.567, 12345)] == [
        "0 s",
        "3 us",
        "12.3 ms",
        "4.57 s",
        "12,345 s",
    ]
    assert [format_clock(s) for s in (5, 65, 3700, 273600)] == ["00:05", "01:05", "01:01:40", "3d 04h"]
    assert [format_count(n) for n in (512, 4096, 8.03e9)] == ["512", "4.1 k", "8.03 B"]


def test_percentages():
    assert [format_percent(f) for f in (None, 0, 0.0321, 0.412)] == ["-", "0%", "3.2%", "41%"]
    assert [format_percent(f, 1, signed=True) for f in (0.0123, -0.2, 0.0001)] == ["+1.2%", "-20.0%", "0.0%"]


@pytest.mark.parametrize("depth", [65, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deeply_nested_json_is_one_error(tmp_path, depth, opening):
    closing = "]" if opening == "[" else "}"
    (tmp_path / "deep.json").write_text(opening * depth + "1" + closing * depth)
    with pytest.raises(ConfigError, match=r"deep\.json has more than 64 levels of nesting"):
        read_json(tmp_path / "deep.json")


def test_json_of_64_levels_is_read(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 64 + "]" * 64)
    assert read_json(tmp_path / "deep.json")


def test_json_with_millions_of_values_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    (tmp_path / "wide.json").write_text("[" + "[]," * 2_000_000 + "1]")
    monkeypatch.setattr("json.loads", lambda _: pytest.fail("the file was parsed"))
    with pytest.raises(ConfigError, match=r"wide\.json has more than 1,048,576 values"):
        read_json(tmp_path / "wide.json")
