"""A rollout and the group that it belongs to, and their encoding as bytes. Torch-free."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.rl.version import PolicyVersion

Tokens = NDArray[np.int32]
LogProbs = NDArray[np.float64]

MAX_GROUP_SIZE = 4096
MAX_TOKENS = 1 << 24
MAX_TEXT = 2000
MAX_HEADER_BYTES = 1 << 20
HEADER_LENGTH = struct.Struct("<I")


class InvalidRollout(ValueError):
    """Bytes that are not an encoded group."""


@dataclass(frozen=True)
class Rollout:
    """One completion of a prompt."""

    tokens: Tokens
    """the generated tokens, with the end token if there is one"""
    sampler_logprobs: LogProbs
    """log-probability of each token as the sampler computed it, token by token with a key-value cache"""
    logprobs: LogProbs
    """log-probability of each token by a scoring pass: the forward pass of the learner, with the same weights"""
    reference_logprobs: LogProbs
    """log-probability of each token under the reference policy; empty if the objective does not use it"""
    reward: float
    """NaN if the reward could not be computed"""
    truncated: bool = False
    """whether the completion has reached its limit before an end token"""

    def __post_init__(self) -> None:
        lengths = {len(self.sampler_logprobs), len(self.logprobs), len(self.reference_logprobs) or len(self.tokens)}
        if lengths != {len(self.tokens)} or not len(self.tokens):
            raise InvalidRollout("a rollout has arrays of different lengths, or no token")


@dataclass(frozen=True)
class RolloutGroup:
    """The rollouts of one prompt, which one generator has sampled from one policy version."""

    group: int
    """number of the group: its position in the stream of prompts"""
    prompt_id: int
    """sample id of the prompt"""
    version: PolicyVersion
    prompt: Tokens
    rollouts: tuple[Rollout, ...]
    generator: str = ""
    """which generator sampled it"""
    failure: str = ""
    """why the group has no rewards; empty if it has"""

    @property
    def tokens(self) -> int:
        """The number of generated tokens."""
        return sum(len(rollout.tokens) for rollout in self.rollouts)

    @property
    def has_signal(self) -> bool:
        """Whether its rewards differ, so that its advantages are not all zero."""
        return len({rollout.reward for rollout in self.rollouts}) > 1

    @property
    def failed(self) -> bool:
        return bool(self.failure) or not all(math.isfinite(rollout.reward) for rollout in self.rollouts)

    def rollout_id(self, index: int) -> str:
        """The id of a rollout, such as `12.3@1.7`: group 12, rollout 3, policy of timeline 1 after 7 steps."""
        return f"{self.group}.{index}@{self.version}"

    def encode(self) -> bytes:
        """The group as bytes: the length of a header in JSON, the header, and the arrays."""
        header = {
            "group": self.group,
            "prompt_id": self.prompt_id,
            "version": self.version.to_json(),
            "prompt": len(self.prompt),
            "generator": self.generator[:MAX_TEXT],
            "failure": self.failure[:MAX_TEXT],
            "lengths": [len(rollout.tokens) for rollout in self.rollouts],
            "reference": [bool(len(rollout.reference_logprobs)) for rollout in self.rollouts],
            "rewards": [rollout.reward if math.isfinite(rollout.reward) else None for rollout in self.rollouts],
            "truncated": [rollout.truncated for rollout in self.rollouts],
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        arrays: list[NDArray[Any]] = [self.prompt.astype("<i4")]
        for rollout in self.rollouts:
            logprobs = (rollout.sampler_logprobs, rollout.logprobs, rollout.reference_logprobs)
            arrays += [rollout.tokens.astype("<i4"), *(array.astype("<f8") for array in logprobs)]
        return HEADER_LENGTH.pack(len(text)) + text + b"".join(array.tobytes() for array in arrays)

    @classmethod
    def decode(cls, content: bytes) -> RolloutGroup:
        """Raises InvalidRollout for bytes that `encode` does not write; they may come from an untrusted file."""
        try:
            header, position = read_header(content)
            reader = ArrayReader(content, position)
            prompt = reader.integers(header["prompt"])
            lengths, references = header["lengths"], header["reference"]
            rewards, truncated = header["rewards"], header["truncated"]
            if not 0 < len(lengths) <= MAX_GROUP_SIZE:
                raise InvalidRollout(f"a group has {len(lengths)} rollouts")
            rollouts = []
            for length, reference, reward, cut in zip(lengths, references, rewards, truncated, strict=True):
                tokens = reader.integers(length)
                sampled, scored = reader.floats(length), reader.floats(length)
                of_reference = reader.floats(length if reference is True else 0)
                value = math.nan if reward is None else float(reward)
                rollouts.append(Rollout(tokens, sampled, scored, of_reference, value, cut is True))
            if reader.position != len(content):
                raise InvalidRollout("a group is followed by other bytes")
            version = PolicyVersion.from_json(header["version"])
            numbers = (header["group"], header["prompt_id"])
            if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
                raise InvalidRollout("a group has a number out of range")
            texts = (str(header["generator"])[:MAX_TEXT], str(header["failure"])[:MAX_TEXT])
            return cls(*numbers, version, prompt, tuple(rollouts), *texts)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidRollout(f"not the record of a group: {error}") from None


def read_header(content: bytes) -> tuple[dict[str, Any], int]:
    if len(content) < HEADER_LENGTH.size:
        raise InvalidRollout("a group without a header")
    (length,) = HEADER_LENGTH.unpack_from(content)
    if length > min(MAX_HEADER_BYTES, len(content) - HEADER_LENGTH.size):
        raise InvalidRollout("a header that is longer than the group")
    end = HEADER_LENGTH.size + length
    header = json.loads(content[HEADER_LENGTH.size : end])
    if not isinstance(header, dict):
        raise InvalidRollout("a header that is not a record")
    return header, end


@dataclass
class ArrayReader:
    """Reads arrays from bytes, one after the other."""

    content: bytes
    position: int

    def integers(self, count: Any) -> Tokens:
        values = self._take(count, "<i4")
        if len(values) and values.min() < 0:
            raise InvalidRollout("a token id is negative")
        return values.astype(np.int32)

    def floats(self, count: Any) -> LogProbs:
        values = self._take(count, "<f8")
        if not np.isfinite(values).all():
            raise InvalidRollout("a log-probability is not finite")
        return values.astype(np.float64)

    def _take(self, count: Any, dtype: str) -> NDArray[Any]:
        size = np.dtype(dtype).itemsize
        if type(count) is not int or not 0 <= count <= MAX_TOKENS:
            raise InvalidRollout("an array has a length out of range")
        if self.position + count * size > len(self.content):
            raise InvalidRollout("a group ends before its last array")
        array = np.frombuffer(self.content, dtype, count, self.position)
        self.position += count * size
        return array
