"""The settings of a run: every key with its type, range, default and meaning, and whether it changes the numbers.

A setting is *identity* unless it is marked PLACEMENT, so a new setting counts as one that changes the numbers until
somebody decides otherwise. A key that is a Python keyword has a trailing underscore here and none in TOML
(`batch.global`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from meshwright.base.config.constraints import (
    ENTRY_POINT,
    PLACEMENT,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    TimeoutSeconds,
    parse_step_ranges,
)
from meshwright.base.config.data import DataConfig
from meshwright.base.config.model import LoraConfig, ModelConfig
from meshwright.base.config.optimizer import OptimizerConfig, ScheduleConfig
from meshwright.base.config.parallelism import (
    ActivationCheckpointConfig,
    CompileConfig,
    ContextConfig,
    DDPConfig,
    FSDPConfig,
    KernelsConfig,
    LayoutConfig,
    PipelineConfig,
)
from meshwright.base.config.rl import RLConfig
from meshwright.base.limits import MAX_GLOBAL_BATCH
from meshwright.errors import ConfigError


@dataclass(frozen=True)
class BatchConfig:
    """Batch sizes: global = micro x data-parallel degree x accumulation steps; the accumulation steps are derived."""

    global_: Annotated[int, Range(minimum=1, maximum=MAX_GLOBAL_BATCH)] = 16
    """samples per optimizer step, over all ranks"""
    micro: Annotated[Annotated[int, Range(minimum=1, maximum=MAX_GLOBAL_BATCH)] | None, PLACEMENT] = None
    """samples per forward pass on one data-parallel rank; unset: no gradient accumulation"""


@dataclass(frozen=True)
class PrecisionConfig:
    """Mixed precision. Master weights and optimizer state are float32, or float64 with compute = fp64."""

    compute: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"
    """dtype of forward and backward; auto: bf16 on CUDA, fp32 on CPU, and a run that moves from one to the other needs
    the value that it began with; fp16 uses dynamic loss scaling
    """
    weights: Annotated[Literal["fp32", "bf16"] | None, PLACEMENT] = None
    """with compute = bf16, dtype of the weights in the model: bf16 keeps float32 master weights in the optimizer, and
    fp32 casts the weights in every forward pass (autocast); unset: bf16 on CUDA unless optimizer.cpu_offload is set,
    fp32 on CPU
    """
    residual: Annotated[Literal["fp32", "bf16"] | None, PLACEMENT] = None
    """with compute = bf16, dtype of the residual stream of built-in models; unset: that of `weights`"""
    float8: bool = False
    """compute the linear layers of blocks in float8 with one scale per row; weights, gradients and optimizer state keep
    their dtypes; needs compute = bf16, and on CUDA a GPU of compute capability 8.9 or newer; on CPU it is emulated
    """
    tf32: bool = False
    """with compute = fp32, let CUDA compute matmuls in TF32, which has 10 bits of mantissa"""
    loss_scale: PositiveFloat = 65536.0
    """fp16: initial loss scale"""
    scale_interval: PositiveInt = 1000
    """fp16: finite steps in a row after which the loss scale is doubled"""
    deterministic: bool | None = None
    """use deterministic algorithms: equal runs and resumes on the same layout and device are bitwise equal, and an
    operator without a deterministic implementation is an error; unset: true on CPU, where they cost nothing,
    and false on CUDA, where they cost time
    """


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
    """maximum fraction of training time that time-triggered saves and snapshots may take; expensive ones are made less
    often
    """
    keep: PositiveInt = 3
    """number of newest verified checkpoints to keep"""
    keep_every: NonNegativeInt = 0
    """keep every N-th checkpoint permanently; 0 keeps none permanently"""
    keep_best: str = ""
    """metric of the evaluations, such as loss, whose best checkpoint is kept as well; empty: none"""
    best: Literal["min", "max"] = "min"
    """whether the best checkpoint has the smallest or the largest value"""
    memory_every: NonNegativeInt = 0
    """in a job on several hosts: steps between snapshots in the memory of the hosts, each rank's on its own host and on
    another one; 0 disables them
    """
    on_failure: Literal["continue", "stop"] = "continue"
    """what happens if a save fails; if the last save of a run fails, the run always fails"""


@dataclass(frozen=True)
class EarlyStoppingConfig:
    """Ends the run when its evaluations do not improve any more."""

    patience: NonNegativeInt = 0
    """evaluations in a row without an improvement after which the run ends; 0 never ends it early"""
    metric: str = "loss"
    """metric of the evaluations: loss, or a metric of the user's"""
    mode: Literal["min", "max"] = "min"
    """whether a smaller or a larger value is better"""
    margin: Annotated[float, Range(minimum=0, maximum=1e12)] = 0.0
    """smallest difference that counts as an improvement"""


@dataclass(frozen=True)
class TrackersConfig:
    """Experiment trackers: where the scalars of a run are logged besides its event files."""

    tensorboard: bool = False
    """write TensorBoard's event files to the folder tensorboard of the run folder"""
    wandb: Literal["off", "offline", "online"] = "off"
    """log to Weights & Biases; offline writes files that `wandb sync` uploads"""
    mlflow: str = ""
    """tracking URI of MLflow to log to, such as http://localhost:5000; empty: none"""
    project: str = "meshwright"
    """project of Weights & Biases, and experiment of MLflow"""
    every: PositiveInt = 10
    """steps between logged steps"""


MAX_PROFILED_STEPS = 200
"""Steps that a run may profile: the profile of a step takes megabytes."""


@dataclass(frozen=True)
class ProfileConfig:
    """Steps that are profiled with torch.profiler, on every rank."""

    steps: str = ""
    """ranges of steps to profile, such as 10:13 for steps 10, 11 and 12, or 10:13,50:52; empty: none"""
    shapes: bool = False
    """record the shapes of the inputs of operators, which makes a profiled step slower"""

    def __post_init__(self) -> None:
        self.ranges()

    def ranges(self) -> list[range]:
        """The ranges of steps."""
        return parse_step_ranges(self.steps, "profile.steps", MAX_PROFILED_STEPS)


@dataclass(frozen=True)
class MetricsConfig:
    """Metrics of a run, exported by a process beside it while it trains; see docs/metrics.md."""

    port: Annotated[int, Range(minimum=0, maximum=65535)] = 0
    """port on which Prometheus scrapes the run, at /metrics; 0: none"""
    host: str = "127.0.0.1"
    """address of this machine to serve on; 0.0.0.0 serves all interfaces"""
    otlp: str = ""
    """address of an OpenTelemetry collector to push metrics and spans to, such as http://127.0.0.1:4318; empty: none"""

    def __post_init__(self) -> None:
        if self.otlp and not self.otlp.startswith(("http://", "https://")):
            raise ConfigError(f"metrics.otlp = {self.otlp}", "expected an address such as http://127.0.0.1:4318")


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
    hosts: Annotated[int, Range(minimum=1, maximum=65536), PLACEMENT] = 1
    """number of hosts of the job, each with a supervisor of its own and an equal share of the ranks; supervisors of
    further hosts wait as spares
    """
    min_hosts: Annotated[int, Range(minimum=0, maximum=65536), PLACEMENT] = 0
    """fewest hosts on which the job continues after it has lost some; 0: all of them"""
    resize: Annotated[Literal["checkpoint", "restart"], PLACEMENT] = "checkpoint"
    """when a job on fewer hosts uses the ones that return: after the next checkpoint, or at the next restart"""
    preflight: Annotated[Literal["off", "check", "exclude"], PLACEMENT] = "off"
    """in a job on several hosts, measure the hosts before the first attempt: check ends the job if something is broken,
    exclude leaves out the hosts that are slow or broken, whose places spare hosts take
    """
    elastic: Annotated[bool, PLACEMENT] = False
    """under torchrun with a range of nodes, let layout.replicate follow the number of ranks that torchrun starts"""
    host_timeout: Annotated[TimeoutSeconds, PLACEMENT] = 15.0
    """seconds without a message of a host's supervisor after which the host is lost, and its ranks are restarted"""

    def __post_init__(self) -> None:
        if self.min_hosts > self.hosts:
            raise ConfigError(
                f"launch.min_hosts = {self.min_hosts} is more than launch.hosts = {self.hosts}",
                f"expected at most {self.hosts}",
            )


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
    init_from: Annotated[str, PLACEMENT] = ""
    """folder of safetensors with the initial weights, relative to the run file; its config.json gives the keys of
    `model`. Empty: weights are initialized from the seed. The content of the weights is part of the run's identity,
    their path is not
    """
    count_bytes_every: Annotated[NonNegativeInt, PLACEMENT] = 1000
    """steps between steps that count communication and memory, which are slower, in addition to the second step of each
    attempt; 0 never counts
    """
    planned_for: Annotated[str, PLACEMENT] = ""
    """cluster that the layout was planned for, such as `h100:8x2`; `plan --out` and `train --plan best` write it, and
    the report says so if the run was on another one
    """
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    rl: RLConfig = field(default_factory=RLConfig)
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
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    early_stopping: Annotated[EarlyStoppingConfig, PLACEMENT] = field(default_factory=EarlyStoppingConfig)
    trackers: Annotated[TrackersConfig, PLACEMENT] = field(default_factory=TrackersConfig)
    profile: Annotated[ProfileConfig, PLACEMENT] = field(default_factory=ProfileConfig)
    metrics: Annotated[MetricsConfig, PLACEMENT] = field(default_factory=MetricsConfig)
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
