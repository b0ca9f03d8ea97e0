"""A generator process: asks for groups, loads their policy, samples, scores, rewards, and sends each."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from socket import socket
from typing import Any

import torch

from meshwright.base.config import RLConfig
from meshwright.base.framing import receive, send
from meshwright.core import faults
from meshwright.core.parallel.world import device_type
from meshwright.errors import ConfigError, DataError, MeshwrightError
from meshwright.rl.generator.group import GroupPolicies, build_group
from meshwright.rl.generator.policy_model import PolicyModel
from meshwright.rl.generator.sampling import Completion, SamplingSettings
from meshwright.rl.generator.scoring import MicroBatchShape
from meshwright.rl.generator.vllm import VllmSampler, export_policy
from meshwright.rl.policies import PolicyStore, open_policy_store
from meshwright.rl.rewards.worker import CompletionText, RewardFailure, RewardWorker
from meshwright.rl.rollout import RolloutGroup
from meshwright.rl.service.learner import connect
from meshwright.rl.service.setup import RolloutSetup
from meshwright.rl.version import PolicyVersion

RETRY_SECONDS = 1.0
"""The pause before a group is sent again that could not be written, or a policy is asked for again."""


def run_generator(setup: RolloutSetup, name: str, number: int) -> None:
    """Generates groups until the service ends. With CUDA, the generators take the devices in turn."""
    torch.set_num_threads(setup.config.launch.threads)
    with RewardWorker(setup.reward) as worker:  # forked before this process opens a connection
        if device_type(setup.config.launch) == "cuda":
            torch.cuda.set_device(number % torch.cuda.device_count())
        generator = Generator(setup, name, worker)
        with connect(setup.address) as connection:
            send(connection, {"call": "hello", "generator": name})
            while True:
                send(connection, {"call": "assign"})
                answer, _ = receive(connection)
                generate_groups(generator, connection, answer)


def generate_groups(generator: Generator, connection: socket, answer: Mapping[str, Any]) -> None:
    """Generates the groups of an answer and sends each at once: the service writes one while the next is generated.
    Returns when all are durable or refused.
    """
    sent: dict[int, bytes] = {}
    shared = {"run": answer["run"], "reference": answer["reference"]}
    unavailable = False
    for assignment in answer["groups"]:
        try:
            group = generator.generate(assignment | shared)
        except MeshwrightError as error:
            final = isinstance(error, ConfigError | DataError)  # a bad prompt or model: that of every generator
            send(connection, {"call": "unavailable", "reason": str(error), "final": final})
            unavailable = True
            break
        sent[group.group] = group.encode()
        send(connection, {"call": "group"}, sent[group.group])
    while sent:
        verdicts = [receive(connection)[0] for _ in sent]
        again = {int(verdict["group"]) for verdict in verdicts if verdict["verdict"] == "retry"}
        sent = {number: content for number, content in sent.items() if number in again}
        if sent:
            time.sleep(RETRY_SECONDS)
        for content in sent.values():
            send(connection, {"call": "group"}, content)
    if unavailable:
        time.sleep(RETRY_SECONDS)


class Generator:
    """The models of a generator, and the version of the policy that it has."""

    def __init__(self, setup: RolloutSetup, name: str, worker: RewardWorker) -> None:
        self.setup, self.name, self.worker = setup, name, worker
        config = setup.config
        self.policies = open_policy_store(setup.folder)
        self.policy, self.version = setup.make_policy(), PolicyVersion(-1, -1)
        self.reference: PolicyModel | None = None
        self.server = open_server(config.rl)
        self.shape = MicroBatchShape(setup.batch.micro, config.data.sequence)
        end = setup.prompts.tokenizer.end
        self.sampling = SamplingSettings(
            config.rl.completion_tokens, config.rl.temperature, frozenset() if end is None else frozenset({end})
        )

    def generate(self, assignment: Mapping[str, Any]) -> RolloutGroup:
        """Generates the group of an assignment with the policy of its version."""
        config, group = self.setup.config, int(assignment["group"])
        faults.fail_point("generator.assigned", group)
        self.load(assignment)
        prompt = self.setup.prompts[int(assignment["prompt_id"])]

        def reward(completions: Sequence[Completion]) -> tuple[list[float], str]:
            texts = [self.setup.prompts.tokenizer.decode(completion.tokens.tolist()) for completion in completions]
            scored = [CompletionText(text, c.tokens.tolist()) for text, c in zip(texts, completions, strict=True)]
            result = self.worker.score(prompt.item, scored, config.rl.reward_timeout)
            return ([], result.text) if isinstance(result, RewardFailure) else (result, "")

        generated = build_group(
            GroupPolicies(self.policy, self.reference, self.server),
            group,
            int(assignment["prompt_id"]),
            self.version,
            prompt.tokens,
            config.rl.group_size,
            self.sampling,
            self.shape,
            config.seed,
            reward,
            self.name,
        )
        faults.fail_point("generator.generated", group)
        return generated

    def load(self, assignment: Mapping[str, Any]) -> None:
        """Loads the policy of an assignment, and the reference policy before the first one."""
        policies = PolicyStore(self.policies, str(assignment["run"]))
        if self.setup.config.rl.kl and self.reference is None:
            reference = self.setup.make_policy()
            policies.load(PolicyVersion.from_json(assignment["reference"]), reference)
            self.reference = reference
        version = PolicyVersion.from_json(assignment["version"])
        if version != self.version:
            self.version = PolicyVersion(-1, -1)  # until all weights are there
            policies.load(version, self.policy, str(assignment["digest"]))
            if self.server is not None:
                self._load_server(self.server, version)
            self.version = version

    def _load_server(self, server: VllmSampler, version: PolicyVersion) -> None:
        """Lets the server load a version from a folder that exists meanwhile."""
        folder = self.setup.address.parent / "exported"
        shutil.rmtree(folder, ignore_errors=True)
        export_policy(self.setup.folder, version, folder, self.setup.config)
        server.load(version, folder)
        shutil.rmtree(folder, ignore_errors=True)


def open_server(rl: RLConfig) -> VllmSampler | None:
    """The vLLM server that samples for this generator; its key is in the environment, never in a run file."""
    if not rl.vllm_url:
        return None
    return VllmSampler(rl.vllm_url, rl.vllm_model, rl.generator_timeout, os.environ.get("VLLM_API_KEY", ""))
