"""The settings of a run: frozen dataclasses, read from TOML and the command line, with batch sizes and fingerprints."""

from meshwright.base.config.batch import Batch, derive_batch
from meshwright.base.config.constraints import IGNORE_INDEX
from meshwright.base.config.data import DataConfig, SourceConfig
from meshwright.base.config.fingerprint import fingerprint, identity, placement
from meshwright.base.config.model import LoraConfig, ModelConfig
from meshwright.base.config.optimizer import OptimizerConfig, ParameterGroupConfig, ScheduleConfig
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
from meshwright.base.config.presets import PRESETS
from meshwright.base.config.reader import config_from_dict, config_to_dict, config_to_toml, load_config
from meshwright.base.config.rl import RLConfig
from meshwright.base.config.run_config import (
    BatchConfig,
    CheckpointConfig,
    CustomModelConfig,
    EarlyStoppingConfig,
    EvalConfig,
    LaunchConfig,
    MetricsConfig,
    NumericsConfig,
    PrecisionConfig,
    ProfileConfig,
    RunConfig,
    TrackersConfig,
)

__all__ = [
    "IGNORE_INDEX",
    "PRESETS",
    "ActivationCheckpointConfig",
    "Batch",
    "BatchConfig",
    "CheckpointConfig",
    "CompileConfig",
    "ContextConfig",
    "CustomModelConfig",
    "DDPConfig",
    "DataConfig",
    "EarlyStoppingConfig",
    "EvalConfig",
    "FSDPConfig",
    "KernelsConfig",
    "LaunchConfig",
    "LayoutConfig",
    "LoraConfig",
    "MetricsConfig",
    "ModelConfig",
    "NumericsConfig",
    "OptimizerConfig",
    "ParameterGroupConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "ProfileConfig",
    "RLConfig",
    "RunConfig",
    "ScheduleConfig",
    "SourceConfig",
    "TrackersConfig",
    "config_from_dict",
    "config_to_dict",
    "config_to_toml",
    "derive_batch",
    "fingerprint",
    "identity",
    "load_config",
    "placement",
]
