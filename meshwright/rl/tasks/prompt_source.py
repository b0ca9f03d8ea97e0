"""Prompts as a data source: those of a task, or a user's, with the tokenizer of their completions. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.base.config import RunConfig
from meshwright.core.data.character_tokenizer import CharacterTokenizer
from meshwright.core.data.source import FINGERPRINT_SAMPLES, content_digest, spaced_indices
from meshwright.errors import ConfigError, DataError, describe_exception
from meshwright.rl.tasks.registry import find_task
from meshwright.rl.tasks.task import Task
from meshwright.rl.tasks.tokenizer import Tokenizer, open_text_tokenizer

TASK_PROMPTS = 1 << 20
"""Prompts of a task: indices 0 to 2**20 - 1."""
MAX_ITEM_BYTES = 1 << 20
"""Size limit of a user's prompt with everything beside it, as JSON: it is sent to the reward worker."""
PROMPT = "prompt"
"""The key of a user's prompt."""


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    tokens: NDArray[np.int32]
    item: dict[str, Any]
    """plain data, which the reward function gets: of a task its text, answer, task and level; of a user's source the
    item as it is
    """


class PromptSource(Protocol):
    """A source (`meshwright.core.data.source.Source`) whose samples are prompts."""

    name: str
    tokenizer: Tokenizer

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...

    def fingerprint(self) -> str: ...

    def masked_sample(self) -> Any: ...


class TaskPrompts:
    """The prompts of one level of a task."""

    def __init__(self, task: Task, level: int) -> None:
        self.task, self.level = task, level
        self.name = f"{task.name}, level {level}"
        self.tokenizer: Tokenizer = CharacterTokenizer()

    def __len__(self) -> int:
        return TASK_PROMPTS

    def __getitem__(self, index: int) -> Prompt:
        index = int(index)
        if not 0 <= index < TASK_PROMPTS:
            raise IndexError(index)
        text, answer = self.task.problem(self.level, index)
        item = {"text": text, "answer": answer, "task": self.task.name, "level": self.level}
        return Prompt(np.array(self.tokenizer.encode(text), np.int32), item)

    def fingerprint(self) -> str:
        """A digest of the task and of some of its prompts and answers: other definitions make another run."""
        problems = [self.task.problem(self.level, index) for index in range(FINGERPRINT_SAMPLES)]
        return content_digest("task", self.task.name, self.level, self.tokenizer.digest, json.dumps(problems))

    def masked_sample(self) -> NoReturn:
        raise no_masked_prompt(self.name)


class UserPrompts:
    """A user's prompts: an object with `__len__` and `__getitem__`, whose items are dicts with the key `prompt`: a
    text, or a list of token ids. What else is in an item is for the reward function; it is plain data, as in JSON.
    """

    def __init__(self, dataset: Any, name: str, tokenizer: Tokenizer, vocab: int, longest: int) -> None:
        self.dataset, self.name, self.tokenizer = dataset, name, tokenizer
        self.vocab, self.longest = vocab, longest
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DataError(
                f"source {name} is not a map-style dataset: it lacks __len__ or __getitem__",
                "expected an object with __len__ and __getitem__, such as a list",
            )
        if not len(dataset):
            raise DataError(f"source {name} is empty", "expected at least one prompt")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Prompt:
        """Raises DataError for an item that is not a prompt of this run."""
        index = int(index)
        where = f"source {self.name}, index {index}"
        try:
            item = self.dataset[index]
        except Exception as error:
            raise DataError(
                f"{where}: {type(error).__name__}: {describe_exception(error)}",
                "try to read the prompts outside of Meshwright",
            ) from error
        if not isinstance(item, Mapping) or PROMPT not in item:
            found = (
                f"a dict with the keys {sorted(map(str, item))}" if isinstance(item, Mapping) else type(item).__name__
            )
            raise DataError(f"{where} is {found}", 'expected a dict with "prompt": a text or a list of token ids')
        plain = plain_item(item, where)
        return Prompt(self._tokens(plain[PROMPT], where), plain)

    def _tokens(self, prompt: Any, where: str) -> NDArray[np.int32]:
        if isinstance(prompt, str):
            if self.tokenizer.vocab > self.vocab:
                raise vocab_error(self.tokenizer.vocab, self.vocab, f"the tokenizer of source {self.name}")
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
            ids = prompt
        else:
            raise DataError(
                f"{where}: the prompt is a {type(prompt).__name__}", "expected a text or a list of token ids"
            )
        if not ids:
            raise DataError(f"{where}: the prompt is empty", "expected at least one token")
        if not 0 <= min(ids) <= max(ids) < self.vocab:
            outside = next(token for token in ids if not 0 <= token < self.vocab)
            raise DataError(
                f"{where}: token id {outside} is out of range", f"expected 0 to {self.vocab - 1} (model.vocab)"
            )
        if len(ids) > self.longest:
            raise DataError(
                f"{where}: the prompt has {len(ids)} tokens, and data.sequence leaves {self.longest} beside "
                "rl.completion_tokens",
                "try a larger data.sequence, a smaller rl.completion_tokens, or a shorter prompt",
            )
        return np.array(ids, np.int32)

    def fingerprint(self) -> str:
        """The `fingerprint` of the dataset if it defines one, else a digest of its length and of up to 64 items; and
        the digest of the tokenizer.
        """
        defined = getattr(self.dataset, "fingerprint", None)
        if defined is not None:
            return content_digest(self.tokenizer.digest, str(defined() if callable(defined) else defined))
        content: list[Any] = [len(self), self.tokenizer.digest]
        for index in spaced_indices(len(self), FINGERPRINT_SAMPLES):
            try:
                content.append(json.dumps(self[index].item, sort_keys=True))
            except DataError as error:  # a generator reports a bad prompt when the stream reaches it
                content.append(type(error).__name__)
        return content_digest(*content)

    def masked_sample(self) -> NoReturn:
        raise no_masked_prompt(self.name)


def open_prompt_source(config: RunConfig, source: Any = None) -> PromptSource:
    """The prompts of a run: those of the user's `source`, or of the task of the config. Raises a ConfigError if they do
    not fit the model or the sequence length.
    """
    longest = config.data.sequence - config.rl.completion_tokens
    if longest < 1:
        raise ConfigError(
            f"rl.completion_tokens = {config.rl.completion_tokens} leaves no room for a prompt in data.sequence = "
            f"{config.data.sequence}",
            f"expected rl.completion_tokens below {config.data.sequence}, or a larger data.sequence",
        )
    if source is not None:
        return open_user_prompts(config, source, longest)
    task = find_task(config.rl.task)
    prompts = TaskPrompts(task, config.rl.level)
    level = task.levels[config.rl.level - 1]
    if level.prompt > longest:
        raise ConfigError(
            f"prompts of {prompts.name} have up to {level.prompt} tokens, and data.sequence = {config.data.sequence} "
            f"leaves {longest} beside rl.completion_tokens = {config.rl.completion_tokens}",
            f"try data.sequence = {level.prompt + config.rl.completion_tokens} or more",
        )
    if level.answer + 1 > config.rl.completion_tokens:
        raise ConfigError(
            f"answers of {prompts.name} have up to {level.answer} tokens and the end token, and rl.completion_tokens = "
            f"{config.rl.completion_tokens}",
            f"try rl.completion_tokens = {level.answer + 1} or more",
        )
    if prompts.tokenizer.vocab > config.model.vocab:
        raise vocab_error(prompts.tokenizer.vocab, config.model.vocab, "the tokenizer of the tasks")
    return prompts


def open_user_prompts(config: RunConfig, source: Any, longest: int) -> UserPrompts:
    """Reads some of the user's prompts, so that most mistakes are found before a generator starts."""
    name = type(source).__name__ if config.rl.has_task else config.rl.task
    tokenizer = open_text_tokenizer(config)
    if tokenizer.end is not None and tokenizer.end >= config.model.vocab:
        raise vocab_error(tokenizer.end + 1, config.model.vocab, "the end token of the tokenizer")
    prompts = UserPrompts(source, name, tokenizer, config.model.vocab, longest)
    for index in spaced_indices(len(prompts), FINGERPRINT_SAMPLES):
        if json.dumps(prompts[index].item) != json.dumps(prompts[index].item):
            raise DataError(
                f"source {name}, index {index}: two reads of the prompt differ, so a run could not be repeated",
                "try to make the prompt depend on the index alone",
            )
    return prompts


def plain_item(item: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """An item as plain data: what JSON has, with lists for tuples and arrays. The reward worker gets the same."""
    try:
        text = json.dumps({check_key(key): value for key, value in item.items()}, default=plain_value)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is not plain data: {describe_exception(error)}",
            "expected text, numbers, lists and dicts; a reward function can look up the rest by an id in the item",
        ) from None
    if len(text) > MAX_ITEM_BYTES:
        raise DataError(f"{where} has {len(text):,} bytes as JSON", f"expected at most {MAX_ITEM_BYTES:,}")
    plain: dict[str, Any] = json.loads(text)
    return plain


def check_key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the key {key!r} is a {type(key).__name__}, not text")
    return key


def plain_value(value: Any) -> Any:
    """A number or array of numpy or torch as a number or list of Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value is a {type(value).__name__}")


def vocab_error(needed: int, vocab: int, what: str) -> ConfigError:
    padded = 8 * math.ceil(needed / 8)
    return ConfigError(f"model.vocab = {vocab}, and {what} has {needed} tokens", f"try model.vocab = {padded} or more")


def no_masked_prompt(name: str) -> DataError:
    return DataError(
        f"source {name}: a prompt has no targets that could be masked", 'try data.on_bad_sample = "stop", the default'
    )
