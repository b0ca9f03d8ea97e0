"""Runs whose rollouts a vLLM server samples."""

from __future__ import annotations

import copy
import json

import pytest

from meshwright import train
from meshwright.errors import ConfigError
from tests.kit.vllm_server import ANSWERS, serving
from tests.rl.rl_runs import rank_events, rl_config


def test_run_samples_with_the_server_and_loads_every_policy_before_its_groups(tmp_path):
    answer = copy.deepcopy(ANSWERS["completions"])
    answer["choices"] = [copy.deepcopy(choice) for choice in answer["choices"] * 2]
    for index, choice in enumerate(answer["choices"]):
        tokens = [20 + index, 0] if index % 2 else [21, 22, 23]
        choice |= {"index": index, "token_ids": tokens, "finish_reason": "stop" if index % 2 else "length"}
        choice["logprobs"]["token_logprobs"] = [-1.0] * len(tokens)
    with serving() as server:
        server.answers["/v1/completions"] = (200, json.dumps(answer).encode())
        config = rl_config(f"--rl.vllm_url={server.url}", "--rl.dynamic_sampling=false", steps=2)
        result = train(config, run=tmp_path / "run", quiet=True)
    assert result.steps == 2
    paths = [path for path, _, _ in server.requests]
    load = ["/collective_rpc", "/reset_prefix_cache"]
    assert paths == [*load, *["/v1/completions"] * 2, *load, *["/v1/completions"] * 2]
    assert [event["mismatch"]["max_difference"] > 0.1 for event in rank_events(tmp_path / "run", "rollouts")] == [
        True
    ] * 2


def test_several_generators_cannot_share_a_server(tmp_path):
    with pytest.raises(ConfigError, match=r"rl\.generators = 2 with rl\.vllm_url"):
        train(rl_config("--rl.vllm_url=http://127.0.0.1:1", "--rl.generators=2"), run=tmp_path / "run", quiet=True)
