"""The tree of a run's settings: every key, its type, its range, its default, and whether it changes the numbers.

A field is *identity* unless it is marked PLACEMENT: what nobody thought about counts as changing the numbers.
A key that is a Python keyword carries a trailing underscore here and none in TOML (`batch.global`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from meshwright.config.constraints import (
    MAX_GLOBAL_BATCH,
    PLACEMENT,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    TimeoutSeconds,
    UnitFraction,
)
from meshwright.config.model import ModelConfig
from meshwright.config.parallelism import (
    ActivationCheckpointConfig,
    CompileConfig,
    ContextConfig,
    DDPConfig,
    FSDPConfig,
    LayoutConfig,
    PipelineConfig,
)
from meshwright.errors import ConfigError


@dataclass(frozen=True)
class SourceConfig:
    """Where samples come from."""

    kind: Literal["stdlib", "tokens", "text", "jsonl", "synthetic"] = "stdlib"
    """stdlib: the Python library's own source text; tokens: raw uint16/uint32 files; text, jsonl: files to tokenize;
    synthetic: ids hashed from the position
    """
    path: Annotated[str, PLACEMENT] = ""
    """file, folder or glob of a tokens, text or jsonl source"""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """width of the ids in a token file"""
    tokenizer: Annotated[str, PLACEMENT] = ""
    """a tokenizer.json for text and jsonl; empty is byte level (its content is identity, not its path)"""
    end_of_document: str = "auto"
    """token that ends each document of a text or jsonl source: a token of the tokenizer, none, or auto, which is
    model.separator if it is set and else the tokenizer's end-of-text token (byte level: 0)
    """
    field: str = "text"
    """the field of a JSONL record that holds the text"""
    samples: Annotated[int, Range(minimum=1, maximum=1 << 62)] = 1_000_000
    """how many samples a synthetic source has"""
    weight: PositiveFloat = 1.0
    """share of this source in a mixture, in any unit"""

    def __post_init__(self) -> None:
        if self.kind in ("tokens", "text", "jsonl") and not self.path:
            raise ConfigError(
                f"data.path is empty and data.kind = {self.kind!r} reads files", "allowed: a file, folder or glob"
            )


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """The sample stream: one source, or a weighted mixture of several."""

    mixture: tuple[SourceConfig, ...] = ()
    """sources of a mixture, each with its weight; the keys of the single source are then not used, except for tokenizer
    and end_of_document, which apply to every source that does not set its own
    """
    sequence: Annotated[int, Range(minimum=2)] = 128
    """tokens a sample"""
    on_bad_sample: Literal["stop", "quarantine"] = "stop"
    """what to do with a sample that cannot be decoded: stop, or train on it as if every label were masked"""
    bad_sample_budget: NonNegativeInt = 100
    """how many bad samples quarantine may meet before the run stops"""
    workers: Annotated[int, Range(minimum=0, maximum=256), PLACEMENT] = 0
    """loader workers a rank; 0 decodes in the training thread, which is right for tokens in memory"""
    worker_kind: Annotated[Literal["thread", "process"], PLACEMENT] = "thread"
    """threads for cheap decoding, processes for decoding that holds the interpreter's lock"""
    prefetch: Annotated[int, Range(minimum=1, maximum=1024), PLACEMENT] = 4
    """micro-batches that the workers keep ready"""


@dataclass(frozen=True)
class BatchConfig:
    """global = micro x data-parallel degree x accumulation; accumulation is derived."""

    global_: Annotated[int, Range(minimum=1, maximum=MAX_GLOBAL_BATCH)] = 16
    """samples an optimizer step, over all ranks"""
    micro: Annotated[Annotated[int, Range(minimum=1)] | None, PLACEMENT] = None
    """samples a forward pass on one rank; unset: the whole share of the rank at once"""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and global-norm clipping."""

    lr: Annotated[float, Range(minimum=0)] = 3e-3
    """peak learning rate"""
    beta1: Annotated[float, Range(minimum=0, maximum=0.999999)] = 0.9
    """decay of the first moment"""
    beta2: Annotated[float, Range(minimum=0, maximum=0.999999)] = 0.95
    """decay of the second moment"""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon"""
    weight_decay: Annotated[float, Range(minimum=0)] = 0.1
    """decoupled decay, on matrices alone (not on norms and biases)"""
    clip: Annotated[float, Range(minimum=0)] = 1.0
    """largest global gradient norm; 0 does not clip"""
    implementation: Literal["fused", "foreach"] = "fused"
    """torch's AdamW kernels"""
    cpu_offload: Annotated[bool, PLACEMENT] = False
    """keep optimizer state in host memory and run the optimizer there"""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate as a pure function of the step."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """shape after the warm-up; wsd: stable, then a linear decay"""
    warmup: NonNegativeInt = 10
    """steps of linear warm-up"""
    floor: UnitFraction = 0.1
    """share of the peak that the decay ends at"""
    decay: UnitFraction = 0.2
    """wsd: share of all steps that the final decay takes"""


@dataclass(frozen=True)
class PrecisionConfig:
    """What the forward and backward compute in; weights and optimizer stay in float32 (float64 for fp64)."""

    compute: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """fp16 brings a dynamic loss scaler"""
    loss_scale: PositiveFloat = 65536.0
    """fp16: the first loss scale"""
    scale_interval: PositiveInt = 1000
    """fp16: finite steps before the scale doubles"""
    deterministic: bool | None = None
    """ask torch for deterministic kernels; unset: on CPU, where it is free, and not on CUDA, where it has a price"""


@dataclass(frozen=True)
class NumericsConfig:
    """What happens when a loss or a gradient is not finite."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """stop (exit 7), or skip the update on every rank and count it"""
    skip_budget: NonNegativeInt = 10
    """skipped steps in a row before the run stops all the same (fp16's own scale search not counted)"""
    compare_every: Annotated[NonNegativeInt, PLACEMENT] = 50
    """steps between comparisons of the replicas' parameters, beside the one before each checkpoint; 0 none"""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on samples that training never sees."""

    holdout: Annotated[float, Range(minimum=0, maximum=0.5)] = 0.01
    """share of each source held out by a keyed permutation; 0 turns evaluation off"""
    every: Annotated[NonNegativeInt, PLACEMENT] = 50
    """steps between evaluations; 0 never"""
    samples: Annotated[int, Range(minimum=1, maximum=MAX_GLOBAL_BATCH), PLACEMENT] = 64
    """held-out samples an evaluation"""


@dataclass(frozen=True)
class CheckpointConfig:
    """When state is saved, and how much of it is kept."""

    mode: Literal["async", "sync", "off"] = "async"
    """async: training waits for the copy to host memory alone; sync: until the checkpoint is published"""
    seconds: Annotated[float, Range(minimum=0, maximum=1e6)] = 2.0
    """seconds between saves; 0 does not save by time"""
    every: NonNegativeInt = 0
    """steps between saves; 0 does not save by steps"""
    overhead: Annotated[float, Range(above=0, maximum=1)] = 0.02
    """the most of the time that saving by time may take from training: dear saves come more rarely"""
    keep: PositiveInt = 3
    """newest verified checkpoints that are kept"""
    keep_every: NonNegativeInt = 0
    """every so many-th checkpoint is kept for good; 0 none"""
    on_failure: Literal["continue", "stop"] = "continue"
    """what follows a save that failed; the last save of a run must succeed in any case"""


@dataclass(frozen=True)
class LaunchConfig:
    """How ranks come to life."""

    threads: Annotated[int, Range(minimum=1, maximum=1024), PLACEMENT] = 1
    """CPU threads a rank; another count may change the last bits"""
    rendezvous_timeout: Annotated[TimeoutSeconds, PLACEMENT] = 60.0
    """seconds that ranks wait for each other at start"""
    collective_timeout: Annotated[TimeoutSeconds, PLACEMENT] = 600.0
    """seconds that a collective may take"""
    device: Annotated[Literal["auto", "cpu", "cuda"], PLACEMENT] = "auto"
    """auto: CUDA where there is one"""
    restarts: Annotated[NonNegativeInt, PLACEMENT] = 3
    """how often a failed job is restarted without getting any further"""
    hang_timeout: Annotated[TimeoutSeconds, PLACEMENT] = 300.0
    """seconds that no rank may go without a sign of life before the job is ended and the rank named"""
    grace_period: Annotated[TimeoutSeconds, PLACEMENT] = 30.0
    """seconds from a signal to the end; a checkpoint that is not whole by then is not published"""
    straggler_ratio: Annotated[float, Range(above=1, maximum=1e6), PLACEMENT] = 1.5
    """a rank that needs so many times the others' time for its own phases is named"""


@dataclass(frozen=True)
class RunConfig:
    """A whole run."""

    preset: Annotated[str, PLACEMENT] = "tiny"
    """the preset these settings start from"""
    seed: Annotated[int, Range(minimum=0, maximum=2**63 - 1)] = 0
    """decides initialisation, sample order and dropout"""
    steps: NonNegativeInt = 300
    """optimizer steps of the whole run"""
    log_every: Annotated[PositiveInt, PLACEMENT] = 10
    """steps between printed lines where there is no terminal"""
    count_bytes_every: Annotated[NonNegativeInt, PLACEMENT] = 1000
    """steps between those, slower, that count bytes sent and held, beside the second of an attempt; 0 never"""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: Annotated[CheckpointConfig, PLACEMENT] = field(default_factory=CheckpointConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    ddp: DDPConfig = field(default_factory=DDPConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
