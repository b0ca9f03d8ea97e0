"""Checks a user's model as a policy before a run starts: token ids of the prompts -> logits of every position."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.base.config import RunConfig
from meshwright.core.launch.first_batch_check import check_in_process
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.errors import ConfigError, describe_exception, user_location
from meshwright.rl.generator.policy_model import ModulePolicy

ROWS = 2
EXPECTED = (
    "expected logits of shape (rows, sequence, vocabulary), or an output with .logits, and model.vocab of the model"
)


def check_policy(custom: CustomModel, config: RunConfig, vocab: int) -> None:
    """Raises a ConfigError if the model is no policy for the prompts of a run, whose tokenizer has `vocab` tokens. The
    forward pass runs in a process of its own; a model on the meta device has no values to run it with.
    """
    if custom.on_meta():
        return
    timeout = config.launch.hang_timeout
    check_in_process(run_check, "first forward pass", timeout, custom, config, min(vocab, config.model.vocab))


def run_check(_world: Any, custom: CustomModel, config: RunConfig, vocab: int) -> None:
    torch.set_num_threads(config.launch.threads)
    tokens = (torch.arange(ROWS * config.data.sequence) % vocab).view(ROWS, -1)
    tokens[0, 0] = vocab - 1  # a short row may not have it
    try:
        logits = ModulePolicy(custom.module).logits(tokens)
    except ConfigError:
        raise
    except Exception as error:
        where = user_location(error)
        raise ConfigError(
            f"the model raised {type(error).__name__} for token ids from 0 to {vocab - 1} of shape "
            f"{tuple(tokens.shape)}: {describe_exception(error)}" + (f" ({where})" if where else ""),
            EXPECTED,
        ) from error
    if logits.shape[:2] != tokens.shape or logits.shape[2] < vocab:
        raise ConfigError(
            f"the model returns logits of shape {tuple(logits.shape)} for token ids of shape {tuple(tokens.shape)}, "
            f"and the tokenizer of the prompts has {vocab} tokens",
            EXPECTED,
        )
