"""The rollout queue: which groups are generated, by which policy, and which groups a step trains on. Torch-free."""

from meshwright.base.history.rollout_counts import DROP_CAUSES, Amount, RolloutCounts
from meshwright.rl.queue.cursor import RolloutCursor
from meshwright.rl.queue.rollout_queue import RolloutQueue
from meshwright.rl.queue.settings import FilterBudgetExceeded, QueueSettings, RolloutQueueError
from meshwright.rl.queue.step_batch import Assignment, GroupHeader, Receipt, StepBatch

__all__ = [
    "DROP_CAUSES",
    "Amount",
    "Assignment",
    "FilterBudgetExceeded",
    "GroupHeader",
    "QueueSettings",
    "Receipt",
    "RolloutCounts",
    "RolloutCursor",
    "RolloutQueue",
    "RolloutQueueError",
    "StepBatch",
]
