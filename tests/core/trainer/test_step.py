"""One step: gradient synchronization, DDP settings, seeds, and no host reads."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.base.config import Batch, RunConfig
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.topology.unsupported import validate
from meshwright.core.data.loader import Loader, MicroBatch
from meshwright.core.data.source import ConcatenatedSource, Source
from meshwright.core.data.stream import Stream
from meshwright.core.models.init import build_model
from meshwright.core.optim.build import build_optimizer
from meshwright.core.parallel.data_parallel.ddp import DDPModel
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.parallel.world import World
from meshwright.core.telemetry.step_clock import StepClock
from meshwright.core.trainer.expert_balancer import ExpertBalancer
from meshwright.core.trainer.precision import Precision
from meshwright.core.trainer.step import Step, StepContext, step_seed
from meshwright.testing import run_ranks
from tests.kit.small_run import load_cpu_config, small_config
from tests.kit.step_harness import LR, build_loader, build_step, masked_source

CONFIG = load_cpu_config(
    overrides=["--model.width=32", "--model.layers=2", "--model.ffn=48", "--precision.compute=fp64"]
)


def stream_for(config: RunConfig, source: Source, batch: Batch) -> Stream:
    return Stream.from_lengths(config.seed, batch.global_, [len(source)], [1.0], 0.0)


def test_masked_source_gives_every_rank_another_token_count():
    """The layout proofs would prove little if every rank had the same token count."""
    source = masked_source(16, 256)
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
    """Runs four steps of a small model and returns what the last one counted."""
    config = load_cpu_config(overrides=["--model.width=32", "--model.layers=2", "--model.ffn=48", *overrides])
    precision = Precision(config.precision, world.device)
    model = build_model(config.model, 0, precision.parameters)
    optimizer = build_optimizer(dict(model.named_parameters()), config.optimizer)
    parallel_model = DDPModel(model, config.ddp, world) if world.size > 1 else ParallelModel(model)
    balancer = ExpertBalancer(model, config, world)
    step = Step(StepContext(parallel_model, optimizer, precision, world, balancer, data_coordinate=world.rank))
    micro = config.batch.micro or 8
    batch = Batch(8 * world.size, micro, world.size, 8 // micro)
    source = masked_source(16, 256)
    stream = stream_for(config, source, batch)
    steps = Loader(ConcatenatedSource([source]), stream, batch, world.rank, config.data).steps(0, 4)
    for number in range(4):
        outcome = step.run(number, 1e-3, steps)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    loss, norm, local_square, finite, _ = outcome.numbers.tolist()
    return {
        "reduction": outcome.reduction,
        "size": size,
        "phases": outcome.clock.seconds(),
        "numbers": (loss, norm, local_square, finite),
        "tokens": outcome.control.tokens,
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
    }


@pytest.mark.parametrize("accumulation", [1, 4])
def test_gradient_accumulation_synchronizes_once_and_sends_every_parameter_once(accumulation):
    for rank in run_ranks(one_step, 2, "--ddp.bucket_cap_mb=0.02", f"--batch.micro={8 // accumulation}"):
        assert rank["reduction"].message_bytes == rank["size"]
        assert rank["reduction"].buckets > 3


def test_ddp_bucket_cap_mb_sets_the_number_of_buckets():
    large = run_ranks(one_step, 2, "--ddp.bucket_cap_mb=25")[0]["reduction"].buckets
    small = run_ranks(one_step, 2, "--ddp.bucket_cap_mb=0.01")[0]["reduction"].buckets
    assert large < small


def test_ddp_bf16_compress_hook_halves_the_message_bytes():
    plain, compressed = (run_ranks(one_step, 2, f"--ddp.comm_hook={kind}") for kind in ("none", "bf16_compress"))
    assert compressed[0]["reduction"].message_bytes * 2 == plain[0]["reduction"].message_bytes
    assert compressed[0]["numbers"][1] == pytest.approx(plain[0]["numbers"][1], rel=0.02)
    assert torch.equal(compressed[0]["weights"], compressed[1]["weights"])


@pytest.mark.parametrize(
    "setting", ["--ddp.static_graph=true", "--ddp.gradient_as_bucket_view=false", "--ddp.bucket_cap_mb=0.01"]
)
def test_ddp_settings_give_the_same_bits_on_two_ranks(setting):
    default, other = run_ranks(one_step, 2), run_ranks(one_step, 2, setting)
    assert torch.equal(default[0]["weights"], other[0]["weights"])


def test_ranks_have_equal_weights_and_exposed_communication_is_a_phase():
    first, second = run_ranks(one_step, 2)
    assert torch.equal(first["weights"], second["weights"])
    assert [first["numbers"][i] for i in (0, 1, 3)] == [
        second["numbers"][i] for i in (0, 1, 3)
    ]  # the third is local to the rank
    assert first["tokens"] == second["tokens"]
    assert all(seconds > 0 for phase, seconds in first["phases"].items())


def test_one_rank_needs_no_process_group():
    outcome = run_ranks(one_step, 1)[0]
    assert outcome["reduction"].buckets == 0
    assert outcome["numbers"][3] == 1.0


def test_step_without_a_valid_token_has_a_zero_gradient():
    model = build_model(CONFIG.model, 0, torch.float64)
    precision, world = Precision(CONFIG.precision, torch.device("cpu")), World()
    optimizer = build_optimizer(dict(model.named_parameters()), CONFIG.optimizer)
    balancer = ExpertBalancer(model, CONFIG, world)
    step = Step(StepContext(ParallelModel(model), optimizer, precision, world, balancer))
    empty = MicroBatch((torch.zeros(2, 4, dtype=torch.int64), torch.full((2, 4), -100)), 0)
    _, loss = step.gradient(0, [empty], StepClock(torch.device("cpu")))
    assert float(loss) == 0
    assert all(float(p.grad.abs().max()) == 0 for p in model.parameters())


def test_step_seed_is_a_function_of_seed_step_and_data_coordinate():
    seeds = {step_seed(s, k, c) for s in range(3) for k in range(3) for c in range(3)}
    assert len(seeds) == 27
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert step_seed(0, 1, 2) == step_seed(0, 1, 2)


class ForbidHostReads(TorchDispatchMode):
    """Fails where the host reads a value of the device, for which it would wait on CUDA."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        assert not by_mask, "a step indexes with a mask"
        assert name not in self.READS, f"a step reads the result of {name}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options",
    [
        ["--batch.micro=2"],
        ["--model.experts=4", "--model.experts_active=2"],
        ["--precision.compute=bf16", "--precision.weights=bf16"],
        ["--precision.compute=fp16"],
    ],
    ids=["accumulation", "experts", "bf16", "fp16"],
)
def test_step_reads_no_value_of_the_device(options):
    config = with_device_defaults(small_config("--batch.global=4", *options, ranks=1), "cpu")
    layout, _ = validate(config)
    step, loader = build_step(World(), config, layout), build_loader(World(), config)
    batches = iter(list(loader.steps(0, 3)))  # the loader counts the tokens of host tensors
    step.run(0, LR, batches)
    with ForbidHostReads():
        step.run(1, LR, batches)
        step.run(2, LR, batches)
