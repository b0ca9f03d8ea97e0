"""A hostile config.json of any family is refused by the name of the key, or read: never a traceback."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from meshwright.base.models.config_fields import ConfigFields
from meshwright.base.models.registry import FAMILIES, read_huggingface_model, write_huggingface_config
from meshwright.errors import ConfigError
from tests.core.models.test_huggingface import CONFIGS

JUNK = [-1, 0, 1 << 80, 1.5, -2.5, 1e400, float("nan"), "many", "", True, [], [1], {}, {"a": {"b": []}}, [[{}]]]


def full_config(family: str) -> dict:
    """The config.json that transformers writes, and what we write, with every key."""
    theirs = AutoConfig.for_model(family, **CONFIGS[family])
    tree = json.loads(theirs.to_json_string(use_diff=False))
    return tree | write_huggingface_config(read(json.loads(theirs.to_json_string(use_diff=True))))


def read(tree):
    return read_huggingface_model(ConfigFields.of(tree, "config.json"))


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_value_of_any_key_is_read_or_refused_by_name(family):
    tree = full_config(family)
    expected = read(tree)
    for key in tree:
        for value in JUNK:
            try:
                found = read(tree | {key: value})
            except ConfigError as error:
                assert len(str(error).splitlines()) == 1
                assert error.hint.startswith(("expected", "try"))
            else:
                assert isinstance(hash(found), int), (key, value)
                write_huggingface_config(found)
    assert read(tree) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_type_or_range_of_a_size_is_refused_by_name(family):
    tree = CONFIGS[family] | {"model_type": family}
    read(tree)
    for key in CONFIGS[family]:
        for value in (-1, 1 << 80, 1.5, "many", True, [1], {"a": {}}):
            with pytest.raises(ConfigError) as error:
                read(tree | {key: value})
            assert key in str(error.value), (key, value)


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_are_refused_by_name_or_have_a_default(family):
    tree = CONFIGS[family] | {"model_type": family}
    for key in tree:
        without = {name: value for name, value in tree.items() if name != key}
        try:
            read(without)
        except ConfigError as error:
            assert len(str(error).splitlines()) == 1
    for key in ("vocab_size", "model_type"):
        with pytest.raises(ConfigError, match=key):
            read({name: value for name, value in tree.items() if name != key})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_junk_in_the_scaling_of_rotary_frequencies_is_refused(family, key):
    tree = CONFIGS[family] | {"model_type": family}
    for kind in ("yarn", "llama3", "linear", "dynamic", "longrope", 3, None, {"type": []}):
        for factor in (-1, "2", 1 << 80, None, [], {}):
            for name in ("type", "rope_type"):
                scaling = {name: kind, "factor": factor, "original_max_position_embeddings": factor}
                if kind is factor is None:
                    continue  # an object of nulls says nothing
                with pytest.raises(ConfigError) as error:
                    read(tree | {key: scaling})
                assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", [None, [], 3, "llama", {}, {"model_type": []}, {"model_type": {"a": 1}}])
def test_what_is_no_config_is_refused(family, tree):
    with pytest.raises(ConfigError):
        read(tree)
    with pytest.raises(ConfigError, match="unknown for this family"):
        read(CONFIGS[family] | {"model_type": family, "x" * 500: {"nested": [1] * 500}})
