"""Three ways to keep replicas equal: summing gradients, averaging parameters, and broadcasting parameters."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.config import RunConfig
from meshwright.data.file_sources import open_sources
from meshwright.parallel.world import World
from meshwright.practice.cards.card import Knobs, Observation
from meshwright.practice.experiments.counted_training import LEARNING_RATE, RankTraining, small_config
from meshwright.practice.pictures import Bars
from meshwright.prover.oracle.training import train
from meshwright.testing import run_ranks

MODES = ("gradients", "parameters", "broadcast")
RATE = (f"--schedule.lr={LEARNING_RATE}", "--schedule.warmup=0", "--schedule.decay=0")
