"""The phases of a rank: the one table that step clock, heartbeat, watchdog and prover read. Torch-free."""

from __future__ import annotations

STEP_PHASES = ("fetch", "copy", "forward", "backward", "sync", "update")
"""The timed phases of one optimizer step. `sync` is exposed communication: time in which the rank waits for others."""

TIMED_PHASES = (*STEP_PHASES, "evaluate", "save")
"""The phases whose seconds the heartbeat accumulates."""

OUTSIDE_PHASES = ("start", "warmup", "restore", "evaluate", "save", "callback")
"""The phases before the first step and between two steps, whose seconds the record of the next step has."""

PHASES = ("start", "warmup", "restore", *TIMED_PHASES, "callback", "end")
"""Every phase that a heartbeat can show, in the order in which a rank enters them."""
