"""The checks of a custom model, what they leave open, and what the certificate says about the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.base.config import RunConfig
from meshwright.base.topology.layout import Layout
from meshwright.core.launch.first_batch_check import prepare_custom_model
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.trainer.first_batch.model_notes import short_list
from meshwright.errors import ConfigError
from meshwright.prover.claims import Claim, cuda_devices
from meshwright.prover.custom.model_facts import ModelFacts, collect_facts
from meshwright.prover.custom.subject import Subject
from meshwright.prover.custom.training import check_custom_training
from meshwright.prover.optimizer_updates import check_optimizer
from meshwright.prover.recovery import check_recovery
from meshwright.prover.schedule import check_schedule
from meshwright.prover.shrink.custom_runs import custom_not_proven, custom_runs
from meshwright.prover.stream import check_stream

BUILT_IN_ONLY = (
    "the initial weights: they are those of the module",
    "communication volume and memory by formula, and the regions of shards: the formulas are those of built-in models",
)
OWN_DATA = "the content of samples: the dataset is read by the code that defines it"
REFUSED = "training and recovery: `train` refuses the model"


@dataclass(frozen=True)
class CustomProof:
    """A config that is proven with a user's model."""

    config: RunConfig
    given: Subject
    of_family: bool = False
    """whether the model is one of a built-in family, whose data are the files of the config"""

    @cached_property
    def refusal(self) -> str:
        """Why `train` refuses the model after its first batch; '' if it does not."""
        return str(self.prepared) if isinstance(self.prepared, ConfigError) else ""

    @cached_property
    def prepared(self) -> Subject | ConfigError:
        """The model as `train` trains it, or why it is refused."""
        custom, sources = self.given.custom, self.given.sources
        try:
            custom = prepare_custom_model(custom, sources[0], self.config, Layout.from_config(self.config.layout))
        except ConfigError as error:
            return error
        return Subject(custom, sources)

    @property
    def subject(self) -> Subject:
        return self.given if isinstance(self.prepared, ConfigError) else self.prepared

    @cached_property
    def facts(self) -> ModelFacts:
        """What the plain module shows by itself."""
        launch = replace(self.config.launch, device="cpu")
        [facts] = run_ranks(collect_facts, 1, self.subject.custom, self.subject.sources, launch=launch, timeout=600.0)
        return facts  # type: ignore[no-any-return]

    def checks(self) -> dict[str, Callable[[RunConfig, bool], Iterator[Claim]]]:
        """Name -> check."""
        checks: dict[str, Callable[[RunConfig, bool], Iterator[Claim]]] = {
            "stream": lambda config, _full: check_stream(config, None if self.of_family else self.given.sources),
            "model": lambda _config, _full: self.check_model(),
            "schedule": lambda config, _full: check_schedule(config),
            "optimizer": lambda config, _full: check_optimizer(config),
        }
        if not self.refusal and not self.subject.custom.changed:
            checks["training"] = lambda config, _full: check_custom_training(config, self.subject, self.facts)
            checks["recovery"] = lambda config, _full: check_recovery(config, self.subject)
        return checks

    def check_model(self) -> Iterator[Claim]:
        """The check of the first batch, and what the plain module shows."""
        claim = f"{self.given.name}: the check of the first batch accepts the model, its loss and its samples"
        notes = "; ".join(self.subject.custom.notes) or f"targets are counted in {self.subject.custom.unit}"
        yield Claim(claim, not self.refusal, self.refusal or notes)
        yield from self.facts.claims()

    def not_proven(self) -> list[str]:
        """One sentence for everything that the checks leave open."""
        devices, facts = cuda_devices(self.config.launch), self.facts
        runs = custom_runs(self.config, float64=facts.float64, devices=devices)
        sentences = [*custom_not_proven(self.config, runs, devices), *BUILT_IN_ONLY]
        sentences += [] if self.of_family else [OWN_DATA]
        sentences += [REFUSED] if self.refusal else []
        if changed := self.subject.custom.changed:
            sentences.append(
                f"training and recovery: forward changes {short_list(sorted(changed))} in every micro-batch without "
                "the optimizer, and the reference computes other micro-batches"
            )
        if not facts.float64:
            sentences.append(f"float64: the model does not compute in it ({facts.float64_error})")
        elif facts.inner_precision != "fp64":
            sentences.append(f"float64 throughout: the model computes in {facts.inner_precision} inside")
        if facts.without_gradient:
            names = ", ".join(facts.without_gradient[:3])
            sentences.append(f"{len(facts.without_gradient)} parameters that receive no gradient, such as {names}")
        return sentences

    def describe(self) -> dict[str, Any]:
        """What the certificate says about the model: its class, its code, its size and its layout."""
        custom = self.subject.custom
        code = custom.code or {}
        return {
            "class": f"{type(custom.module).__module__}.{type(custom.module).__qualname__}",
            "fingerprint": code.get("fingerprint"),
            "parameters": sum(parameter.numel() for parameter in custom.module.parameters()),
            "layout": str(Layout.from_config(self.config.layout)),
        }
