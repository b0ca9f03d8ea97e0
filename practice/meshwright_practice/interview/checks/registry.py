"""The table of all checks: the function that decides it, the checks that it requires, and the answer that asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright_practice.checks import Check
from meshwright_practice.interview.checks import (
    atomic_save,
    contract,
    global_batch,
    gradients,
    partition,
    phases,
    records,
    restart_state,
    resume,
    single_process,
)
from meshwright_practice.interview.evidence import RunEvidence


@dataclass(frozen=True)
class CheckedProperty:
    """A check, the checks without which its result would mean nothing, and the answer that asks."""

    decide: Callable[[RunEvidence], Check]
    requires: tuple[str, ...] = ()
    answer: tuple[str, str] | None = None
    """(option, answer) of a clarifying question; None if the check always applies"""


METRICS = ("metrics", "yes")
TRAINS = ("contract_15", "single_run")

CHECKS: dict[str, CheckedProperty] = {
    "clarified": CheckedProperty(contract.clarified),
    "contract_15": CheckedProperty(contract.contract(15)),
    "single_run": CheckedProperty(single_process.single_run, ("contract_15",)),
    "loss_falls": CheckedProperty(single_process.loss_falls, TRAINS),
    "deterministic_run": CheckedProperty(single_process.deterministic_run, TRAINS),
    "contract_30": CheckedProperty(contract.contract(30)),
    "partition_deterministic": CheckedProperty(partition.partition_deterministic, ("contract_30",)),
    "partition_union": CheckedProperty(partition.partition_union, ("partition_deterministic",)),
    "partition_overlap": CheckedProperty(partition.partition_overlap, ("partition_deterministic",)),
    "partition_padding": CheckedProperty(partition.partition_padding, ("partition_deterministic",)),
    "partition_reshuffle": CheckedProperty(partition.partition_reshuffle, ("partition_deterministic",)),
    "two_ranks_run": CheckedProperty(gradients.two_ranks_run, (*TRAINS, "contract_30")),
    "sampler_used": CheckedProperty(partition.sampler_used, ("two_ranks_run", "partition_overlap")),
    "gradient_union": CheckedProperty(gradients.gradient_union, ("two_ranks_run",)),
    "sync_once": CheckedProperty(gradients.sync_once, ("gradient_union",)),
    "global_batch": CheckedProperty(global_batch.global_batch, ("two_ranks_run",)),
    "contract_40": CheckedProperty(contract.contract(40)),
    "restart_run": CheckedProperty(resume.restart_run, ("two_ranks_run", "partition_deterministic", "contract_40")),
    "resume_replay": CheckedProperty(resume.resume_replay, ("restart_run",)),
    "resume_skip": CheckedProperty(resume.resume_skip, ("restart_run", "resume_replay")),
    "restart_state": CheckedProperty(restart_state.restart_state, ("resume_skip", "deterministic_run")),
    "restart_manifest": CheckedProperty(restart_state.restart_manifest, ("restart_run", "deterministic_run")),
    "config_identity": CheckedProperty(restart_state.config_identity, ("restart_manifest",)),
    "atomic_save": CheckedProperty(atomic_save.atomic_save, ("restart_run",)),
    "elastic_resume": CheckedProperty(resume.elastic_resume, ("restart_run",), ("restart", "elastic")),
    "rank_records": CheckedProperty(records.rank_records, ("restart_run",), METRICS),
    "phases_timed": CheckedProperty(phases.phases_timed, ("rank_records",), METRICS),
    "phases_within_step": CheckedProperty(phases.phases_within_step, ("phases_timed",), METRICS),
    "phases_attributed": CheckedProperty(phases.phases_attributed, ("phases_timed",), METRICS),
    "rank_errors": CheckedProperty(records.rank_errors, ("rank_records",), ("scope", "production")),
}
"""name -> property, in the order in which they are decided"""
