"""The settings of online reinforcement learning: task, rollouts, objective, and how stale a rollout may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from meshwright.base.config.constraints import (
    PLACEMENT,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    TimeoutSeconds,
)

TASK_NAMES = ("arithmetic", "strings", "logic")
"""The tasks that are built in; any other name is that of a user's prompts."""


@dataclass(frozen=True)
class RLConfig:
    """Online reinforcement learning: generator processes sample rollouts from the policy, and the ranks train on them.

    A *group* has `group_size` rollouts of one prompt. A step trains on `batch.global` rollouts, which are whole groups.
    """

    objective: Literal["none", "grpo", "policy_gradient"] = "none"
    """none: the run trains on samples; grpo: clipped ratio and advantages relative to the group; policy_gradient:
    REINFORCE with the mean reward of the group as its baseline
    """
    task: str = "arithmetic"
    """task with a verifiable reward: arithmetic, strings or logic; with prompts of your own (--source), its name"""
    level: Annotated[int, Range(minimum=1, maximum=9)] = 1
    """difficulty of the task"""
    group_size: Annotated[int, Range(minimum=2, maximum=4096)] = 8
    """rollouts per prompt"""
    completion_tokens: PositiveInt = 16
    """most tokens that are generated after a prompt; the prompt has the rest of data.sequence"""
    temperature: PositiveFloat = 1.0
    """temperature of sampling; the objective uses the log-probabilities of the same distribution"""
    staleness: Annotated[int, Range(minimum=0, maximum=1024)] = 0
    """most steps by which the policy of a rollout may be older than the one that trains on it; 0: synchronous, 1:
    one step off, more: asynchronous
    """
    policy: Literal["newest", "fixed"] = "newest"
    """which policy generates a group: newest, the newest published one; fixed, the oldest that may generate it, which
    makes the rollouts of every step a function of the seed
    """
    clip: PositiveFloat = 0.2
    """grpo: the ratio of probabilities is clipped to 1 - clip and 1 + clip_high"""
    clip_high: PositiveFloat | None = None
    """grpo: upper side of the clipping; unset: that of clip"""
    kl: Annotated[float, Range(minimum=0, maximum=1e6)] = 0.0
    """weight of the KL divergence from the reference policy, which has the initial weights of the run; 0: none"""
    importance_cap: Annotated[float, Range(minimum=0, maximum=1e6)] = 2.0
    """truncation of the importance weights that correct the difference between the log-probabilities of the generator's
    sampler and those of the learner; 0: no correction
    """
    normalization: Literal["token", "sequence"] = "token"
    """token: every token has the same weight in the loss; sequence: every rollout has the same weight"""
    scale_rewards: bool = True
    """grpo: divide the advantages of a group by the standard deviation of its rewards"""
    dynamic_sampling: bool = True
    """leave out groups whose rewards are all equal, which have no gradient, and train on the next ones"""
    filter_budget: PositiveInt = 1000
    """groups left out in a row after which the run stops"""
    reward_timeout: TimeoutSeconds = 10.0
    """seconds that the reward of a group may take; a group without a reward is left out"""
    generators: Annotated[int, Range(minimum=1, maximum=1024), PLACEMENT] = 1
    """generator processes of the run; it may continue with another number of them"""
    vllm_url: Annotated[str, PLACEMENT] = ""
    """address of a vLLM server on this machine that samples for the generator, such as http://127.0.0.1:8000; empty:
    the generators sample themselves. The log-probabilities of the objective are those of the scoring pass in any case
    """
    vllm_model: Annotated[str, PLACEMENT] = "policy"
    """name under which the vLLM server serves the model"""
    generator_timeout: Annotated[TimeoutSeconds, PLACEMENT] = 120.0
    """seconds that the generation of a group may take, after which another generator generates it"""
    segment_bytes: Annotated[NonNegativeInt, PLACEMENT] = 64 << 20
    """size of a file of the rollout log in bytes, after which the next one begins"""

    @property
    def enabled(self) -> bool:
        return self.objective != "none"

    @property
    def has_task(self) -> bool:
        """Whether the prompts of the run are those of a built-in task."""
        return self.enabled and self.task in TASK_NAMES

    @property
    def measured_names(self) -> tuple[str, ...]:
        """The names of what the objective measures at every step beside the loss."""
        if not self.enabled:
            return ()
        clipped = ("clip_share",) if self.objective == "grpo" else ()
        return ("entropy", "ratio", "approx_kl", *clipped, *(("kl",) if self.kl else ()))
