"""Prompts as a source: those of tasks and of users, their checks, and their fingerprints."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from meshwright.base.config import DataConfig, ModelConfig, RLConfig, RunConfig
from meshwright.core.data.source import Source
from meshwright.errors import ConfigError, DataError
from meshwright.rl.tasks.prompt_source import TASK_PROMPTS, TaskPrompts, UserPrompts, open_prompt_source
from meshwright.rl.tasks.registry import TASKS


def config_of(vocab: int = 64, sequence: int = 32, **rl) -> RunConfig:
    settings = {"objective": "grpo", "completion_tokens": 8} | rl
    return RunConfig(model=ModelConfig(vocab=vocab), data=DataConfig(sequence=sequence), rl=RLConfig(**settings))


def user_config(**rl) -> RunConfig:
    return config_of(vocab=256, **rl)


def test_task_prompts_are_a_source():
    source: Source = open_prompt_source(config_of(task="strings", level=1))
    assert isinstance(source, TaskPrompts)
    assert (source.name, len(source)) == ("strings, level 1", TASK_PROMPTS)
    prompt = source[5]
    assert prompt.tokens.dtype == np.int32
    assert source.tokenizer.decode(prompt.tokens) == prompt.item["text"]
    assert prompt.item == source[np.uint64(5)].item
    assert prompt.item.keys() == {"text", "answer", "task", "level"}
    assert json.loads(json.dumps(prompt.item)) == prompt.item
    for index in (-1, TASK_PROMPTS):
        with pytest.raises(IndexError):
            source[index]
    with pytest.raises(DataError, match="a prompt has no targets"):
        source.masked_sample()


def test_fingerprints_differ_between_tasks_and_levels():
    prints = {TaskPrompts(task, level).fingerprint() for task in TASKS.values() for level in range(1, 10)}
    assert len(prints) == 27
    assert TaskPrompts(TASKS["logic"], 3).fingerprint() == TaskPrompts(TASKS["logic"], 3).fingerprint()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of(task="rhymes"), "expected arithmetic, strings, logic, or prompts of your own"),
        (config_of(sequence=8), "leaves no room for a prompt.*expected rl.completion_tokens below 8"),
        (config_of(sequence=11), "prompts of arithmetic, level 1 have up to 4 tokens.*try data.sequence = 12 or more"),
        (config_of(task="strings", level=9), "up to 8 tokens and the end token.*try rl.completion_tokens = 9 or more"),
        (config_of(vocab=40), "model.vocab = 40, and the tokenizer of the tasks has 48.*try model.vocab = 48 or more"),
    ],
)
def test_task_that_does_not_fit_the_config_says_what_to_set(config, message):
    with pytest.raises(ConfigError, match=message):
        open_prompt_source(config)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("level", range(1, 10))
def test_every_prompt_fits_where_the_check_passes(task, level):
    bounds = TASKS[task].levels[level - 1]
    exact = config_of(
        task=task, level=level, sequence=bounds.prompt + bounds.answer + 1, completion_tokens=bounds.answer + 1
    )
    source = open_prompt_source(exact)
    assert all(len(source[index].tokens) <= bounds.prompt for index in range(500))
    with pytest.raises(ConfigError, match=f"try data.sequence = {exact.data.sequence} or more"):
        open_prompt_source(replace(exact, data=replace(exact.data, sequence=exact.data.sequence - 1)))


def test_user_prompts_are_bytes_or_token_ids():
    items = [
        {"prompt": "héllo", "answer": "x", "score": np.float32(0.5)},
        {"prompt": [1, 2, 3], "many": (1, 2), "array": np.arange(2), "tensor": torch.ones(1)},
        {"prompt": np.array([4, 5])},
    ]
    source = open_prompt_source(user_config(), items)
    assert isinstance(source, UserPrompts)
    assert bytes(source[0].tokens.tolist()).decode() == "héllo"
    assert source[0].item == {"prompt": "héllo", "answer": "x", "score": 0.5}
    assert source[1].tokens.tolist() == [1, 2, 3]
    assert source[1].item == {"prompt": [1, 2, 3], "many": [1, 2], "array": [0, 1], "tensor": [1.0]}
    assert source[2].tokens.tolist() == [4, 5]
    assert source.tokenizer.end == 0
    assert source.tokenizer.decode([104, 195, 169, 0, 65]) == "hé"
    assert source.tokenizer.decode([104, 195, 300]) == "h\ufffd\ufffd"
    assert len(source) == 3


def test_user_prompts_are_named_by_the_task():
    assert open_prompt_source(user_config(task="rhymes"), [{"prompt": "a"}]).name == "rhymes"
    assert open_prompt_source(user_config(), [{"prompt": "a"}]).name == "list"


def test_user_prompts_use_the_tokenizer_of_the_data(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<eos>": 0, "say": 1, "yes": 2, "[UNK]": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = user_config()
    config = replace(config, data=replace(config.data, tokenizer=str(tmp_path / "tokenizer.json")))
    source = open_prompt_source(config, [{"prompt": "say yes"}])
    assert source[0].tokens.tolist() == [1, 2]
    assert (source.tokenizer.end, source.tokenizer.vocab) == (0, 4)
    assert source.tokenizer.decode([2, 1, 0, 2]) == "yes say"
    assert source.tokenizer.decode([2, 200, 1]) == "yes\ufffdsay"
    bytes_source = open_prompt_source(user_config(), [{"prompt": "say yes"}])
    assert source.fingerprint() != bytes_source.fingerprint()


class Changing:
    reads = 0

    def __len__(self):
        return 1

    def __getitem__(self, index):
        self.reads += 1
        return {"prompt": str(self.reads)}


class Broken:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3, "not a map-style dataset"),
        ([], "source list is empty"),
        (["text"], "index 0 is str; expected a dict with"),
        ([{"text": "a", "answer": "b"}], r"a dict with the keys \['answer', 'text'\]; expected a dict with \"prompt\""),
        ([{"prompt": 3}], "the prompt is a int"),
        ([{"prompt": [1, 2.5]}], "the prompt is a list"),
        ([{"prompt": [True]}], "the prompt is a list"),
        ([{"prompt": ""}], "the prompt is empty"),
        ([{"prompt": [1, 256]}], r"token id 256 is out of range; expected 0 to 255 \(model.vocab\)"),
        ([{"prompt": [-1]}], "token id -1 is out of range"),
        ([{"prompt": "a" * 25}], "the prompt has 25 tokens, and data.sequence leaves 24.*try a larger data.sequence"),
        ([{"prompt": "a", "image": object()}], "is not plain data: a value is a object"),
        ([{"prompt": "a", 3: 1}], "is not plain data: the key 3 is a int"),
        ([{"prompt": "a", "long": "x" * (1 << 20)}], "expected at most 1,048,576"),
        (Changing(), "two reads of the prompt differ"),
        (Broken(), "index 0: OSError: the disk is gone"),
    ],
)
def test_bad_user_prompt_is_named(source, message):
    with pytest.raises(DataError, match=message):
        open_prompt_source(user_config(), source)


def test_bad_user_prompt_in_the_middle_is_named_when_it_is_read():
    items = [{"prompt": "a"}] * 1000
    items[501] = {"prompt": ""}
    source = open_prompt_source(user_config(), items)
    with pytest.raises(DataError, match="source list, index 501: the prompt is empty"):
        source[501]


def test_tokenizer_larger_than_the_vocabulary_is_an_error():
    with pytest.raises(ConfigError, match=r"model.vocab = 64, and the tokenizer of source list has 256 tokens"):
        open_prompt_source(config_of(), [{"prompt": "text"}])
    assert open_prompt_source(config_of(), [{"prompt": [63]}])[0].tokens.tolist() == [63]


def test_fingerprint_of_user_prompts_covers_their_items():
    def fingerprint(items):
        return open_prompt_source(user_config(), items).fingerprint()

    class Declared(list):
        def fingerprint(self):
            return "declared"

    items = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "d"}]
    assert fingerprint(items) == fingerprint([dict(reversed(item.items())) for item in items])
    assert fingerprint(items) != fingerprint([items[0], items[1] | {"answer": "e"}])
    assert fingerprint(items) != fingerprint([*items, items[0]])
    assert fingerprint(Declared(items)) == fingerprint(Declared(items[:1])) != fingerprint(items)
