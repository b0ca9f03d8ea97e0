"""What a user brings for the update of a run: an optimizer factory and a schedule, and the record of their code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.core.optim.schedule import ScheduleFunction
from meshwright.core.optim.user_optimizer import OptimizerFactory


@dataclass(frozen=True)
class UserUpdate:
    """The user's optimizer and schedule; None is that of the config."""

    optimizer: OptimizerFactory | None = None
    schedule: ScheduleFunction | None = None
    code: dict[str, Any] | None = None
    """the fingerprints of both and of the reward, where the model is built-in; that of a custom model has them, too"""


NO_USER_UPDATE = UserUpdate()
