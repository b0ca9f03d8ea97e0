"""What a run is: one frozen dataclass tree, read from TOML and the command line, with its batch algebra and
fingerprints.
"""

from meshwright.config.derive import Batch, batch_algebra, fingerprint, identity, placement
from meshwright.config.kinds import IGNORED, LARGEST_BATCH
from meshwright.config.model import ModelConfig
from meshwright.config.presets import PRESETS
from meshwright.config.read import as_toml, from_dict, load, to_dict
from meshwright.config.spread import (
    ComputeConfig,
    ContextConfig,
    LayoutConfig,
    PipelineConfig,
    ReplicateConfig,
    ShardConfig,
)
from meshwright.config.tree import (
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
    "Batch",
    "BatchConfig",
    "CheckpointConfig",
    "ComputeConfig",
    "ContextConfig",
    "DataConfig",
    "EvalConfig",
    "LaunchConfig",
    "LayoutConfig",
    "ModelConfig",
    "NumericsConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "ReplicateConfig",
    "RunConfig",
    "ScheduleConfig",
    "ShardConfig",
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
