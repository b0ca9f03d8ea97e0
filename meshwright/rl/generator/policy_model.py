"""The models that a generator samples from: built-in families with a key-value cache, and any module of a user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.base.models.spec import ModelSpec
from meshwright.core.generate.cache import CachePositions, KeyValueCache, with_cache
from meshwright.core.generate.generation import core_names
from meshwright.core.models.layers.attention import document_ids
from meshwright.core.models.layers.loss import HeadLoss
from meshwright.errors import ConfigError

NextLogits = Callable[[Tensor], Tensor]
"""Appends one token to every row, (rows,), and returns the logits after it, (rows, vocabulary)."""
Autocast = Callable[[], AbstractContextManager[Any]]


class PolicyModel(Protocol):
    """A policy in this process. Both passes compute under the precision of the learner."""

    module: nn.Module
    name_prefix: str
    """what the names of the module's tensors begin with in the learner, and in the policies that it publishes"""

    def logits(self, tokens: Tensor) -> Tensor:
        """(rows, sequence) -> (rows, sequence, vocabulary): the forward pass of the learner."""
        ...

    def decoding(self, prompt: Tensor, rows: int, tokens: int) -> AbstractContextManager[tuple[Tensor, NextLogits]]:
        """The logits after a prompt, (rows, vocabulary), and the function that continues all rows, up to `tokens`
        tokens each.
        """
        ...


class FamilyPolicy:
    """A built-in model. It samples with a key-value cache; the prompt of a group passes through the model once."""

    name_prefix = ""

    def __init__(self, module: nn.Module, spec: ModelSpec, autocast: Autocast = nullcontext) -> None:
        self.module, self.spec, self.autocast = module.eval(), spec, autocast
        head = module.get_submodule("head")
        if not isinstance(head, HeadLoss):
            raise ConfigError(f"the head of the policy is {type(head).__name__}", "expected a built-in language model")
        self.head: HeadLoss = head
        self.decoder = module.get_submodule("decoder")
        self.separator: int | None = getattr(module, "separator", None)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        with self.autocast():
            return self.head.logits(self.decoder(tokens, document_ids(tokens, self.separator)))

    @contextmanager
    def decoding(self, prompt: Tensor, rows: int, tokens: int) -> Iterator[tuple[Tensor, NextLogits]]:
        self._check(prompt, tokens)
        position, device = len(prompt), prompt.device
        with with_cache(self.module, core_names(self.module, self.spec), position + tokens) as cache:
            first = self._last_logits(cache, CachePositions(0, position, device), prompt[None])
            cache.repeat(rows)

            def following(chosen: Tensor) -> Tensor:
                nonlocal position
                position += 1
                return self._last_logits(cache, CachePositions(position - 1, 1, device), chosen[:, None])

            yield first.repeat(rows, 1), following

    @torch.inference_mode()
    def _last_logits(self, cache: KeyValueCache, positions: CachePositions, tokens: Tensor) -> Tensor:
        cache.move_to(positions)
        with self.autocast():
            return self.head.logits(self.decoder(tokens)[:, -1])

    def _check(self, prompt: Tensor, tokens: int) -> None:
        vocab = self.spec.by_name["decoder.embedding.weight"].shape[0]
        if int(prompt.max()) >= vocab or int(prompt.min()) < 0:
            raise ConfigError(
                f"the prompt has token {int(prompt.max())}, and the model has {vocab} tokens",
                "expected prompts of the tokenizer of the model",
            )
        positions = self.spec.architecture.learned_positions if self.spec.architecture else 0
        if positions and len(prompt) + tokens > positions:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens and rl.completion_tokens = {tokens} exceed the {positions} "
                "positions of the model",
                f"try --rl.completion_tokens={max(1, positions - len(prompt))}",
            )


class ModulePolicy:
    """A user's module: token ids -> logits, or an output with `.logits`. A module that accepts `use_cache` and
    `past_key_values`, as those of transformers do, samples with its own cache; others compute the prefix again.
    """

    name_prefix = "model."

    def __init__(self, module: nn.Module, autocast: Autocast = nullcontext) -> None:
        self.module, self.autocast = module.eval(), autocast
        parameters = inspect.signature(module.forward).parameters
        self.has_cache = {"use_cache", "past_key_values"} <= parameters.keys()

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        with self.autocast():
            return logits_of(self.module(tokens))

    @contextmanager
    def decoding(self, prompt: Tensor, rows: int, tokens: int) -> Iterator[tuple[Tensor, NextLogits]]:  # noqa: ARG002
        seen = prompt.repeat(rows, 1)
        cache: Any = None

        @torch.no_grad()
        def last_logits(new: Tensor) -> Tensor:
            nonlocal cache
            with self.autocast():
                if not self.has_cache:
                    return logits_of(self.module(seen))[:, -1]
                output = self.module(new, use_cache=True, past_key_values=cache)
            cache = getattr(output, "past_key_values", None)
            if cache is None:  # it accepts the arguments, and has no cache: some wrappers do
                self.has_cache = False
            return logits_of(output)[:, -1]

        def following(chosen: Tensor) -> Tensor:
            nonlocal seen
            seen = torch.cat((seen, chosen[:, None]), dim=1)
            return last_logits(chosen[:, None])

        yield last_logits(seen), following


def logits_of(output: Any) -> Tensor:
    """The logits of the output of a user's module."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        found = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
        raise ConfigError(
            f"the model returns {found} for token ids of shape (rows, sequence)",
            "expected logits of shape (rows, sequence, vocabulary), or an output with .logits",
        )
    return logits
