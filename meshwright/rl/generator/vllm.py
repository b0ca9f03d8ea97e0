"""Samples groups with a vLLM server, over its OpenAI-compatible HTTP interface.

vLLM documents that `POST /v1/completions` takes token ids as the prompt and, with `return_token_ids`, returns
`token_ids` per choice; that log-probabilities are those at the temperature if the server was started with
`--logprobs-mode processed_logprobs`; and that VLLM_SERVER_DEV_MODE=1 adds `POST /collective_rpc` and
`POST /reset_prefix_cache`. The following is assumed, and an answer that contradicts it is refused where it shows: the
token ids of a choice have its stop token, choice i of a request has the seed of the request + i, and the worker method
`reload_weights` takes `weights_path`, a folder in the format of Hugging Face that the server can read.

The tokens of a seed are those of the server, and not those of the built-in sampler. The recorded log-probabilities are
still those of the scoring pass in this process.
"""

from __future__ import annotations

import http.client
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from meshwright.base.checkpoint.listing import checkpoint_folder
from meshwright.base.config import RunConfig
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.weights.export import Export, export_checkpoint
from meshwright.errors import ConfigError, MeshwrightError, cut_text
from meshwright.rl.generator.sampling import Completion, SamplingSettings, rollout_seed
from meshwright.rl.policies import POLICIES_FOLDER
from meshwright.rl.version import PolicyVersion

MAX_RESPONSE_BYTES = 256 << 20
READ_BYTES = 1 << 16
MAX_TOKEN = 2**31
ROUNDING = 1e-5
"""By how much a log-probability may exceed 0."""


class GenerationServerError(MeshwrightError):
    """A server does not answer, or its answer is not one that vLLM gives."""


class VllmSampler:
    """Samples with a vLLM server. It samples only from a version that it has loaded."""

    def __init__(self, url: str, model: str, timeout: float = 120.0, api_key: str = "") -> None:
        """`model` is the name under which the server serves the model; a request may take `timeout` seconds."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{url} is not the address of a server", "expected http://HOST:PORT")
        self.address, self.path, self.secure = parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), parts.scheme
        self.model, self.timeout = model, timeout
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.version: PolicyVersion | None = None
        """the policy version that the server has loaded"""

    def load(self, version: PolicyVersion, folder: Path) -> None:
        """Lets the server load the weights of an exported policy, and forget what it has cached of earlier ones."""
        self.version = None  # after an error it is unknown which weights the server has
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": self.timeout}
        self._post("/collective_rpc", reload)
        self._post("/reset_prefix_cache", None)
        self.version = version

    def sample_group(
        self, prompt: Sequence[int], group_size: int, settings: SamplingSettings, seed: int, group: int
    ) -> list[Completion]:
        """The completions of a prompt."""
        if self.version is None:
            raise GenerationServerError(
                f"group {group}: the server at {self.address} has not loaded a policy", "try load first"
            )
        request = {
            "model": self.model,
            "prompt": list(prompt),
            "n": group_size,
            "max_tokens": settings.tokens,
            "temperature": 0.0 if settings.greedy else settings.temperature,
            "seed": rollout_seed(seed, group, 0) % 2**62,  # the server adds the index of a choice
            "logprobs": 1,
            "return_token_ids": True,
            "stop_token_ids": sorted(settings.end_tokens),
            "ignore_eos": True,  # only the end tokens of the run end a completion
            # The server's own defaults, from the generation_config.json of the model, would change the distribution.
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        answer = self._post("/v1/completions", request)
        try:
            return read_completions(answer, group_size, settings)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise GenerationServerError(
                f"group {group}: the completions of the server at {self.address} are not valid: {error}",
                "expected a vLLM server with return_token_ids and --logprobs-mode processed_logprobs",
            ) from None

    def _post(self, path: str, content: Any) -> Any:
        """The answer to a request in JSON; None if it is empty."""
        body = b"" if content is None else json.dumps(content).encode()
        kind = http.client.HTTPSConnection if self.secure == "https" else http.client.HTTPConnection
        deadline = time.monotonic() + self.timeout
        connection = kind(self.address, timeout=self.timeout)
        try:
            connection.request("POST", self.path + path, body, self.headers)
            response = connection.getresponse()
            raw = read_bounded(response, deadline)
            if response.status != 200:
                text = cut_text(raw.decode("utf-8", "replace"), 500)
                raise GenerationServerError(f"{self.address}{path} answered {response.status}: {text}")
            return json.loads(raw) if raw.strip() else None
        except (OSError, http.client.HTTPException) as error:
            raise GenerationServerError(
                f"{self.address}{path} did not answer within {self.timeout:.0f} s: {type(error).__name__}: {error}",
                "try whether the server runs, or a longer timeout",
            ) from None
        except (ValueError, RecursionError):
            raise GenerationServerError(f"the answer of {self.address}{path} is not JSON") from None
        finally:
            connection.close()


def read_bounded(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The body of a response. A server that sends bytes slowly must not be waited for without end."""
    parts, size = [], 0
    while part := response.read1(READ_BYTES):
        parts.append(part)
        size += len(part)
        if size > MAX_RESPONSE_BYTES:
            raise OSError(f"the response has more than {MAX_RESPONSE_BYTES:,} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("the response is incomplete")
    return b"".join(parts)


def read_completions(answer: Any, group_size: int, settings: SamplingSettings) -> list[Completion]:
    """The completions in an answer, by their index. Raises ValueError, KeyError, TypeError or IndexError for an answer
    to another request.
    """
    choices = {choice["index"]: choice for choice in answer["choices"]}
    if len(answer["choices"]) != group_size or choices.keys() != set(range(group_size)):
        raise ValueError(f"{len(answer['choices'])} choices, expected {group_size}")
    return [read_completion(choices[index], settings) for index in range(group_size)]


def read_completion(choice: dict[str, Any], settings: SamplingSettings) -> Completion:
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if not isinstance(tokens, list) or not 0 < len(tokens) <= settings.tokens:
        raise ValueError(f"a choice without token ids, or with more than {settings.tokens}")
    if not all(type(token) is int and 0 <= token < MAX_TOKEN for token in tokens):
        raise ValueError("a token that is not a token id")
    if not isinstance(logprobs, list) or len(logprobs) != len(tokens):
        raise ValueError(f"{len(logprobs)} log-probabilities of {len(tokens)} tokens")
    if not all(type(value) in (int, float) and math.isfinite(value) and value <= ROUNDING for value in logprobs):
        raise ValueError("a log-probability that is not a number up to 0")
    ended = tokens[-1] in settings.end_tokens
    if settings.end_tokens & set(tokens[:-1]) or (not ended and len(tokens) != settings.tokens):
        raise ValueError("a choice that does not stop at its end token or limit")
    return Completion(np.array(tokens, np.int32), np.array(logprobs, np.float64), not ended)


def export_policy(run: RunFolder, version: PolicyVersion, to: Path, config: RunConfig) -> Export:
    """Writes a published policy, once it is verified, as a folder in the format of Hugging Face."""
    if run.url:
        raise ConfigError(
            f"the policies of {run.url} are in an object store, and a vLLM server reads a folder",
            "expected a run in a folder that the server can read",
        )
    policy = run.root / POLICIES_FOLDER / checkpoint_folder(version.step, version.timeline)
    return export_checkpoint(policy, to, config)
