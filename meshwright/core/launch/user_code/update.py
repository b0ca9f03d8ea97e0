"""Opens the optimizer and the schedule that a user passes to `train`: both are examined before ranks start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshwright.base.config import OptimizerConfig, RunConfig
from meshwright.base.environment import started_by_torchrun
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.optimizer_state import CUSTOM, RULES
from meshwright.base.topology.parameter_shards import uses_ddp
from meshwright.base.user_code.entry_points import describe_user_error
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.launch.ranks import cuda_started, run_ranks
from meshwright.core.launch.user_code.code_record import build_update_record, training_functions
from meshwright.core.optim.check_user_optimizer import UserOptimizerFacts, examine_optimizer
from meshwright.core.optim.schedule import check_schedule
from meshwright.core.optim.user_update import UserUpdate
from meshwright.core.parallel.world import World
from meshwright.errors import ConfigError


def open_user_update(config: RunConfig, user: UserCode, layout: Layout) -> tuple[RunConfig, UserUpdate]:
    """Returns the config that records the user's optimizer and schedule, and both. Raises a ConfigError if the run
    cannot use them, or if the config is of a run that had one and none is given.
    """
    if user.optimizer is not None:
        config = replace(config, optimizer=custom_optimizer(config.optimizer, user.optimizer, layout))
    elif config.optimizer.kind == CUSTOM:
        raise missing("optimizer", config.optimizer.factory)
    if user.schedule is not None:
        call_user_code("schedule", check_schedule, user.schedule, config.steps)
        schedule = replace(config.schedule, kind=CUSTOM, function=name_of(user.schedule))
        config = replace(config, schedule=schedule)
    elif config.schedule.kind == CUSTOM:
        raise missing("schedule", config.schedule.function)
    given = any(function is not None for function in training_functions(user).values())
    code = build_update_record(user) if given else None
    return config, UserUpdate(user.optimizer, user.schedule, code)


def custom_optimizer(config: OptimizerConfig, factory: Any, layout: Layout) -> OptimizerConfig:
    """The settings that record the user's optimizer."""
    if not callable(factory):
        raise ConfigError(
            f"the optimizer is a {type(factory).__name__}", "expected a function of parameter groups that returns one"
        )
    name = name_of(factory)
    facts = examine(factory, config)
    if facts.not_elementwise and layout.ranks > 1 and not uses_ddp(layout):
        raise ConfigError(
            f"the optimizer {name} is not elementwise: {facts.not_elementwise}, and the layout {layout} divides "
            "tensors or parameters among ranks",
            "try layout.shard = none without tensor, pipeline and expert parallelism, or optimizer.kind = "
            + " or ".join(kind for kind, rule in RULES.items() if not rule.elementwise),
        )
    return replace(config, kind=CUSTOM, factory=name, state=facts.state)


def examine(factory: Any, config: OptimizerConfig) -> UserOptimizerFacts:
    """Examines the optimizer, in a process of its own where ranks are forked from this one: torch's optimizers
    initialize CUDA, which does not survive a fork.
    """
    if started_by_torchrun() or cuda_started():
        found = examine_or_error(None, factory, config)
    else:
        [found] = run_ranks(examine_or_error, 1, factory, config)
    if isinstance(found, UserOptimizerFacts):
        return found
    raise ConfigError(*found)


def examine_or_error(
    _world: World | None, factory: Any, config: OptimizerConfig
) -> UserOptimizerFacts | tuple[str, str]:
    """What the examination finds, or the error and its hint."""
    try:
        facts: UserOptimizerFacts = call_user_code("optimizer", examine_optimizer, factory, config)
        return facts
    except ConfigError as error:
        return error.message, error.hint


def call_user_code(argument: str, check: Callable[..., Any], function: Any, *args: Any) -> Any:
    """Calls a check of a user's function; an exception in the function is a ConfigError."""
    try:
        return check(function, *args)
    except ConfigError:
        raise
    except Exception as error:
        expected = {
            "optimizer": "a function of parameter groups that returns a torch.optim.Optimizer, with step() without "
            "arguments",
            "schedule": "a function of (step, steps) that returns a number",
        }
        raise ConfigError(
            f"the {argument} {name_of(function)} raised {describe_user_error(error)}", f"expected {expected[argument]}"
        ) from error


def missing(argument: str, name: str) -> ConfigError:
    return ConfigError(
        f"{argument}.kind = custom{f' ({name})' if name else ''}, and no {argument} is given",
        f"try --{argument} MODULE:NAME, or train({argument}=...)",
    )


def require_built_in_update(config: RunConfig, verb: str) -> None:
    """Raises a ConfigError for a run with an optimizer or schedule of the user's, of which a verb knows no formula."""
    for argument, kind in (("optimizer", config.optimizer.kind), ("schedule", config.schedule.kind)):
        if kind == CUSTOM:
            raise ConfigError(f"{argument}.kind = custom is unsupported by {verb}", f"try another {argument}.kind")


def name_of(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', type(function).__module__)}.{name}"
