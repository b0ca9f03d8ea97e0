"""Fault injection: named fail points at which a rank is killed, hangs, slows down or fails; off by default.

    MESHWRIGHT_FAULT="save.after_shard:rank1:kill@step20"

A fault is POINT[:rankN]:ACTION[@stepN[+]|@everyN][@P%][xTIMES][#RESTART]; several faults are separated by commas.
Without a rank the fault applies to every rank, without a step to every step; `@stepN+` means step N and every later
one, `@everyN` every step that N divides. A probability of P percent is drawn from MESHWRIGHT_FAULT_SEED, the point, the
rank, the step and the restart, so that a failure can be repeated. A fault is active in the first attempt of a job only;
`xTIMES` activates it in the first TIMES attempts, `#RESTART` in one restart.
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
    "preflight.matmul": "before each matmul of a preflight",
    "preflight.send": "before each message between hosts of a preflight",
    "preflight.write": "before each write to the run folder of a preflight",
    "start.begin": "after the process group is initialized, before the model is built",
    "start.restore": "before a checkpoint's tensors are copied in",
    "start.restored": "after a checkpoint's tensors were copied in",
    "step.fetch": "before a step's samples are fetched",
    "step.copy": "before the samples are copied to the device",
    "step.forward": "before a forward pass",
    "step.backward": "before a backward pass",
    "step.sync": "before waiting for the other ranks",
    "step.update": "before the optimizer update",
    "step.updated": "after the optimizer update, before the step is counted",
    "step.collective": "before the all-reduce of the step control vector",
    "evaluate": "before an evaluation",
    "save.stage": "before the copy to host memory",
    "save.begin": "before a rank's shard is opened",
    "save.write": "before each write to a shard",
    "save.after_shard": "after the shard of a rank is durable",
    "save.after_part": "after the shard and the part of a rank are durable",
    "save.before_manifest": "after every shard and every part is durable, before the manifest is written",
    "save.before_publish": "after the manifest is durable under a temporary name",
    "save.after_publish": "after the manifest is published",
    "retain.unpublished": "after the manifest of an old checkpoint is removed, before its files are deleted",
    "generator.assigned": "before a generator generates a group; the rank is its number, the step that of the group",
    "generator.generated": "after a generator has generated a group, before it sends it",
    "policy.publish": "before a policy is published",
    "policy.published": "after a policy is durable, before the rollout service knows it",
    "rollout.append": "before rollouts are written to the rollout log; the step is the number of the append",
    "rollout.committed": "after rollouts are durable in the rollout log, before they are acknowledged",
    "end": "after the last step",
}

ACTIONS = {
    "kill": "end this process with SIGKILL",
    "exit": "exit at once with status 0 and no report",
    "term": "send this process SIGTERM",
    "stop": "stop this process with SIGSTOP",
    "hang": "sleep forever",
    "spin": "loop forever",
    "lock": "sleep forever in native code that holds the GIL",
    "slow": "sleep for the given number of seconds (slow=0.1)",
    "raise": "raise an error",
    "oom": "raise MemoryError",
    "enospc": "raise OSError(ENOSPC), as on a full disk",
    "eio": "raise OSError(EIO), as on a broken disk",
    "nan": "step.backward: make the loss of this rank NaN",
    "flip": "step.fetch: flip one bit of the first parameter of this rank",
    "desync": "step.collective: enter another collective than the other ranks",
}

REQUIRED_POINT = {"nan": "step.backward", "flip": "step.fetch", "desync": "step.collective"}
"""Actions that the caller of `fail_point` performs itself, each at one point."""

FAULT_PATTERN = re.compile(
    r"(?P<point>[a-z_.]+)(:rank(?P<rank>\d+))?:(?P<action>[a-z]+)(=(?P<value>\d+(\.\d+)?))?"
    r"((@step(?P<step>\d+)(?P<later>\+)?)|(@every(?P<every>[1-9]\d*))|(@(?P<chance>\d+(\.\d+)?)%))?(x(?P<times>\d+))?(#(?P<restart>\d+))?"
)


class InjectedFault(RuntimeError):
    """Raised by the action `raise`."""


@dataclass(frozen=True)
class Fault:
    """One fault of MESHWRIGHT_FAULT."""

    point: str
    action: str
    rank: int | None = None
    step: int | None = None
    chance: float = 100.0
    value: float = 0.0
    times: int = 1
    restart: int | None = None
    later: bool = False
    """whether the fault applies to every step from `step` on"""
    every: int = 1
    """the fault applies to the steps that this number divides"""

    def applies_to(self, step: int) -> bool:
        if step % self.every:
            return False
        return self.step is None or (step >= self.step if self.later else step == self.step)

    def is_armed(self, rank: int, restart: int) -> bool:
        """Whether the fault is active on this rank in this attempt of the job."""
        active = restart < self.times if self.restart is None else restart == self.restart
        return self.rank in (None, rank) and active

    @classmethod
    def parse(cls, text: str) -> Fault:
        match = FAULT_PATTERN.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"MESHWRIGHT_FAULT: {text!r} cannot be parsed",
                "expected POINT[:rankN]:ACTION[@stepN[+]|@everyN][@P%][xTIMES][#RESTART]",
            )
        if match["point"] not in FAIL_POINTS:
            raise ConfigError(
                f"MESHWRIGHT_FAULT: unknown fail point {match['point']!r}", f"expected one of {', '.join(FAIL_POINTS)}"
            )
        if match["action"] not in ACTIONS:
            raise ConfigError(
                f"MESHWRIGHT_FAULT: unknown action {match['action']!r}", f"expected one of {', '.join(ACTIONS)}"
            )
        if (only := REQUIRED_POINT.get(match["action"], match["point"])) != match["point"]:
            raise ConfigError(
                f"MESHWRIGHT_FAULT: {match['action']} at {match['point']} has no effect", f"expected the point {only}"
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
            match["later"] is not None,
            int(match["every"] or 1),
        )


def parse_faults(text: str) -> list[Fault]:
    return [Fault.parse(part) for part in text.split(",") if part.strip()]


ARMED_FAULTS: list[Fault] = []
PROCESS: dict[str, int | str] = {"rank": 0, "restart": 0, "seed": "0"}


def arm(rank: int, restart: int, environment: Mapping[str, str] = os.environ) -> None:
    """Reads the faults of this process from the environment and activates them."""
    faults = parse_faults(environment.get("MESHWRIGHT_FAULT", ""))
    ARMED_FAULTS[:] = [fault for fault in faults if fault.is_armed(rank, restart)]
    PROCESS.update(rank=rank, restart=restart, seed=environment.get("MESHWRIGHT_FAULT_SEED", "0"))


def fail_point(point: str, step: int) -> str:
    """Performs the fault that is armed at this point, if any. Returns the action that the caller must perform itself
    (nan, flip, desync), or ''.
    """
    for fault in ARMED_FAULTS:
        if fault.point == point and fault.applies_to(step) and is_drawn(fault, step):
            return perform(fault, step)
    return ""


def is_drawn(fault: Fault, step: int) -> bool:
    """Whether the fault's probability selects this step; the same seed always selects the same steps."""
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
                ctypes.PyDLL(None).sleep(1_000_000)  # PyDLL does not release the GIL
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
