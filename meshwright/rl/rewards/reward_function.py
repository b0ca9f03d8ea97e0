"""Reward functions: how they are called, and which results are rewards. Torch-free.

A reward function is `fn(item, completion)` or `fn(item, completion, tokens)`: the item of the prompt, the text of the
completion without its end token, and its token ids with it. It returns a finite number.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.errors import ConfigError, describe_exception, user_location

RewardFunction = Callable[..., Any]
"""fn(item, completion) or fn(item, completion, tokens) -> a finite number"""
EXPECTED = "expected a function of (item, completion) or (item, completion, tokens) that returns a number"
MAX_FAILURE = 1000
"""Characters of the text of a failure."""


class InvalidReward(ValueError):
    """What a reward function returned is not a reward."""


def takes_tokens(function: RewardFunction) -> bool:
    """Whether a reward function has a third argument. Raises a ConfigError if it is not a reward function."""
    if not callable(function):
        raise ConfigError(f"the reward is a {type(function).__name__}", EXPECTED)
    if isinstance(function, type):
        raise ConfigError(f"the reward {function.__qualname__} is a class", f"{EXPECTED}, or an instance of the class")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions of C have none
        return False
    for arguments in (2, 3):
        try:
            signature.bind(*range(arguments))
        except TypeError:
            continue
        return arguments == 3 or has_third_argument(signature)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    raise ConfigError(f"the reward {name}{signature} cannot be called with (item, completion)", EXPECTED)


def has_third_argument(signature: inspect.Signature) -> bool:
    """Whether the third argument of a function that needs two is `tokens`; others are settings with a default."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind in positional]
    return names[2:3] == ["tokens"]


def reward_of(function: RewardFunction, item: Any, text: str, tokens: Sequence[int], with_tokens: bool) -> float:
    """Calls a reward function. Raises InvalidReward if the result is not a finite number."""
    value = function(item, text, list(tokens)) if with_tokens else function(item, text)
    # Text and None have no __float__; arrays and tensors of several values do.
    if not hasattr(type(value), "__float__") or tuple(getattr(value, "shape", ())):
        raise InvalidReward(f"the reward is a {type(value).__name__}, expected a number")
    reward = float(value)
    if not math.isfinite(reward):
        raise InvalidReward(f"the reward is {reward}, expected a finite number")
    return reward


def describe_failure(error: BaseException, index: int) -> str:
    """Why a completion has no reward, in one line."""
    text = " ".join(describe_exception(error).split())
    if not isinstance(error, InvalidReward):
        where = user_location(error)
        text = f"the reward raised {type(error).__name__}: {text}" + (f" ({where})" if where else "")
    return f"{text[:MAX_FAILURE]}, for completion {index} of the group"
