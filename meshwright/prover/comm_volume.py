"""Checks that the bytes counted on a real step, communicated and resident, equal the planner's formulas exactly."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from meshwright.config import DataConfig, RunConfig
from meshwright.data.loader import Loader
from meshwright.data.source import ConcatenatedSource
from meshwright.launch.ranks import run_ranks
from meshwright.parallel.world import World
from meshwright.planner.exact.activation_messages import data_dependent_axes
from meshwright.planner.exact.comm_volume import CollectiveVolume, comm_volume
from meshwright.planner.exact.compare import compare_volumes
from meshwright.planner.exact.state_memory import StateMemory, state_memory
from meshwright.prover.layouts import describe_settings, proof_configs
from meshwright.prover.reference import LR, build_step, proof_source, proof_stream
from meshwright.topology.layout import Layout
from meshwright.topology.unsupported import validate
from meshwright.trainer.step_counters import StepCounters, count_step

StepBytes = tuple[list[CollectiveVolume], StateMemory]
"""What one rank communicated in a step, and the peak memory of its model state."""


def check_communication(config: RunConfig) -> Iterator[tuple[str, bool, str]]:
    """Counts the third step of the proof config in float32, the precision of a real run."""
    proofs, note = proof_configs(config)
    proof = next(proof for proof in proofs if proof.precision.compute == "fp32")
    layout, batch = validate(proof)
    counted: list[StepBytes] = run_ranks(count_step_bytes, layout.ranks, proof, launch=proof.launch)
    predicted = [comm_volume(proof, layout, batch, rank) for rank in range(layout.ranks)]
    excluded = data_dependent_axes(proof, layout)
    differences = list(all_differences(layout, predicted, [volumes for volumes, _ in counted], excluded))
    total = sum(row.wire_bytes for row in predicted[0])
    rows = ", ".join(
        f"{row.axis} {row.collective} {row.message_bytes:,}" for row in predicted[0] if row.axis != "control"
    )
    yield (
        f"{layout}{describe_settings(proof)}: communication volume of a real step equals the formulas exactly",
        not differences,
        "; ".join(differences)
        if differences
        else f"rank 0: {rows}; {total:,} wire bytes per step{note}{describe_excluded(excluded)}",
    )
    wrong = [
        f"rank {rank}: peak {name} memory is {getattr(measured, name):,} bytes, the formula gives "
        f"{getattr(expected, name):,}"
        for rank, (_, measured) in enumerate(counted)
        for expected in [state_memory(proof, layout, batch, rank)]
        for name in ("parameter", "gradient", "optimizer")
        if getattr(measured, name) != getattr(expected, name)
    ]
    first = counted[0][1]
    yield (
        f"{layout}{describe_settings(proof)}: peak memory of parameters, gradients and optimizer state equals the "
        "formulas exactly",
        not wrong,
        "; ".join(wrong)
        if wrong
        else f"rank 0: parameters {first.parameter:,}, gradients {first.gradient:,}, optimizer state "
        f"{first.optimizer:,} bytes{note}",
    )


def count_step_bytes(world: World, config: RunConfig) -> StepBytes:
    counters = count_third_step(world, config)
    volumes = [CollectiveVolume(row.axis, row.collective, row.message_bytes, row.wire_bytes) for row in counters.rows()]
    peak = counters.memory.peak
    return volumes, StateMemory(peak["parameter"], peak["gradient"], peak["optimizer"])


def count_third_step(world: World, config: RunConfig) -> StepCounters:
    """Counts the third step of a run: everything that is allocated once exists by then."""
    layout, batch = validate(config)
    step = build_step(world, config, layout)
    source, coordinate = ConcatenatedSource([proof_source(config)]), layout.data_coordinate(world.rank)
    loader = Loader(source, proof_stream(config), batch, coordinate, DataConfig(workers=0))
    step.warmup_backward(loader.first)
    batches = loader.steps(0, 3)
    for number in range(2):
        step.run(number, LR, batches)
    with count_step(step.parallel_model, step.optimizer) as counters:
        step.run(2, LR, batches, counters.enter)
    return counters


def describe_excluded(excluded: dict[str, str]) -> str:
    return "".join(f"; {axis} is not compared: {reason}" for axis, reason in excluded.items())


def all_differences(
    layout: Layout,
    predicted: list[list[CollectiveVolume]],
    counted: list[list[CollectiveVolume]],
    excluded: Collection[str] = (),
) -> Iterator[str]:
    """One sentence per collective whose counted bytes differ from the predicted ones (see `compare_volumes`)."""
    pairs = compare_volumes(layout, dict(enumerate(predicted)), dict(enumerate(counted)), excluded)
    return (str(pair) for pair in pairs if not pair.equal)
