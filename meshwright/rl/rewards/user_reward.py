"""Opens the reward of a run: that of its task, or a user's function."""

from __future__ import annotations

from meshwright.base.config import RunConfig
from meshwright.base.user_code.user_code import UserCode
from meshwright.errors import ConfigError
from meshwright.rl.rewards.reward_function import RewardFunction, takes_tokens
from meshwright.rl.tasks.answer_reward import answer_reward


def open_reward(config: RunConfig, user: UserCode) -> RewardFunction | None:
    """The reward function of the run; None without rl.objective. Raises a ConfigError if it is missing or unused."""
    if not config.rl.enabled:
        if user.reward is not None:
            raise ConfigError(
                "a reward is given, and rl.objective = none: the run has no completions",
                "try rl.objective = grpo, or no reward",
            )
        return None
    if user.reward is None:
        if user.source is not None:
            raise ConfigError(
                "rl.objective is set, and prompts of your own are given without a reward",
                "try --reward MODULE:NAME, or rl.task without prompts of your own",
            )
        return answer_reward
    takes_tokens(user.reward)
    return user.reward
