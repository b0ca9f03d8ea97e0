"""The checks of the lab on crash-safe checkpoints."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright_practice.labs.instruments.crash_disk import CrashDisk, CrashState, Tree, write_tree
from meshwright_practice.labs.work import Work

PAYLOADS = {step: random.Random(step).randbytes(20_000 + step) for step in (1, 2, 3, 9, 10)}
"""Larger than Python's write buffer."""
INTACT = ("step 1, intact", "step 2, intact", "step 3, intact")


@contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def describe(value: object) -> str:
    """Such as "step 2, intact"."""
    if value is None:
        return "None"
    if not isinstance(value, tuple) or len(value) != 2:
        return f"a {type(value).__name__} instead of (step, payload)"
    step, payload = value
    if PAYLOADS.get(step) == payload:
        return f"step {step}, intact"
    size = len(payload) if isinstance(payload, bytes) else 0
    return f"step {step} with a wrong payload of {size:,} bytes"


def attempt(load: Callable[[Path], Any], folder: Path) -> str:
    """What load returns, or raises."""
    try:
        return describe(load(folder))
    except Exception as error:  # noqa: BLE001  it is the user's
        return f"{type(error).__name__}: {error}".replace(str(folder), "FOLDER")


def files_in(folder: Path) -> Tree:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def loaded_from(work: Work, files: Tree) -> str:
    with scratch() as folder:
        write_tree(folder, files)
        return attempt(work.module.load, folder)


def record_save(work: Work, steps: tuple[int, ...]) -> CrashDisk:
    """Saves the steps, and records the last save."""
    with scratch() as folder:
        for step in steps[:-1]:
            work.module.save(folder, step, PAYLOADS[step])
        disk = CrashDisk(folder)
        with disk.record(work.module):
            work.module.save(folder, steps[-1], PAYLOADS[steps[-1]])
    return disk


def first_bad(work: Work, states: list[CrashState], accepted: tuple[str, ...]) -> tuple[CrashState, str] | None:
    for state in states:
        found = loaded_from(work, state.files)
        if found not in accepted:
            return state, found
    return None


def check_states(work: Work, name: str, disk: CrashDisk, states: list[CrashState], accepted: tuple[str, ...]) -> None:
    bad = first_bad(work, states, accepted)
    expected = f"load returns {' or '.join(accepted)}, in each of {len(states)} states"
    if bad is None:
        work.check(name, True, expected, "it does", "")
        return
    state, found = bad
    explain = explain_kill if state.kind == "kill" or "Error" in found else explain_power_loss
    what = f"{state.kind} after {state.after}: {found} (the calls of save: {', '.join(disk.calls)})"
    work.check(name, False, expected, what, explain(disk.calls, found))


def find_calls(calls: list[str], *names: str) -> list[int]:
    return [index for index, call in enumerate(calls) if call.startswith(names)]


def explain_kill(calls: list[str], found: str) -> str:
    if "Error" in found:
        return "load must not fail: files that a crash leaves behind are skipped, and an older checkpoint is used"
    if not find_calls(calls, "replace", "rename", "link"):
        return "the file is written in place: write a temporary file, and os.replace it when it is complete"
    if found == "None":
        return "no checkpoint is left: delete the one before only when the new one is complete"
    return "an incomplete file has the name of a checkpoint: rename it when it is complete"


def explain_power_loss(calls: list[str], _found: str) -> str:
    """Says what is wrong with the order of the calls."""
    renames, syncs = find_calls(calls, "replace", "rename", "link"), find_calls(calls, "fsync", "fdatasync", "sync")
    if not renames:
        return "write a temporary file, sync it, and rename it"
    if not [index for index in syncs if index < renames[0]]:
        late = "the fsync comes too late" if syncs else "there is no fsync"
        return f"{late}: the rename may reach the disk before the data. Call os.fsync before os.replace"
    if not [index for index in syncs if index > renames[-1]]:
        return "sync the folder after the rename: the new name is data of the folder, and may be lost with the power"
    return "os.fsync does not see what is still in Python's buffer: call file.flush() before it"


def damaged(files: Tree, before: Tree, change: Callable[[bytes], bytes]) -> Iterator[tuple[str, Tree]]:
    """Every file that is new or changed since `before`, damaged, one at a time."""
    for name, content in files.items():
        if before.get(name) != content and content:
            yield name, files | {name: change(content)}


def flip_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES: tuple[tuple[str, Callable[[bytes], bytes], str], ...] = (
    ("torn file", lambda content: content[: len(content) // 2], "is cut in half"),
    ("flipped bit", flip_bit, "has one wrong bit"),
)


def check_damage(work: Work) -> None:
    with scratch() as folder:
        work.module.save(folder, 1, PAYLOADS[1])
        before = files_in(folder)
        work.module.save(folder, 2, PAYLOADS[2])
        files = files_in(folder)
    for name, change, what in DAMAGES:
        results = [(path, loaded_from(work, tree)) for path, tree in damaged(files, before, change)]
        bad = next(((path, found) for path, found in results if found not in INTACT[:2]), None)
        if bad is None:
            message = ""
        elif bad[1] == "None":
            message = "the checkpoint before is gone or is not tried: keep it, and let load fall back to it"
        elif "Error" in bad[1]:
            message = "load must not fail on a damaged file: compare a digest, and fall back to the checkpoint before"
        else:
            message = "load cannot see the damage: store a digest of the payload, and compare it"
        found = f"{bad[0]} {what}: load returns {bad[1]}" if bad else "it does"
        work.check(name, bad is None, "load returns an intact checkpoint, such as step 1", found, message)


def check_save_after_crash(work: Work, states: list[CrashState]) -> None:
    for state in states:
        with scratch() as folder:
            write_tree(folder, state.files)
            try:
                work.module.save(folder, 2, PAYLOADS[2])
                work.module.save(folder, 3, PAYLOADS[3])
                found = attempt(work.module.load, folder)
            except Exception as error:  # noqa: BLE001  it is the user's
                found = f"save raises {type(error).__name__}: {error}".replace(str(folder), "FOLDER")
        if found != INTACT[2]:
            message = "a crash may leave the temporary file of any step: replace it, or use a new name"
            work.check("save after a crash", False, INTACT[2], f"{state.kind} after {state.after}: {found}", message)
            return
    work.check("save after a crash", True, INTACT[2], "step 3, after every crash", "")


def grade(work: Work) -> None:
    with work.attempt("functions return"), scratch() as folder:
        empty = describe(work.module.load(folder))
        work.module.save(folder, 9, PAYLOADS[9])
        one = describe(work.module.load(folder))
        work.module.save(folder, 10, PAYLOADS[10])
        two = describe(work.module.load(folder))
    work.require(
        "newest",
        (empty, one, two) == ("None", "step 9, intact", "step 10, intact"),
        "None from an empty folder, step 9 after it is saved, and then step 10",
        f"{empty}, {one}, and {two}",
        "step 10 is newer than step 9: compare numbers, not text" if one == two else "load returns what was saved",
    )
    with work.user_code("kill"):
        disk = record_save(work, (1,))
        check_states(work, "first checkpoint", disk, list(disk.states()), ("None", INTACT[0]))
        disk = record_save(work, (1, 2))
        states = list(disk.states())
        kills = [state for state in states if state.kind == "kill"]
        losses = [state for state in states if state.kind == "power loss"]
        check_states(work, "kill", disk, kills, INTACT[:2])
        if work.passed("kill"):
            check_states(work, "power loss", disk, losses, INTACT[:2])
        if work.passed("power loss"):
            check_states(work, "durable after return", disk, [s for s in losses if s.complete], INTACT[1:2])
        check_damage(work)
        check_save_after_crash(work, kills)
