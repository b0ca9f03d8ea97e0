"""Runs many layout checks per launch: every rank runs all cases one after the other, so that ranks start only once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from meshwright.config import RunConfig, load_config
from meshwright.launch.ranks import run_ranks
from meshwright.prover.layouts import compare_results, proof_configs
from meshwright.prover.reference import StepResults, run_parallel, run_single_process
from meshwright.topology.unsupported import validate

FP64, FP32, TIED = 0, 1, 2
"""The positions of the configs that `proof_configs` makes of a model with untied weights."""
SMALL = (
    "--model.layers=1",
    "--model.width=16",
    "--model.heads=2",
    "--model.kv_heads=2",
    "--model.ffn=18",
    "--model.vocab=26",
)


@dataclass(frozen=True)
class Case:
    """A layout to compare with a single process."""

    layout: tuple[str, ...]
    """The command-line options of the layout."""
    proofs: tuple[int, ...]
    """Which of the proof configs are compared."""
    inject: Callable[[pytest.MonkeyPatch], None] | None = None
    """Injects a fault into the ranks before they run the case."""
    model: tuple[str, ...] = SMALL

    def configs(self) -> tuple[list[RunConfig], str]:
        configs, note = proof_configs(load_config(overrides=[*self.model, *self.layout]))
        return [configs[index] for index in self.proofs], note

    @property
    def ranks(self) -> int:
        return validate(self.configs()[0][0])[0].ranks


def run_cases(world, cases: list[Case]) -> list[tuple[list[StepResults], list[StepResults]]]:
    """On every rank, the results of every case; on rank 0 also those of a single process."""
    references: dict[str, StepResults] = {}
    results = []
    for case in cases:
        configs, _ = case.configs()
        for config in configs if world.rank == 0 else []:
            if repr(config) not in references:
                [references[repr(config)]] = run_single_process(world, [config])
        with pytest.MonkeyPatch.context() as patch:
            if case.inject is not None:
                case.inject(patch)
            parallel = run_parallel(world, configs)
        results.append(([references[repr(config)] for config in configs if world.rank == 0], parallel))
    return results


def check_cases(cases: list[Case]) -> list[list[tuple[str, bool, str]]]:
    """For every case, (claim, passed, measured) of each of its configs. All cases have the same number of ranks."""
    [ranks] = {case.ranks for case in cases}
    by_rank = run_ranks(run_cases, ranks, cases, launch=cases[0].configs()[0][0].launch, timeout=220.0)
    checked = []
    for number, case in enumerate(cases):
        configs, note = case.configs()
        references = by_rank[0][number][0]
        checked.append(
            [
                compare_results(config, references[index], [of_rank[number][1][index] for of_rank in by_rank], note)
                for index, config in enumerate(configs)
            ]
        )
    return checked


def failed_claims(results) -> list[str]:
    return [f"{claim}: {measured}" for claim, passed, measured in results if not passed]
