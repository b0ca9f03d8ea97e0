"""What a run is: one frozen dataclass tree, read from TOML and the command line, with its batch algebra and
fingerprints.
"""

from meshwright.config.constraints import IGNORED, LARGEST_BATCH
from meshwright.config.derive import Batch, batch_algebra, fingerprint, identity, placement
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
from meshwright.config.presets import PRESETS
from meshwright.config.reader import as_toml, from_dict, load, to_dict
from meshwright.config.run_config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LaunchConfig,
    NumericsConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    SourceConfig,
)

__all__ = [
    "IGNORED",
    "LARGEST_BATCH",
    "PRESETS",
    "ActivationCheckpointConfig",
    "Batch",
    "BatchConfig",
    "CheckpointConfig",
    "CompileConfig",
    "ContextConfig",
    "DDPConfig",
    "DataConfig",
    "EvalConfig",
    "FSDPConfig",
    "LaunchConfig",
    "LayoutConfig",
    "ModelConfig",
    "NumericsConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "RunConfig",
    "ScheduleConfig",
    "SourceConfig",
    "as_toml",
    "batch_algebra",
    "fingerprint",
    "from_dict",
    "identity",
    "load",
    "placement",
    "to_dict",
]
