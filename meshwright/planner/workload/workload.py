"""Defines what is to be trained, before a layout is chosen; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.base.config import RunConfig
from meshwright.base.hardware.cluster import Cluster
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.registry import block_costs
from meshwright.base.models.traced_model import TracedModel
from meshwright.planner.workload.expert_loads import rank_imbalance
from meshwright.planner.workload.optimizer_bytes import TrainedShares, trained_shares
from meshwright.planner.workload.trainer_profile import TrainerProfile

SEARCHED_KEYS = (
    "layout.replicate",
    "layout.shard",
    "layout.shard_degree",
    "layout.tensor",
    "layout.pipeline",
    "layout.context",
    "layout.expert",
    "pipeline.schedule",
    "pipeline.stages",
    "context.method",
    "activation_checkpoint.mode",
    "batch.micro",
    "compile.enabled",
    "optimizer.cpu_offload",
)
"""Config keys that the search chooses, unless an option pins them."""


def count_samples(number: int) -> str:
    return "1 sample" if number == 1 else f"{number:,} samples"


HEADROOM = 0.08
"""The share of device memory that a plan leaves free by default: for fragmentation and the error of the estimate."""


@dataclass(frozen=True)
class Workload:
    """The model, batch and precision for which a layout is searched."""

    model: Architecture | TracedModel
    """the model"""
    global_batch: int
    """samples per step over all ranks"""
    sequence: int
    """tokens per sample"""
    precision: str = "bf16"
    """precision of matmuls; auto: that of the device"""
    base_config: RunConfig | None = None
    """the config whose layout is searched; None if Meshwright's decoder cannot train this model or precision"""
    pinned: Mapping[str, int | str | bool] = field(default_factory=dict)
    """values of those SEARCHED_KEYS that the search must keep"""
    notes: tuple[str, ...] = ()
    """assumptions that were made because an option was not given"""
    headroom: float = HEADROOM
    """share of device memory that plans leave free"""
    trainer_name: str = "meshwright"
    """the trainer that the plan is for, as `plan --trainer` names it"""
    trainer: TrainerProfile | None = None
    """the profile of that trainer; None for Meshwright, whose profile follows from the settings of a run"""
    expert_imbalance: float = 1.0
    """load of the busiest expert-parallel rank as a multiple of the mean; 1 for a balanced load"""
    expert_loads: tuple[tuple[float, ...], ...] = ()
    """measured tokens of each expert, a row per block; they replace `expert_imbalance`"""
    precision_is_default: bool = False
    """whether the precision is that of a preset, which a device without its matrix units replaces"""

    def imbalance(self, expert_ranks: int) -> float:
        """The load of the busiest of so many expert-parallel ranks as a multiple of the mean."""
        return rank_imbalance(self.expert_loads, expert_ranks) if self.expert_loads else self.expert_imbalance

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step over all ranks."""
        return self.global_batch * self.sequence

    @cached_property
    def block_costs(self) -> tuple[float, ...] | None:
        """FLOPs of every block, by which Meshwright balances pipeline stages; None if layers are divided evenly."""
        if self.trainer is not None or self.base_config is None or isinstance(self.model, TracedModel):
            return None
        return block_costs(self.base_config)

    @cached_property
    def trained(self) -> TrainedShares:
        """Which part of the model is trained."""
        return trained_shares(self.base_config, self.model)

    def on(self, cluster: Cluster) -> Workload:
        """Returns this workload with the precision that it has on the devices of a cluster, with notes about rates of
        the device that are assumed, and with those settings of its config that the search chooses there unset: on a
        GPU, whether blocks are compiled.
        """
        config, precision, device = self.base_config, self.precision, cluster.device
        notes: list[str] = []
        half = device.half_precision
        if precision == "auto":
            precision = "fp32" if device.is_cpu else half
        elif precision == "bf16" and self.precision_is_default:
            precision = half
        if config is not None and precision == "fp16":  # the trainer's own default is bf16
            config = replace(config, precision=replace(config.precision, compute="fp16"))
        if half == "fp16" and precision in ("fp16", "bf16"):
            bf16, fp16 = (f"{device.peak_flops[name] / 1e12:.4g}" for name in ("bf16", "fp16"))
            planned = "planned in fp16" if precision == half else "try --precision fp16"
            notes.append(f"{device.name} multiplies bf16 at {bf16} TFLOP/s and fp16 at {fp16}: {planned}")
        for name in dict.fromkeys((precision, "bf16" if precision in ("fp8", "fp4") else precision)):
            notes += device.assumed_rates(name)
        if config is not None:
            pin = self.pinned.get("compile.enabled", config.compile.enabled if device.is_cpu else None)
            config = replace(config, compile=replace(config.compile, enabled=None if pin is None else bool(pin)))
        notes = [note for note in notes if note not in self.notes]  # of a workload that was on this cluster already
        return replace(self, precision=precision, base_config=config, notes=(*self.notes, *notes))

    def with_size(self, global_batch: int | None = None, sequence: int | None = None) -> Workload:
        """Returns the same workload, and the same base config, with another batch or sequence length."""
        global_batch, sequence = global_batch or self.global_batch, sequence or self.sequence
        base_config = self.base_config and replace(
            self.base_config,
            batch=replace(self.base_config.batch, global_=global_batch),
            data=replace(self.base_config.data, sequence=sequence),
        )
        return replace(self, global_batch=global_batch, sequence=sequence, base_config=base_config)
