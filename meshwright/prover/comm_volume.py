"""A step of the layout under the ledgers: counted bytes against the formulas, exactly."""

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

Counts = tuple[list[CollectiveVolume], StateMemory]


def check_communication(config: RunConfig) -> Iterator[tuple[str, bool, str]]:
    """In float32, as a run would be."""
    proofs, note = proof_configs(config)
    proof = next(proof for proof in proofs if proof.precision.compute == "fp32")
    layout, batch = validate(proof)
    found: list[Counts] = run_ranks(count_step_bytes, layout.ranks, proof, launch=proof.launch)
    expected = [comm_volume(proof, layout, batch, rank) for rank in range(layout.ranks)]
    differing = list(
        all_differences(layout, expected, [sent for sent, _ in found], left_out := data_dependent_axes(proof, layout))
    )
    total = sum(row.wire_bytes for row in expected[0])
    rows = ", ".join(
        f"{row.axis} {row.collective} {row.message_bytes:,}" for row in expected[0] if row.axis != "control"
    )
    yield (
        f"{layout}{describe_settings(proof)}: bytes counted on a real step = the formulas, exactly",
        not differing,
        "; ".join(differing)
        if differing
        else f"rank 0: {rows}; {total:,} bytes on the wire a step{note}{describe_uncounted(left_out)}",
    )
    wrong = [
        f"rank {rank}: {name} {getattr(got, name):,} bytes at peak, by the formula {getattr(want, name):,}"
        for rank, (_, got) in enumerate(found)
        for want in [state_memory(proof, layout, batch, rank)]
        for name in ("parameter", "gradient", "optimizer")
        if getattr(got, name) != getattr(want, name)
    ]
    first = found[0][1]
    yield (
        f"{layout}{describe_settings(proof)}: peak bytes of parameters, gradients and optimizer = the formulas",
        not wrong,
        "; ".join(wrong)
        if wrong
        else f"rank 0: parameter {first.parameter:,}, gradient {first.gradient:,}, optimizer {first.optimizer:,}{note}",
    )


def count_step_bytes(world: World, config: RunConfig) -> Counts:
    ledgers = count_third_step(world, config)
    sent = [CollectiveVolume(row.axis, row.collective, row.message_bytes, row.wire_bytes) for row in ledgers.rows()]
    peak = ledgers.memory.peak
    return sent, StateMemory(peak["parameter"], peak["gradient"], peak["optimizer"])


def count_third_step(world: World, config: RunConfig) -> StepCounters:
    """Its ledgers: by then everything has been made that is made once."""
    layout, batch = validate(config)
    step = build_step(world, config, layout)
    source, coordinate = ConcatenatedSource([proof_source(config)]), layout.data_coordinate(world.rank)
    loader = Loader(source, proof_stream(config), batch, coordinate, DataConfig(workers=0))
    step.warmup_backward(loader.first)
    batches = loader.steps(0, 3)
    for number in range(2):
        step.run(number, LR, batches)
    with count_step(step.parallel_model, step.optimizer) as ledgers:
        step.run(2, LR, batches, ledgers.enter)
    return ledgers


def describe_uncounted(left_out: dict[str, str]) -> str:
    return "".join(f"; {axis} not compared: {why}" for axis, why in left_out.items())


def all_differences(
    layout: Layout,
    expected: list[list[CollectiveVolume]],
    found: list[list[CollectiveVolume]],
    left_out: Collection[str] = (),
) -> Iterator[str]:
    """In words; see `compared`."""
    pairs = compare_volumes(layout, dict(enumerate(expected)), dict(enumerate(found)), left_out)
    return (str(pair) for pair in pairs if not pair.equal)
