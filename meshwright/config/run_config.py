"""The settings of a run: every key with its type, range, default and meaning, and whether it changes the numbers.

A setting is *identity* unless it is marked PLACEMENT, so a new setting counts as one that changes the numbers until
somebody decides otherwise. A key that is a Python keyword has a trailing underscore here and none in TOML
(`batch.global`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from meshwright.config.constraints import (
    ENTRY_POINT,
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
    """One data source."""

    kind: Literal["stdlib", "tokens", "text", "jsonl", "synthetic"] = "stdlib"
    """stdlib: source code of the Python standard library; tokens: binary files of token ids; text, jsonl: files to
    tokenize; synthetic: random token ids, seeded by the index of the sample
    """
    path: Annotated[str, PLACEMENT] = ""
    """file, folder or glob pattern of a tokens, text or jsonl source"""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """type of the token ids in a tokens file"""
    tokenizer: Annotated[str, PLACEMENT] = ""
    """tokenizer.json for a text or jsonl source; empty: bytes are tokens. The content of the file is part of the run's
    identity, its path is not
    """
    end_of_document: str = "auto"
    """token that ends each document of a text or jsonl source: a token of the tokenizer, none, or auto, which is
    model.separator if it is set, else the tokenizer's end-of-text token (for bytes: 0)
    """
    field: str = "text"
    """field of a JSONL record that contains the text"""
    samples: Annotated[int, Range(minimum=1, maximum=1 << 62)] = 1_000_000
    """number of samples of a synthetic source"""
    weight: PositiveFloat = 1.0
    """weight of this source in a mixture; samples are drawn in proportion to the weights"""

    def __post_init__(self) -> None:
        if self.kind in ("tokens", "text", "jsonl") and not self.path:
            raise ConfigError(
                f"data.path is empty, and data.kind = {self.kind} reads files",
                "expected a file, a folder or a glob pattern",
            )


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """The sample stream: one source, or a weighted mixture of several."""

    mixture: tuple[SourceConfig, ...] = ()
    """sources of a mixture; if set, the keys of the single source are ignored, except tokenizer and end_of_document,
    which apply to every source that does not set its own
    """
    sequence: Annotated[int, Range(minimum=2, maximum=1 << 24)] = 128
    """sequence length: tokens per sample"""
    on_bad_sample: Literal["stop", "quarantine"] = "stop"
    """what happens if a sample cannot be decoded: stop the run, or quarantine: train with all its labels masked"""
    bad_sample_budget: NonNegativeInt = 100
    """number of quarantined samples after which the run stops"""
    workers: Annotated[int, Range(minimum=0, maximum=256), PLACEMENT] = 0
    """data loader workers per rank; 0 decodes in the training thread, which suits tokens that are in memory"""
    worker_kind: Annotated[Literal["thread", "process"], PLACEMENT] = "thread"
    """thread for cheap decoding, process for decoding that holds the global interpreter lock"""
    prefetch: Annotated[int, Range(minimum=1, maximum=1024), PLACEMENT] = 4
    """micro-batches that the workers prepare ahead"""


@dataclass(frozen=True)
class BatchConfig:
    """Batch sizes: global = micro x data-parallel degree x accumulation steps; the accumulation steps are derived."""

    global_: Annotated[int, Range(minimum=1, maximum=MAX_GLOBAL_BATCH)] = 16
    """samples per optimizer step, over all ranks"""
    micro: Annotated[Annotated[int, Range(minimum=1, maximum=MAX_GLOBAL_BATCH)] | None, PLACEMENT] = None
    """samples per forward pass on one data-parallel rank; unset: no gradient accumulation"""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, with clipping by global norm."""

    lr: Annotated[float, Range(minimum=0, maximum=1e30)] = 3e-3
    """peak learning rate"""
    beta1: Annotated[float, Range(minimum=0, maximum=0.999999)] = 0.9
    """decay rate of the first moment"""
    beta2: Annotated[float, Range(minimum=0, maximum=0.999999)] = 0.95
    """decay rate of the second moment"""
    eps: PositiveFloat = 1e-8
    """epsilon in AdamW's denominator"""
    weight_decay: Annotated[float, Range(minimum=0, maximum=1e6)] = 0.1
    """decoupled weight decay, applied to matrices only, not to norms and biases"""
    clip: Annotated[float, Range(minimum=0, maximum=1e12)] = 1.0
    """maximum global norm of the gradient; 0 disables clipping"""
    implementation: Literal["fused", "foreach"] = "fused"
    """torch.optim.AdamW implementation"""
    cpu_offload: Annotated[bool, PLACEMENT] = False
    """keep optimizer state in host memory and run the optimizer on the CPU"""


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule, a pure function of the step."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """shape after the warm-up; wsd (warmup-stable-decay) is constant, then decays linearly"""
    warmup: NonNegativeInt = 10
    """steps of linear warm-up"""
    floor: UnitFraction = 0.1
    """final learning rate, as a fraction of the peak"""
    decay: UnitFraction = 0.2
    """wsd: fraction of all steps that the final decay takes"""


@dataclass(frozen=True)
class PrecisionConfig:
    """Mixed precision. Parameters and optimizer state are float32, or float64 with compute = fp64."""

    compute: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """dtype of forward and backward; fp16 uses dynamic loss scaling"""
    loss_scale: PositiveFloat = 65536.0
    """fp16: initial loss scale"""
    scale_interval: PositiveInt = 1000
    """fp16: finite steps in a row after which the loss scale is doubled"""
    deterministic: bool | None = None
    """use deterministic algorithms; unset: true on CPU, where they cost nothing, and false on CUDA, where they do"""


@dataclass(frozen=True)
class NumericsConfig:
    """Checks of losses, gradients and replicas."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """what happens if a loss or a gradient is not finite: stop (exit code 7), or skip the update on every rank"""
    skip_budget: NonNegativeInt = 10
    """skipped steps in a row after which the run stops; overflows of fp16 loss scaling do not count"""
    compare_every: Annotated[NonNegativeInt, PLACEMENT] = 50
    """steps between bitwise comparisons of the replicas' parameters, in addition to one before each checkpoint;
    0 compares only before checkpoints
    """


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on samples that training never reads."""

    holdout: Annotated[float, Range(minimum=0, maximum=0.5)] = 0.01
    """fraction of each source that is held out for evaluation; 0 disables evaluation"""
    every: Annotated[NonNegativeInt, PLACEMENT] = 50
    """steps between evaluations, in addition to one after the last step; 0 disables evaluation"""
    samples: Annotated[int, Range(minimum=1, maximum=MAX_GLOBAL_BATCH), PLACEMENT] = 64
    """held-out samples per evaluation"""


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved, and how many are kept."""

    mode: Literal["async", "sync", "off"] = "async"
    """async: training continues after the state is copied to host memory; sync: it waits until the checkpoint is
    published; off: no checkpoints
    """
    seconds: Annotated[float, Range(minimum=0, maximum=1e6)] = 2.0
    """seconds between time-triggered saves; 0 disables them"""
    every: NonNegativeInt = 0
    """steps between step-triggered saves; 0 disables them"""
    overhead: Annotated[float, Range(above=0, maximum=1)] = 0.02
    """maximum fraction of training time that time-triggered saves may take; expensive saves are made less often"""
    keep: PositiveInt = 3
    """number of newest verified checkpoints to keep"""
    keep_every: NonNegativeInt = 0
    """keep every N-th checkpoint permanently; 0 keeps none permanently"""
    on_failure: Literal["continue", "stop"] = "continue"
    """what happens if a save fails; if the last save of a run fails, the run always fails"""


@dataclass(frozen=True)
class LaunchConfig:
    """How ranks are started, supervised and restarted."""

    threads: Annotated[int, Range(minimum=1, maximum=1024), PLACEMENT] = 1
    """CPU threads per rank (torch.set_num_threads); a different number may change the last bits of results"""
    rendezvous_timeout: Annotated[TimeoutSeconds, PLACEMENT] = 60.0
    """seconds that ranks wait for each other at start"""
    collective_timeout: Annotated[TimeoutSeconds, PLACEMENT] = 600.0
    """timeout of a collective in seconds"""
    device: Annotated[Literal["auto", "cpu", "cuda"], PLACEMENT] = "auto"
    """device type; auto uses CUDA if it is available"""
    restarts: Annotated[NonNegativeInt, PLACEMENT] = 3
    """restarts in a row without progress after which a failing job gives up"""
    hang_timeout: Annotated[TimeoutSeconds, PLACEMENT] = 300.0
    """seconds without a heartbeat of a rank after which the job is stopped and the hanging rank is reported"""
    grace_period: Annotated[TimeoutSeconds, PLACEMENT] = 30.0
    """seconds that ranks have after a signal to save a checkpoint and exit"""
    straggler_ratio: Annotated[float, Range(above=1, maximum=1e6), PLACEMENT] = 1.5
    """a rank whose local phases take this many times those of the other ranks is reported as a straggler"""


ENTRY_POINT_KEYS = ("model", "loss", "source", "collate", "parallel_spec", "init")
"""Keys of `custom_model` that name an object of the user's code."""


@dataclass(frozen=True)
class CustomModelConfig:
    """The custom model of a run. `train` writes this section to the run file of its run folder: every verb compares it
    with the model, loss and data that are given, and imports nothing that it names.
    """

    class_: str | None = None
    """class of the model; none for a built-in model"""
    code: str | None = None
    """fingerprint of the code of the model, the loss and the functions beside them"""
    blocks: str | None = None
    """modules before the blocks, the blocks, and modules after them"""
    model: str | None = None
    """what was typed as --model, if the run was started from the command line"""
    loss: str | None = None
    """what was typed as --loss"""
    source: str | None = None
    """what was typed as --source"""
    collate: str | None = None
    """what was typed as --collate"""
    parallel_spec: str | None = None
    """what was typed as --parallel-spec"""
    init: str | None = None
    """what was typed as --init"""
    reduction: Literal["sum", "mean"] | None = None
    """what was typed as --reduction"""

    def __post_init__(self) -> None:
        """Refuses what is not an entry point: messages show the recorded ones as a command to type."""
        for name in ENTRY_POINT_KEYS:
            if (text := getattr(self, name)) is not None and not ENTRY_POINT.fullmatch(text):
                raise ConfigError(f"custom_model.{name} is not an entry point", "expected MODULE:NAME")
        for name in ("class_", "code", "blocks"):
            if not (getattr(self, name) or "").isprintable():
                raise ConfigError(f"custom_model.{name.rstrip('_')} has control characters", "expected printable text")

    @property
    def options(self) -> str:
        """The command-line options that name the model, its loss and its data."""
        typed = {name.replace("_", "-"): getattr(self, name) for name in (*ENTRY_POINT_KEYS, "reduction")}
        return " ".join(f"--{name} {text}" for name, text in typed.items() if text) or "--model MODULE:NAME"


@dataclass(frozen=True)
class RunConfig:
    """The settings of a run."""

    preset: Annotated[str, PLACEMENT] = "tiny"
    """preset that provides the defaults of all other settings"""
    seed: Annotated[int, Range(minimum=0, maximum=2**63 - 1)] = 0
    """seed of the initialization, the sample order and random operations such as dropout"""
    steps: NonNegativeInt = 300
    """number of optimizer steps of the whole run"""
    log_every: Annotated[PositiveInt, PLACEMENT] = 10
    """steps between log lines if standard output is not a terminal"""
    count_bytes_every: Annotated[NonNegativeInt, PLACEMENT] = 1000
    """steps between steps that count communication and memory, which are slower, in addition to the second step of each
    attempt; 0 never counts
    """
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
    custom_model: Annotated[CustomModelConfig, PLACEMENT] = field(default_factory=CustomModelConfig)

    def require_built_in_model(self) -> None:
        """Raises a ConfigError if the config is of a run of a custom model, which the config alone does not define."""
        if self.custom_model != CustomModelConfig():
            found = self.custom_model.class_ or self.custom_model.model
            raise ConfigError(
                f"the config is of a run of a custom model ({found}), and no model is given",
                f"try {self.custom_model.options}",
            )
