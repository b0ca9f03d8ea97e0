"""A callback that reports a step whose loss is far above the recent ones, and a failed attempt.

Run it with: PYTHONPATH=examples meshwright train --callbacks loss_alarm:LossAlarm
"""

from collections import deque
from statistics import median

from meshwright import Callback


class LossAlarm(Callback):
    """Prints a line to the log of rank 0; replace `report` by a message to your team."""

    def __init__(self, factor: float = 1.5, window: int = 50) -> None:
        self.factor = factor
        self.recent: deque[float] = deque(maxlen=window)

    def report(self, text: str) -> None:
        print(text, flush=True)

    def on_step(self, record, run):
        loss = record["loss"]
        if loss is not None and len(self.recent) >= 10 and loss > self.factor * median(self.recent):
            self.report(f"{run.path.name} step {record['step']}: loss {loss:.3f}, median {median(self.recent):.3f}")
        if loss is not None:
            self.recent.append(loss)

    def on_incident(self, record, run):
        self.report(f"{run.path.name} attempt {record['attempt']} failed: {record['message']}")
