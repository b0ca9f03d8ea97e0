"""Reads the records of a file of published runs, which is untrusted, and validates their form: types and lengths.

A field that is not possible raises InvalidRecordField. A field that is possible, but contradicts another one or is
unknown, raises ConfigError. Both exclude the run and give the reason; a file in which no record is valid is refused.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.base.config.reader import shorten
from meshwright.base.io import parse_json, read_regular_file
from meshwright.errors import ConfigError
from meshwright.planner.calibration.published.published_tables import read_table

MAX_RUNS = 5_000
"""Limit on the runs in a file."""
MAX_FILE_BYTES = 16 << 20
"""Size limit of a file of runs."""
MAX_COUNT = 1 << 40
"""Limit on any count that a run states."""
MAX_TEXT = 4096
"""Limit on the characters of a text: the longest of the published ones has 600."""
MAX_NAME = 256
"""Limit on the characters of an id."""
MAX_FLAGS = 64
"""Limit on the entries of a list of texts."""
EXPECTED = "a JSON list of runs"
TYPES: dict[str, tuple[type, ...]] = {"a number": (int, float), "text": (str,), "an object": (dict,)}
TYPES |= {"text, true or false": (str, bool), "text or a list of texts": (str, list)}
"""What a field may be, in words -> its types."""
REQUIRED_FIELDS = {
    "source": "text",
    "gpu": "text",
    "gpus": "a number",
    "model": "an object",
    "layout": "an object",
    "reported": "an object",
}
"""The fields that every record has besides its id. A record of this form may still omit a size."""
OPTIONAL_FIELDS: dict[str, dict[str, str]] = {
    "": {
        "derived": "an object",
        "recompute": "text, true or false",
        "quality_flags": "text or a list of texts",
        "flags": "text or a list of texts",
    }
    | dict.fromkeys(("notes", "precision", "software", "trainer", "framework"), "text")
    | dict.fromkeys(("flops_convention", "flop_convention"), "text"),
    "model": {"name": "text", "attention": "text"},
    "layout": {"sharding": "text", "schedule": "text"},
}
"""By object of a record, the other fields whose types matter; null is a field that is not stated."""


class InvalidRecordField(ConfigError):
    """A field of a record is not possible."""


def read_rows(path: Path) -> list[Any]:
    """Returns the records of a file: a JSON list, or vTrain's table if the name ends in .csv."""
    name = f"file of runs {path}"
    content = read_regular_file(path, MAX_FILE_BYTES, name, EXPECTED).removeprefix(codecs.BOM_UTF8)
    if path.suffix.lower() == ".csv":
        rows: Any = read_table(content.decode("utf-8", "replace"), name, MAX_RUNS + 1)
    else:
        rows = parse_json(content, name, EXPECTED)
    if not isinstance(rows, list) or len(rows) > MAX_RUNS:
        raise ConfigError(f"{path} is not a list of at most {MAX_RUNS:,} runs", f"expected {EXPECTED}")
    if not rows:
        raise ConfigError(f"{path} contains no run", f"expected {EXPECTED}")
    return rows


def record_name(row: Any, names: set[str]) -> str:
    """Returns the id of a record and adds it to `names`. Raises InvalidRecordField if it has none of its own."""
    if not isinstance(row, dict):
        raise InvalidRecordField(f"it is {shorten(repr(row))} and not an object")
    name = row.get("id")
    if not isinstance(name, str) or not name or len(name) > MAX_NAME:
        raise InvalidRecordField(f"id is {shorten(repr(name))}, expected a text of at most {MAX_NAME} characters")
    if name in names:
        raise InvalidRecordField("an earlier record has the same id")
    names.add(name)
    return name


def validate_form(row: dict[str, Any]) -> None:
    """Raises InvalidRecordField if a field has another type than records have, or if a text is too long."""
    for key, kind in REQUIRED_FIELDS.items():
        validate_type(row, key, kind)
    for table, fields in OPTIONAL_FIELDS.items():
        values = row[table] if table else row
        for key, kind in fields.items():
            if values.get(key) is not None:
                validate_type(values, key, kind)


def validate_type(values: Mapping[str, Any], key: str, kind: str) -> None:
    value = values.get(key)
    if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and bool not in TYPES[kind]):
        raise InvalidRecordField(f"{key} is {shorten(repr(value))}, expected {kind}")
    texts = value if isinstance(value, list) else [value]
    if len(texts) > MAX_FLAGS or (isinstance(value, list) and not all(isinstance(text, str) for text in texts)):
        raise InvalidRecordField(f"{key} is {shorten(repr(value))}, expected at most {MAX_FLAGS} texts")
    if any(isinstance(text, str) and len(text) > MAX_TEXT for text in texts):
        raise InvalidRecordField(f"{key} has more than {MAX_TEXT:,} characters")


def parse_count(row: Mapping[str, Any], key: str, minimum: int = 1, maximum: int = MAX_COUNT) -> int:
    """Returns an integer in a range. Raises ConfigError if it is not stated."""
    value = row.get(key)
    if value is None:
        raise ConfigError(f"it does not state {key!r}")
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise InvalidRecordField(f"{key} = {shorten(repr(value))} is not an integer")
    if not minimum <= value <= maximum:
        expected = f"expected from {minimum:,} to {maximum:,}"
        raise InvalidRecordField(f"{key} = {shorten(str(value))} is out of range, {expected}")
    return int(value)


def optional_count(row: Mapping[str, Any], key: str, maximum: int = 1 << 24) -> int:
    """Returns an integer of at least 0, or 0 if it is not stated."""
    return parse_count(row, key, 0, maximum) if row.get(key) is not None else 0


def parse_flag(row: Mapping[str, Any], key: str, unstated: bool = False) -> bool:
    """Returns whether a field is true, or `unstated` if it is not stated."""
    value = row.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidRecordField(f"{key} = {shorten(repr(value))} is neither true nor false")
    return unstated if value is None else value


def parse_measurement(values: Mapping[str, Any], key: str) -> float:
    """Returns a number in the range of possible measurements."""
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-6 <= value <= 1e12:
        raise InvalidRecordField(f"{key} = {shorten(repr(value))} is not a possible measurement")
    return float(value)
