"""The checks of a custom model, what they leave open, and what the certificate says about the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.config import RunConfig
from meshwright.launch.ranks import run_ranks
from meshwright.prover.claims import Claim, cuda_devices
from meshwright.prover.custom.model_facts import ModelFacts, collect_facts
from meshwright.prover.custom.subject import Subject
from meshwright.prover.custom.training import check_custom_training
from meshwright.prover.optimizer_updates import check_optimizer
from meshwright.prover.schedule import check_schedule
from meshwright.prover.shrink.custom_runs import custom_not_proven, custom_runs

BUILT_IN_ONLY = (
    "the initial weights: they are those of the module",
    "communication volume and memory by formula: the planner has formulas for the built-in models only",
)


@dataclass(frozen=True)
class CustomProof:
    """A config that is proven with a user's model."""

    config: RunConfig
    subject: Subject

    @cached_property
    def facts(self) -> ModelFacts:
        """What the plain module shows by itself."""
        launch = replace(self.config.launch, device="cpu")
        [facts] = run_ranks(collect_facts, 1, self.subject.custom, self.subject.sources, launch=launch, timeout=600.0)
        return facts  # type: ignore[no-any-return]

    def checks(self) -> dict[str, Callable[[RunConfig, bool], Iterator[Claim]]]:
        """Name -> check."""
        return {
            "model": lambda _config, _full: self.facts.claims(),
            "schedule": lambda config, _full: check_schedule(config),
            "optimizer": lambda config, _full: check_optimizer(config),
            "training": lambda config, _full: check_custom_training(config, self.subject, self.facts),
        }

    def not_proven(self) -> list[str]:
        """One sentence for everything that the checks leave open."""
        devices, facts = cuda_devices(self.config.launch), self.facts
        runs = custom_runs(self.config, self.subject.custom.spec is not None, facts.float64, devices)
        sentences = [*custom_not_proven(self.config, runs, devices), *BUILT_IN_ONLY]
        if not facts.float64:
            sentences.append(f"float64: the model does not compute in it ({facts.float64_error})")
        elif facts.inner_precision != "fp64":
            sentences.append(f"float64 throughout: the model computes in {facts.inner_precision} inside")
        if facts.without_gradient:
            names = ", ".join(facts.without_gradient[:3])
            sentences.append(f"{len(facts.without_gradient)} parameters that receive no gradient, such as {names}")
        return sentences

    def describe(self) -> dict[str, Any]:
        """What the certificate says about the model."""
        module = self.subject.custom.module
        return {
            "class": f"{type(module).__module__}.{type(module).__qualname__}",
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
        }
