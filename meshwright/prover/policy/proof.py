"""The proof of a run of reinforcement learning: its checks, and what they leave open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshwright.base.config import RunConfig
from meshwright.errors import ConfigError
from meshwright.prover.claims import Claim
from meshwright.prover.custom.family_model import has_reference
from meshwright.prover.initialization import check_initialization
from meshwright.prover.optimizer_updates import check_optimizer
from meshwright.prover.policy.logprobs import check_logprobs
from meshwright.prover.policy.objective import MARGINS, check_objective
from meshwright.prover.policy.rollouts import check_rollouts
from meshwright.prover.relations import check_relations_of_config
from meshwright.prover.schedule import check_schedule
from meshwright.prover.shrink.coverage import INITIAL_WEIGHTS
from meshwright.prover.state.large_files import check_large_files
from meshwright.prover.state.shard_regions import check_real_layout
from meshwright.prover.stream.checked_stream import CheckedStream, WrongStream
from meshwright.prover.stream.epochs import check_epochs
from meshwright.prover.stream.order import check_order
from meshwright.rl.tasks.prompt_source import open_prompt_source
from meshwright.rl.tasks.registry import TASKS

STREAM_CLAIMS: dict[str, Callable[[CheckedStream], str]] = {
    "the prompt of a group is the one that the seed defines": check_order,
    "an epoch contains each prompt once, and each epoch has its own order": check_epochs,
}
NOT_APPLICABLE = (
    "stream: slices of ranks, workers and held-out samples do not apply: the run reads prompts, one per group, and no "
    "samples",
    "training: updates and evaluations on samples do not apply: the run trains on rollouts, whose gradient the check "
    "objective compares",
    "communication: the bytes of a run with rl.objective are not counted",
    "recovery: quarantined samples do not apply; damaged checkpoints and a restart on another layout are not proven "
    "with rl.objective",
)


def require_built_in_policy(config: RunConfig, given: Mapping[str, Any]) -> None:
    """Raises a ConfigError for a run of reinforcement learning with code of the user's, which `prove` cannot shrink."""
    own = sorted(name for name, value in given.items() if value is not None)
    if not config.rl.enabled:
        return
    if own or config.rl.task not in TASKS:
        what = ", ".join(own) or f"rl.task = {config.rl.task}"
        raise ConfigError(
            f"prove with rl.objective = {config.rl.objective} and {what} of your own is unsupported: the proof runs "
            "shrink model and prompts",
            f"try a built-in model with rl.task = {' or '.join(sorted(TASKS))}",
        )


def policy_checks(config: RunConfig) -> dict[str, Callable[[RunConfig, bool], Iterator[Claim]]]:
    """Name -> check of a run with rl.objective."""
    checks: dict[str, Callable[[RunConfig, bool], Iterator[Claim]]] = {
        "stream": lambda config, _full: check_prompt_stream(config),
        "schedule": lambda config, _full: check_schedule(config),
        "optimizer": lambda config, _full: check_optimizer(config),
        "log-probabilities": lambda config, _full: check_logprobs(config),
        "rollouts": lambda config, _full: check_rollouts(config),
        "recovery": lambda config, _full: check_checkpoint_files(config),
    }
    if has_reference(config):
        checks["model"] = lambda config, _full: check_model(config)
        checks["objective"] = lambda config, _full: check_objective(config)
    return {name: checks[name] for name in ORDER if name in checks}


ORDER = ("stream", "model", "schedule", "optimizer", "objective", "log-probabilities", "rollouts", "recovery")


def check_prompt_stream(config: RunConfig) -> Iterator[Claim]:
    """The prompt stream is a stream: the same claims about its order, with the prompts as samples."""
    checked = CheckedStream.open(config, [open_prompt_source(config)])
    for claim, check in STREAM_CLAIMS.items():
        try:
            yield Claim(claim, True, check(checked))
        except WrongStream as difference:
            yield Claim(claim, False, str(difference))


def check_model(config: RunConfig) -> Iterator[Claim]:
    yield from check_relations_of_config(config)
    yield from check_initialization(config)


def check_checkpoint_files(config: RunConfig) -> Iterator[Claim]:
    """What does not depend on what a step trains."""
    yield check_real_layout(config)
    yield check_large_files()


def policy_not_proven(config: RunConfig) -> list[str]:
    """One sentence for everything that the checks leave open."""
    sentences = [*NOT_APPLICABLE]
    if not has_reference(config):
        sentences.append(f"objective: model.family = {config.model.family} or LoRA has no independent reference")
    elif config.precision.float8 or config.precision.compute not in ("fp64", *MARGINS):
        sentences.append(f"objective: rounding in {config.precision.compute} (proven in float64)")
    if config.rl.policy == "newest" and config.rl.staleness:
        sentences.append(
            "rollouts: one digest with rl.policy = newest: which policy generates a group depends on time (the killed "
            "run has rl.policy = fixed)"
        )
    sentences.append(f"the reward of rl.task = {config.rl.task}: the proof runs reward a digest of the completion")
    return sentences + ([INITIAL_WEIGHTS] if config.init_from else [])
