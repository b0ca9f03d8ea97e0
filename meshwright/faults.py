"""Named fail points, off by default: a process that reaches one dies, hangs, slows down or fails, as was asked.

    MESHWRIGHT_FAULT="save.after_shard:rank1:kill@step20"

A fault is POINT[:rankN]:ACTION[@stepN][@P%][xTIMES][#RESTART]; several are separated by commas. Without a rank every
rank takes part, without a step every step. A chance of P percent is decided by MESHWRIGHT_FAULT_SEED, the point, the
rank, the step and the restart alone, so that a failure repeats from its seed. A fault is armed on the first launch of
a job and on no restart; `xTIMES` arms it on so many launches, `#RESTART` on that restart alone.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import ConfigError

FAIL_POINTS = {
    "start.begin": "a rank has joined the others and built nothing yet",
    "start.restore": "before a checkpoint's tensors are copied in",
    "start.restored": "after a checkpoint's tensors were copied in",
    "step.fetch": "before a step's samples are fetched",
    "step.copy": "before they are copied to the device",
    "step.forward": "before a forward pass",
    "step.backward": "before a backward pass",
    "step.sync": "before waiting for the other ranks",
    "step.update": "before the optimizer's update",
    "step.updated": "after the update, before the step is counted",
    "step.collective": "before the sum that opens a step",
    "evaluate": "before an evaluation",
    "save.stage": "before the copy to host memory",
    "save.begin": "before a rank's shard is opened",
    "save.write": "before each write to a shard",
    "save.after_shard": "a rank's shard is durable",
    "save.before_manifest": "every shard is durable, the manifest not yet written",
    "save.before_publish": "the manifest is durable under another name",
    "save.after_publish": "the manifest is in place",
    "retain.unpublished": "a checkpoint is withdrawn, its files not yet deleted",
    "end": "the last step is done",
}

ACTIONS = {
    "kill": "end this process with SIGKILL",
    "exit": "leave at once with status 0 and no word",
    "term": "send this process SIGTERM",
    "stop": "stop this process with SIGSTOP",
    "hang": "sleep for ever",
    "spin": "loop for ever",
    "lock": "sleep for ever in native code that keeps the interpreter's lock",
    "slow": "sleep so many seconds (slow=0.1)",
    "raise": "raise an error",
    "oom": "fail as if memory were full",
    "enospc": "fail as if the disk were full",
    "eio": "fail as if the disk were broken",
    "nan": "step.backward: make this rank's loss not a number",
    "flip": "step.fetch: flip one bit of this rank's first parameter",
    "desync": "step.collective: enter another collective than the other ranks",
}

REQUIRED_POINT = {"nan": "step.backward", "flip": "step.fetch", "desync": "step.collective"}
"""Actions that the place itself has to do."""

FAULT_PATTERN = re.compile(
    r"(?P<point>[a-z_.]+)(:rank(?P<rank>\d+))?:(?P<action>[a-z]+)(=(?P<value>\d+(\.\d+)?))?"
    r"((@step(?P<step>\d+))|(@(?P<chance>\d+(\.\d+)?)%))?(x(?P<times>\d+))?(#(?P<restart>\d+))?"
)


class InjectedFault(RuntimeError):
    """Raised by the action `raise`."""


@dataclass(frozen=True)
class Fault:
    point: str
    action: str
    rank: int | None = None
    step: int | None = None
    chance: float = 100.0
    value: float = 0.0
    times: int = 1
    restart: int | None = None

    def armed(self, rank: int, restart: int) -> bool:
        launch = restart < self.times if self.restart is None else restart == self.restart
        return self.rank in (None, rank) and launch

    @classmethod
    def parse(cls, text: str) -> Fault:
        match = FAULT_PATTERN.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"MESHWRIGHT_FAULT: {text!r} is not understood",
                "allowed: POINT[:rankN]:ACTION[@stepN][@P%][xTIMES][#RESTART]",
            )
        if match["point"] not in FAIL_POINTS:
            raise ConfigError(f"MESHWRIGHT_FAULT: no point {match['point']!r}", f"allowed: {', '.join(FAIL_POINTS)}")
        if match["action"] not in ACTIONS:
            raise ConfigError(f"MESHWRIGHT_FAULT: no action {match['action']!r}", f"allowed: {', '.join(ACTIONS)}")
        if (only := REQUIRED_POINT.get(match["action"], match["point"])) != match["point"]:
            raise ConfigError(
                f"MESHWRIGHT_FAULT: {match['action']} at {match['point']} does nothing", f"allowed: {only}"
            )
        return cls(
            match["point"],
            match["action"],
            int(match["rank"]) if match["rank"] else None,
            int(match["step"]) if match["step"] else None,
            float(match["chance"] or 100.0),
            float(match["value"] or 0.0),
            int(match["times"] or 1),
            int(match["restart"]) if match["restart"] else None,
        )


def parse_faults(text: str) -> list[Fault]:
    return [Fault.parse(part) for part in text.split(",") if part.strip()]


ARMED_FAULTS: list[Fault] = []
PROCESS: dict[str, int | str] = {"rank": 0, "restart": 0, "seed": "0"}


def arm(rank: int, restart: int, environment: Mapping[str, str] = os.environ) -> None:
    """Reads the environment's faults for this process; from here on its fail points are live."""
    asked = parse_faults(environment.get("MESHWRIGHT_FAULT", ""))
    ARMED_FAULTS[:] = [fault for fault in asked if fault.armed(rank, restart)]
    PROCESS.update(rank=rank, restart=restart, seed=environment.get("MESHWRIGHT_FAULT_SEED", "0"))


def fail_point(point: str, step: int) -> str:
    """A fail point. Gives the action that the caller must do itself (nan, flip, desync), or ''."""
    for fault in ARMED_FAULTS:
        if fault.point == point and fault.step in (None, step) and is_drawn(fault, step):
            return perform(fault, step)
    return ""


def is_drawn(fault: Fault, step: int) -> bool:
    if fault.chance >= 100.0:
        return True
    text = f"{PROCESS['seed']}/{fault.point}/{PROCESS['rank']}/{step}/{PROCESS['restart']}"
    draw = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return draw < fault.chance / 100.0 * 2**64


def perform(fault: Fault, step: int) -> str:
    where = f"injected at {fault.point}, rank {PROCESS['rank']}, step {step}"
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(0)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(1e6)
        case "spin":
            while True:
                pass
        case "lock":
            while True:
                ctypes.PyDLL(None).sleep(1_000_000)  # PyDLL does not let go of the interpreter's lock
        case "slow":
            time.sleep(fault.value)
        case "raise":
            raise InjectedFault(where)
        case "oom":
            raise MemoryError(where)
        case "enospc":
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({where})")
        case "eio":
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} ({where})")
        case cooperative:
            return cooperative
    return ""
