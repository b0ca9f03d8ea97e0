"""One step: the gradient of one process on any number of ranks, and what is counted on the way."""

from __future__ import annotations

import pytest
import torch

from meshwright.config import Batch, RunConfig, load_config
from meshwright.data.loader import Loader, MicroBatch
from meshwright.data.source import ConcatenatedSource
from meshwright.data.stream import Stream
from meshwright.models.init import build_model
from meshwright.optim.adamw import AdamW
from meshwright.parallel.data_parallel.ddp import DDPModel
from meshwright.parallel.parallel_model import ParallelModel
from meshwright.parallel.world import World
from meshwright.prover.reference import MaskedSynthetic
from meshwright.telemetry.step_clock import StepClock
from meshwright.testing import run_ranks
from meshwright.trainer.expert_balancer import ExpertBalancer
from meshwright.trainer.precision import Precision
from meshwright.trainer.step import Step, StepContext, step_seed

CONFIG = load_config(overrides=["--model.width=32", "--model.layers=2", "--model.ffn=48", "--precision.compute=fp64"])


def stream_for(config: RunConfig, source: MaskedSynthetic, batch: Batch) -> Stream:
    return Stream.from_lengths(config.seed, batch.global_, [len(source)], [1.0], 0.0)


def test_masks_really_are_unequal():
    """The proof of layouts would prove little if every rank had the same count."""
    source = MaskedSynthetic(1000, 16, 256)
    batch = Batch(24, 2, 4, 3)
    stream = stream_for(CONFIG, source, batch)
    counts = [
        sum(
            m.valid_targets
            for m in next(Loader(ConcatenatedSource([source]), stream, batch, r, CONFIG.data).steps(0, 1))
        )
        for r in range(4)
    ]
    assert len(set(counts)) == 4


def one_step(world: World, *overrides: str) -> dict:
    """Four steps of a small model; what the last one counted."""
    config = load_config(overrides=["--model.width=32", "--model.layers=2", "--model.ffn=48", *overrides])
    precision = Precision(config.precision, world.device)
    model = build_model(config.model, 0, precision.weights)
    optimizer = AdamW(dict(model.named_parameters()), config.optimizer)
    spread = DDPModel(model, config.ddp, world) if world.size > 1 else ParallelModel(model)
    balancer = ExpertBalancer(model, config, world)
    step = Step(StepContext(spread, optimizer, precision, world, balancer, data_coordinate=world.rank))
    micro = config.batch.micro or 8
    batch = Batch(8 * world.size, micro, world.size, 8 // micro)
    source = MaskedSynthetic(1000, 16, 256)
    stream = stream_for(config, source, batch)
    steps = Loader(ConcatenatedSource([source]), stream, batch, world.rank, config.data).steps(0, 4)
    for number in range(4):
        outcome = step.run(number, 1e-3, steps)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    loss, norm, local_square, finite, _ = outcome.numbers.tolist()
    return {
        "traffic": outcome.reduction,
        "size": size,
        "phases": outcome.clock.seconds(),
        "numbers": (loss, norm, local_square, finite),
        "tokens": outcome.control.tokens,
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
    }


@pytest.mark.parametrize("accumulation", [1, 4])
def test_accumulation_synchronises_once_and_sends_every_parameter_once(accumulation):
    for rank in run_ranks(one_step, 2, "--ddp.bucket_cap_mb=0.02", f"--batch.micro={8 // accumulation}"):
        assert rank["traffic"].message_bytes == rank["size"]
        assert rank["traffic"].buckets > 3


def test_bucket_size_is_a_setting():
    few = run_ranks(one_step, 2, "--ddp.bucket_cap_mb=25")[0]["traffic"].buckets
    many = run_ranks(one_step, 2, "--ddp.bucket_cap_mb=0.01")[0]["traffic"].buckets
    assert few < many


def test_bf16_compression_halves_the_bytes_and_little_else():
    plain, packed = (run_ranks(one_step, 2, f"--ddp.comm_hook={kind}") for kind in ("none", "bf16_compress"))
    assert packed[0]["traffic"].message_bytes * 2 == plain[0]["traffic"].message_bytes
    assert packed[0]["numbers"][1] == pytest.approx(plain[0]["numbers"][1], rel=0.02)
    assert torch.equal(packed[0]["weights"], packed[1]["weights"])


@pytest.mark.parametrize(
    "setting", ["--ddp.static_graph=true", "--ddp.gradient_as_bucket_view=false", "--ddp.bucket_cap_mb=0.01"]
)
def test_other_ddp_settings_give_the_same_bits_on_two_ranks(setting):
    usual, other = run_ranks(one_step, 2), run_ranks(one_step, 2, setting)
    assert torch.equal(usual[0]["weights"], other[0]["weights"])


def test_ranks_agree_and_exposed_communication_is_a_phase_of_its_own():
    one, two = run_ranks(one_step, 2)
    assert torch.equal(one["weights"], two["weights"])
    assert [one["numbers"][i] for i in (0, 1, 3)] == [two["numbers"][i] for i in (0, 1, 3)]  # the third is a rank's own
    assert one["tokens"] == two["tokens"]
    assert all(seconds > 0 for phase, seconds in one["phases"].items())


def test_one_rank_needs_no_process_group():
    outcome = run_ranks(one_step, 1)[0]
    assert outcome["traffic"].buckets == 0
    assert outcome["numbers"][3] == 1.0


def test_a_step_without_one_valid_token_is_a_step_with_a_zero_gradient():
    model = build_model(CONFIG.model, 0, torch.float64)
    precision, world = Precision(CONFIG.precision, torch.device("cpu")), World()
    optimizer = AdamW(dict(model.named_parameters()), CONFIG.optimizer)
    balancer = ExpertBalancer(model, CONFIG, world)
    step = Step(StepContext(ParallelModel(model), optimizer, precision, world, balancer))
    empty = MicroBatch((torch.zeros(2, 4, dtype=torch.int64), torch.full((2, 4), -100)), 0)
    _, loss = step.gradient(0, [empty], StepClock(torch.device("cpu")))
    assert float(loss) == 0
    assert all(float(p.grad.abs().max()) == 0 for p in model.parameters())


def test_what_is_random_is_a_function_of_seed_step_and_coordinate():
    seeds = {step_seed(s, k, c) for s in range(3) for k in range(3) for c in range(3)}
    assert len(seeds) == 27
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert step_seed(0, 1, 2) == step_seed(0, 1, 2)
