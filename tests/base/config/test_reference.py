"""Tests of the descriptions of config keys."""

from __future__ import annotations

import runpy
from pathlib import Path

from meshwright.base.config import RunConfig, config_to_dict
from meshwright.base.config.reference import describe_config


def test_every_config_key_has_a_description_a_type_and_a_default():
    described = {key.key: key for section in describe_config() for key in section.keys}
    tree = config_to_dict(RunConfig())
    keys = {key for key, value in tree.items() if not isinstance(value, dict)}
    keys |= {f"{section}.{key}" for section, table in tree.items() if isinstance(table, dict) for key in table}
    assert set(described) == keys
    assert all(key.help and key.type and key.default for key in described.values())


def test_type_and_default_are_spelled_as_in_a_run_file():
    described = {key.key: (key.type, key.default) for section in describe_config() for key in section.keys}
    assert described["precision.compute"] == ("{auto,fp32,bf16,fp16,fp64}", '"auto"')
    assert described["batch.micro"] == ("INT", "unset")
    assert described["fsdp.reshard_after_forward"] == ("BOOL|INT", "true")
    assert described["data.mixture"] == ("TABLES", "[]")


def test_every_section_has_a_description():
    assert all(section.help for section in describe_config())


def test_config_page_is_up_to_date():
    """If this fails, run `python docs/write_config_reference.py`."""
    docs = Path(__file__).parents[3] / "docs"
    script = runpy.run_path(str(docs / "write_config_reference.py"))
    assert (docs / "config.md").read_text() == script["config_reference"]()


def test_identity_and_placement_of_a_key_match_the_fingerprint():
    described = {key.key: key.identity for section in describe_config() for key in section.keys}
    assert described["optimizer.lr"]
    assert not described["layout.tensor"]
    assert not described["checkpoint.keep"]
