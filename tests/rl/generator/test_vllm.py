"""The vLLM sampler against a local server that gives answers in the format of vLLM's API.

vllm_answers.json was written by the fields that vLLM documents; it was not recorded from a running server.
"""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from meshwright.base.checkpoint.listing import RunLineage
from meshwright.base.config import RunConfig, config_to_dict
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.checkpoint.state import collect_state
from meshwright.core.parallel.world import World
from meshwright.errors import ConfigError
from meshwright.rl.generator import vllm
from meshwright.rl.generator.group import GroupPolicies, build_group
from meshwright.rl.generator.sampling import SamplingSettings
from meshwright.rl.generator.scoring import MicroBatchShape
from meshwright.rl.generator.vllm import GenerationServerError, VllmSampler, export_policy
from meshwright.rl.policies import PolicyPublisher, open_policy_store
from meshwright.rl.version import PolicyVersion
from tests.kit.small_policies import LLAMA, PROMPT, family_policy
from tests.kit.vllm_server import ANSWERS, FakeServer, serving

SETTINGS = SamplingSettings(4, 0.7, frozenset({9}))
VERSION = PolicyVersion(1, 3)


@pytest.fixture
def server():
    with serving() as fake:
        yield fake


def loaded(server: FakeServer, timeout: float = 20.0) -> VllmSampler:
    sampler = VllmSampler(server.url, "policy", timeout, api_key="secret")
    sampler.load(VERSION, Path("/exports/1.3"))
    return sampler


def sample(sampler: VllmSampler, group_size: int = 2):
    return sampler.sample_group(PROMPT, group_size, SETTINGS, seed=0, group=5)


def test_completions_have_the_tokens_and_logprobs_of_the_answer(server):
    ended, cut = sample(loaded(server))
    assert (ended.tokens.tolist(), ended.truncated) == ([16, 17, 9], False)
    assert ended.sampler_logprobs.tolist() == [-0.5108256, -1.2039728, -0.1053605]
    assert (cut.tokens.tolist(), cut.truncated) == ([22] * 4, True)


def test_request_asks_for_the_distribution_of_the_run_alone(server):
    sample(loaded(server))
    path, request, key = server.requests[-1]
    assert (path, key) == ("/v1/completions", "Bearer secret")
    assert request["prompt"] == PROMPT
    assert (request["n"], request["max_tokens"], request["temperature"]) == (2, 4, 0.7)
    assert (request["stop_token_ids"], request["ignore_eos"], request["return_token_ids"]) == ([9], True, True)
    assert (request["top_p"], request["top_k"], request["min_p"], request["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert 0 <= request["seed"] < 2**62
    seed = request["seed"]
    loaded(server).sample_group(PROMPT, 2, SETTINGS, seed=0, group=6)
    assert server.requests[-1][1]["seed"] != seed


def test_load_reloads_weights_and_resets_the_prefix_cache(server):
    assert loaded(server).version == VERSION
    (first, request, _), (second, _, _) = server.requests
    assert (first, second) == ("/collective_rpc", "/reset_prefix_cache")
    assert request["method"] == "reload_weights"
    assert request["kwargs"] == {"weights_path": "/exports/1.3"}


def test_server_without_a_loaded_policy_is_refused(server):
    with pytest.raises(GenerationServerError, match="has not loaded a policy"):
        sample(VllmSampler(server.url, "policy"))
    sampler = loaded(server)
    server.answers["/collective_rpc"] = (500, b"no such folder")
    with pytest.raises(GenerationServerError, match="answered 500: no such folder"):
        sampler.load(PolicyVersion(1, 4), Path("/exports/1.4"))
    with pytest.raises(GenerationServerError, match="has not loaded a policy"):
        sample(sampler)


def with_choice(**fields) -> dict:
    answer = copy.deepcopy(ANSWERS["completions"])
    answer["choices"][0] |= fields
    return answer


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        {"choices": ANSWERS["completions"]["choices"][:1]},
        with_choice(index=1),
        with_choice(token_ids=None),
        with_choice(token_ids=[16, 17]),
        with_choice(token_ids=[16, -1, 9]),
        with_choice(token_ids=[9, 17, 16]),
        with_choice(token_ids=[16, True, 9]),
        with_choice(logprobs=None),
        with_choice(logprobs={"token_logprobs": [-0.1, None, -0.1]}),
        with_choice(logprobs={"token_logprobs": [-0.1, 0.5, -0.1]}),
        with_choice(logprobs={"token_logprobs": [-0.1, float("nan"), -0.1]}),
        with_choice(token_ids=[16, 17, 17], finish_reason="stop"),
    ],
)
def test_answer_that_does_not_fit_the_request_is_refused(server, answer):
    sampler = loaded(server)
    server.answers["/v1/completions"] = (200, json.dumps(answer).encode())
    with pytest.raises(GenerationServerError, match=r"group 5: the completions of the server at .* are not valid"):
        sample(sampler)


def test_answer_that_is_not_json_is_refused(server):
    sampler = loaded(server)
    server.answers["/v1/completions"] = (200, b"<html>")
    with pytest.raises(GenerationServerError, match="is not JSON"):
        sample(sampler)


def test_answer_is_bounded(server, monkeypatch):
    sampler = loaded(server)
    monkeypatch.setattr(vllm, "MAX_RESPONSE_BYTES", 100)
    with pytest.raises(GenerationServerError, match="more than 100 bytes"):
        sample(sampler)


def test_server_that_hangs_is_given_up(server):
    sampler = loaded(server)
    sampler.timeout = 0.3
    server.hangs.set()
    with pytest.raises(GenerationServerError, match="did not answer within"):
        sample(sampler)


def test_server_that_is_gone_is_named():
    with pytest.raises(GenerationServerError, match=r"127\.0\.0\.1:9/collective_rpc did not answer"):
        VllmSampler("http://127.0.0.1:9", "policy", 2.0).load(VERSION, Path("/exports"))


def test_exported_policy_has_the_weights_of_its_version(tmp_path):
    """The newer version of the same step, on another timeline, is not the one that is exported."""
    wanted, other = family_policy(seed=1), family_policy(seed=2)
    identity = {f"model.{key}": value for key, value in config_to_dict(RunConfig(model=LLAMA))["model"].items()}
    for policy, timeline in ((wanted, 1), (other, 2)):
        state = collect_state(policy.module, dict(policy.module.named_parameters()), {})
        fields = {"layout": {}, "identity": identity, "made_by": {}}
        lineage, store = RunLineage("0123abcd", 1, {}), open_policy_store(RunFolder(tmp_path), create=True)
        publisher = PolicyPublisher(store, World(), lineage, timeline, fields, partial(dict, state))
        publisher.publish(PolicyVersion(timeline, 3))
        publisher.close()
    export_policy(RunFolder(tmp_path), VERSION, tmp_path / "export", RunConfig(model=LLAMA))
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert torch.equal(exported["model.embed_tokens.weight"], wanted.module.get_parameter("decoder.embedding.weight"))


@pytest.mark.parametrize("url", ["ftp://host", "host:8000", "http://", "http://host?x=1"])
def test_address_that_is_no_server_is_refused(url):
    with pytest.raises(ConfigError, match="is not the address of a server"):
        VllmSampler(url, "policy")


def test_group_of_a_server_is_scored_by_the_policy(server):
    policies = GroupPolicies(family_policy(), sampler=loaded(server))
    shape, reward = MicroBatchShape(2, 8), lambda completions: ([1.0, 0.0], "")
    group = build_group(policies, 5, 0, VERSION, PROMPT, 2, SETTINGS, shape, 0, reward)
    row = [*PROMPT, 16, 17, 9]
    logprobs = (family_policy().logits(torch.tensor([row])) / 0.7).log_softmax(-1)[0]
    expected = [logprobs[position, row[position + 1]].item() for position in (3, 4, 5)]
    np.testing.assert_allclose(group.rollouts[0].logprobs, expected, rtol=1e-4)
    assert group.rollouts[0].sampler_logprobs[0] == -0.5108256
