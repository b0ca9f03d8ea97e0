"""What a job takes: the figures of a plan, each of which has its measured twin."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.planner.workload.planned_job import PlannedJob


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of its step, by class."""

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    """of all micro-batches in flight"""
    logits: float = 0
    gathered: float = 0
    """parameters and gradients that are whole for a moment (FSDP)"""
    communication: float = 0
    """buffers of communicators and of messages under way"""
    slack: float = 0
    """what the allocator holds beyond its tensors"""
    context: float = 0
    """the device's own: kernels, handles"""

    @property
    def tensors(self) -> float:
        """What a tensor ledger counts."""
        whole = self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.gathered
        return whole + self.communication

    @property
    def reserved(self) -> float:
        """What the allocator takes of the device (torch's peak reserved)."""
        return self.tensors + self.slack

    @property
    def total(self) -> float:
        """What the device shows (nvidia-smi)."""
        return self.reserved + self.context


@dataclass(frozen=True)
class Call:
    """A collective as one rank makes it in a step."""

    axis: str
    collective: str
    message: float
    """bytes of one message, whole"""
    count: float
    """messages a step"""
    ranks: int
    link: str
    """inside or between nodes"""
    seconds: float
    """of all of them"""
    exposed: float
    """of these seconds, those that no computing hides"""


@dataclass(frozen=True)
class Estimate:
    job: PlannedJob
    stages: list[Memory]
    """by rank of the pipeline"""
    phases: dict[str, float]
    """exposed seconds of one step of the slowest rank, by what they are spent on; they add up to `seconds`"""
    calls: list[Call]
    low: float
    high: float
    """the step's seconds lie between these in four cases of five"""
    main_uncertainty: str
    """the assumption that most of the interval comes from"""
    flops: float
    """of the model a step, over all devices: matrices and half of attention's square, nothing recomputed"""
    hardware_flops: float
    """with what is recomputed"""
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def heaviest(self) -> Memory:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool:
        return self.heaviest.total <= self.job.cluster.device.memory

    @property
    def tokens_per_second(self) -> float:
        return self.job.tokens_per_step / self.seconds

    @property
    def mfu(self) -> float:
        return self.flops / self.seconds / self.peak

    @property
    def hfu(self) -> float:
        return self.hardware_flops / self.seconds / self.peak

    @property
    def peak(self) -> float:
        """FLOP a second of all devices that the job takes."""
        rates = self.job.cluster.device.peak_flops
        return rates.get(self.job.precision, rates["bf16"]) * self.job.layout.ranks
