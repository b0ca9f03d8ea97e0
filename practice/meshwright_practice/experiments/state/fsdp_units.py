"""The life of FSDP units in a training step: how often they are unsharded, and how much memory that takes."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from meshwright.base.config import RunConfig
from meshwright.base.models.registry import run_spec
from meshwright.base.topology.parameter_shards import group_by_unit, parameter_shards
from meshwright.base.topology.unsupported import validate
from meshwright.core.models.init import build_on_meta, init_shard
from meshwright.core.parallel.local_shard import LocalShard
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.parallel.parallel_spec import ParallelSpec
from meshwright.core.parallel.parallelize import parallelize
from meshwright.core.parallel.world import World
from meshwright.planner.cost.peak_memory import state_memory
from meshwright.planner.cost.units.rank_units import unsharded_bytes
from meshwright.prover.simulator.simulate import simulate
from meshwright.testing import run_ranks
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.counted_training import (
    ELEMENT_BYTES,
    CountedStep,
    RankTraining,
    count_layouts,
    small_config,
)
from meshwright_practice.experiments.state.shard_levels import CLASSES, LEVELS
from meshwright_practice.pictures import Bars

GB = 1e9
SEVEN_BILLION = (
    "--model.vocab=32000",
    "--model.width=4096",
    "--model.layers=32",
    "--model.heads=32",
    "--model.kv_heads=32",
    "--model.ffn=11008",
    "--data.sequence=128",
    "--batch.micro=1",
    "--precision.compute=bf16",
)
"""The shape of Llama 7B."""


def unit_bytes(config: RunConfig) -> dict[str, int]:
    """Bytes of every FSDP unit of a config once it is unsharded."""
    layout, _ = validate(config)
    units = group_by_unit(parameter_shards(run_spec(config), config, layout, 0))
    return {name: unsharded_bytes(config, name, members) for name, members in units.items()}


def lifecycle(knobs: Knobs) -> Observation:
    """One step with sharded parameters, resharded after forward and not, on the same ranks."""
    ranks, layers = int(knobs["ranks"]), int(knobs["layers"])
    options = ["--layout.shard=parameters", f"--model.layers={layers}", f"--batch.global={ranks}", "--batch.micro=1"]
    keep = [*options, "--fsdp.reshard_after_forward=false"]
    replicated = [*options, "--layout.shard=none"]
    counted = count_layouts(ranks, {"reshard": options, "keep": keep, "ddp": replicated})
    units = unit_bytes(small_config(ranks, *options))
    reshard, kept, ddp = (counted[name][0] for name in ("reshard", "keep", "ddp"))
    unit, ring = reshard.model_bytes, ranks / (ranks - 1)
    values: dict[str, float] = {
        "ranks": ranks,
        "units": len(units),
        "shard": 1 / ranks,
        "largest_unit": max(units.values()) / unit,
        "expected_peak": 1 / ranks + max(size for name, size in units.items() if name != "root") / unit
        + units.get("root", 0) / unit,
        "all_gathers_per_unit": reshard.calls("all_gather") / len(units),
        "all_gathers_per_unit_keep": kept.calls("all_gather") / len(units),
        "reduce_scatters_per_unit": reshard.calls("reduce_scatter") / len(units),
        "wire": reshard.wire() / unit * ring,
        "wire_keep": kept.wire() / unit * ring,
        "wire_ddp": ddp.wire() / unit * ring,
    }  # fmt: skip
    for name, step in (("", reshard), ("_keep", kept), ("_ddp", ddp)):
        values[f"peak{name}"] = step.peak["parameter"] / unit
        values[f"resident{name}"] = step.resident["parameter"] / unit
        values[f"activation{name}"] = step.peak["activation"] / ddp.peak["activation"]
    parts: dict[str, tuple[float, ...]] = {
        "resident shards": tuple(values[f"resident{name}"] for name in ("_ddp", "_keep", "")),
        "unsharded at the peak": tuple(
            values[f"peak{name}"] - values[f"resident{name}"] for name in ("_ddp", "_keep", "")
        ),
    }
    labels = ("DDP", "FSDP2, kept after forward", "FSDP2, resharded after forward")
    picture = Bars("parameters on one rank", "bytes of all parameters", labels, parts)
    notes = (f"The model has {len(units)} FSDP units; the largest has {values['largest_unit']:.0%} of the parameters.",)
    return Observation(values, picture, notes)


class OneUnitTraining(RankTraining):
    """The same training, with the whole model as the only FSDP unit."""

    def build_model(self) -> ParallelModel:
        config, spec = self.config, run_spec(self.config)
        model = build_on_meta(config.model, self.precision.parameters, config.lora, self.precision.residual)

        def fill(shard: LocalShard, name: str) -> None:
            init_shard(shard.local, name, shard.shape, shard.offset, spec, config.seed)

        return parallelize(model, config, self.layout, self.world, ParallelSpec(), fill)


def auto_wrapped_units(config: RunConfig) -> int:
    """The FSDP units that `size_based_auto_wrap_policy` of FSDP1 makes of a model with its default size."""
    model = build_on_meta(config.model, torch.float64)
    sizes = {module: sum(p.numel() for p in module.parameters()) for module in model.modules() if module is not model}
    wrapped = [m for m, size in sizes.items() if size_based_auto_wrap_policy(m, recurse=False, nonwrapped_numel=size)]
    return 1 + len(wrapped)


def refuses_device_ids(world: World) -> bool:
    """Whether DDP refuses `device_ids=[rank]` for a module in CPU memory."""
    try:
        DistributedDataParallel(nn.Linear(2, 2), device_ids=[world.rank])
    except ValueError:
        return True
    return False


def compare_units(world: World, config: RunConfig) -> tuple[CountedStep, CountedStep, bool]:
    """(a step with a unit per block, one with a single unit, whether DDP refuses device_ids)."""
    return RankTraining(world, config).count(), OneUnitTraining(world, config).count(), refuses_device_ids(world)


def granularity(knobs: Knobs) -> Observation:
    """The same step with every block as an FSDP unit, and with the whole model as one unit."""
    ranks = int(knobs["ranks"])
    options = ["--layout.shard=parameters", f"--model.layers={knobs['layers']}"]
    config = small_config(ranks, *options, f"--batch.global={ranks}", "--batch.micro=1")
    blocks, whole, refused = run_ranks(compare_units, ranks, config)[0]
    unit = blocks.model_bytes
    values: dict[str, float] = {
        "units_by_block": blocks.calls("reduce_scatter"),
        "units_as_one": whole.calls("reduce_scatter"),
        "auto_wrapped_units": auto_wrapped_units(config),
        "policy_minimum": inspect.signature(size_based_auto_wrap_policy).parameters["min_num_params"].default,
        "model_parameters": unit // ELEMENT_BYTES,
        "peak_by_block": blocks.peak["parameter"] / unit,
        "peak_as_one": whole.peak["parameter"] / unit,
        "gradient_by_block": blocks.peak["gradient"] / unit,
        "gradient_as_one": whole.peak["gradient"] / unit,
        "device_ids_refused": int(refused),
        "loss_difference": abs(blocks.loss - whole.loss),
    }
    parts: dict[str, tuple[float, ...]] = {
        "parameters": (values["peak_by_block"], values["peak_as_one"]),
        "gradients": (values["gradient_by_block"], values["gradient_as_one"]),
    }
    picture = Bars("peak memory of one rank", "bytes of all parameters", ("a unit per block", "one unit"), parts)
    sentence = (
        f"The size policy of FSDP1 wraps modules of at least {values['policy_minimum']:,.0f} parameters; this model "
        f"has {values['model_parameters']:,.0f}."
    )
    return Observation(values, picture, (sentence,))


def seven_billion(knobs: Knobs) -> Observation:
    """The state of a model of 7 billion parameters by the exact formulas. They are compared with the real step on fake
    tensors, for the same model with two blocks.
    """
    ranks = int(knobs["ranks"])
    options = [*SEVEN_BILLION, f"--batch.global={ranks}"]
    configs = {level: small_config(ranks, *options, f"--layout.shard={level}") for level in LEVELS}
    parameters, units = run_spec(configs["parameters"]).parameter_count, unit_bytes(configs["parameters"])
    values: dict[str, float] = {
        "parameters": parameters,
        "bf16_weights": 2 * parameters / GB,
        "bf16_shard": 2 * parameters / ranks / GB,
        "block_unit": max(size for name, size in units.items() if "block" in name) / GB,
        "largest_unit": max(units.values()) / GB,
    }
    values["weights_only"] = values["bf16_shard"] + values["block_unit"]
    states = {}
    for level, config in configs.items():
        memory = state_memory(config, *validate(config))
        states[level] = (memory.parameter / GB, memory.gradient / GB, memory.optimizer / GB)
        values[f"weights_{level}"], values[f"state_{level}"] = states[level][0], sum(states[level])
    two_blocks = small_config(ranks, *options, "--layout.shard=parameters", "--model.layers=2")
    simulated, formula = simulate(two_blocks, [0]).results[0].peak, state_memory(two_blocks, *validate(two_blocks))
    for name, memory_class in (("weights", "parameter"), ("gradients", "gradient"), ("moments", "optimizer")):
        values[f"simulated_{name}_of_two_blocks"] = simulated[memory_class] / GB
        values[f"{name}_of_two_blocks"] = getattr(formula, memory_class) / GB
    parts: dict[str, tuple[float, ...]] = {
        name: tuple(state[index] for state in states.values()) for index, name in enumerate(CLASSES)
    }
    picture = Bars(f"peak model state of one of {ranks} ranks", "GB", tuple(states), parts)
    note = "Weights and gradients are float32 with bfloat16 matrix products: 16 bytes per parameter with Adam."
    return Observation(values, picture, (note,))
