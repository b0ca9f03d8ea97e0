"""What the checker runs inside a rank: training as the contract calls it, partitions, restarts, killed saves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from meshwright.core.parallel.world import World
from meshwright_practice.interview.exercise import BASE_CONFIG
from meshwright_practice.interview.rank.recorder import Injection, ObservedRun, Recorder
from meshwright_practice.interview.rank.user_process import CallResult, call, enter, load_submission, process_group

PARTITION_CASES = ((23, 2), (24, 2), (30, 2), (10, 3), (3, 4))
"""(samples, ranks): sizes that do and do not divide, and fewer samples than ranks"""
EPOCHS = (0, 1)
BATCH_CASES = ({"world_size": 2}, {"world_size": 8, "tensor_parallel": 2, "pipeline_parallel": 2})
LOSS_STEPS = {"num_samples": 64, "micro_batch": 4, "accumulation": 2, "steps": 40}
"""8 steps per epoch, 5 epochs"""
RESTART_STEPS, RESUMED_STEPS = 2, 5
OTHER_CONFIGS: tuple[dict[str, Any], ...] = ({"lr": 0.02}, {"num_samples": 28})
"""Changes after which a resume must be refused."""
FAILS, SAME, DIFFERS = "refused", "same", "differs"


def in_rank(
    world: World, source: str, folder: str, scratch: str, probe: str, args: tuple[Any, ...], seconds: float
) -> CallResult:
    """The function of a rank: loads the submission and runs one probe on it."""
    enter(Path(scratch), f"{probe}-{world.rank}")
    with process_group(world.rank, world.size):
        loaded = call(load_submission, source, folder, seconds=seconds)
        if loaded.error:
            return loaded
        result: CallResult = PROBES[probe](loaded.value, world, Path(scratch), seconds, *args)
        return result


def config_for(world: World, changes: Mapping[str, Any]) -> dict[str, Any]:
    return BASE_CONFIG | {"rank": world.rank, "local_rank": world.rank, "world_size": world.size} | dict(changes)


def train(module: ModuleType, config: Mapping[str, Any], injection: Injection, ledger: Path | None) -> ObservedRun:
    """Calls the user's `train` and records what it does."""
    recorder = Recorder(module, injection, ledger)
    with recorder.recording() as trace:
        result = module.train(dict(config))
    losses = result.get("losses") if isinstance(result, dict) else None
    if losses is None:
        raise TypeError(f"train returned {type(result).__name__}, expected a dict with the key 'losses'")
    trace.losses = [float(value) for value in losses]
    return trace


def training(
    module: ModuleType,
    world: World,
    scratch: Path,
    seconds: float,
    changes: dict[str, Any],
    injection: Injection,
    name: str,
) -> CallResult:
    """One run of `train` on every rank; the ledger of a rank is a file, because the rank may be killed."""
    ledger = scratch / f"ledger-{name}-{world.rank}.jsonl"
    return call(train, module, config_for(world, changes), injection, ledger, seconds=seconds)


def single(module: ModuleType, world: World, _scratch: Path, seconds: float) -> CallResult:
    """One process: a longer run, and a short one twice."""

    def work() -> tuple[ObservedRun, list[float], list[float]]:
        long = train(module, config_for(world, LOSS_STEPS), Injection(), None)
        first, second = (train(module, config_for(world, {"dropout": 0.1}), Injection(), None) for _ in range(2))
        return long, first.losses, second.losses

    return call(work, seconds=seconds)


def partitions(module: ModuleType, _world: World, _scratch: Path, seconds: float) -> CallResult:
    """The samples of every rank, for every case and epoch, twice."""

    def work() -> dict[tuple[int, int, int], list[tuple[list[int], list[int]]]]:
        def part(count: int, rank: int, size: int, epoch: int) -> list[int]:
            return [int(index) for index in module.partition(count, rank, size, epoch, BASE_CONFIG["seed"])]

        return {
            (count, size, epoch): [
                (part(count, rank, size, epoch), part(count, rank, size, epoch)) for rank in range(size)
            ]
            for count, size in PARTITION_CASES
            for epoch in EPOCHS
        }

    return call(work, seconds=seconds)


def batches(module: ModuleType, _world: World, _scratch: Path, seconds: float) -> CallResult:
    """What the user's algebra says about the global batch."""
    configs = [BASE_CONFIG | case for case in BATCH_CASES]
    return call(lambda: [int(module.global_batch(dict(config))) for config in configs], seconds=seconds)


def union_gradients(
    module: ModuleType,
    world: World,
    _scratch: Path,
    seconds: float,
    cases: list[tuple[dict[str, torch.Tensor], list[int]]],
) -> CallResult:
    """The gradients of one process on all samples of a step, with the parameters that the ranks had before it."""

    def work() -> list[dict[str, torch.Tensor]]:
        found = []
        for parameters, samples in cases:
            model = module.build_model(config_for(world, {}))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(parameters[name])
            module.loss(model, module.fetch(samples)).backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return found

    return call(work, seconds=seconds)


def restarts(module: ModuleType, world: World, scratch: Path, seconds: float) -> CallResult:
    """Resumes of one process: as saved, without each entry of the state, and with another config."""

    def work() -> dict[str, Any]:
        origin = scratch / "restart" / "checkpoint"
        origin.parent.mkdir()
        saving = config_for(world, {"steps": RESTART_STEPS, "checkpoint": str(origin), "dropout": 0.1})
        saved = train(module, saving, Injection(), None).saves
        if not saved:
            return {"keys": None}
        last = Path(saved[-1][1])
        state = module.load(str(last))
        if not isinstance(state, dict):
            raise TypeError(f"load returned {type(state).__name__}, expected the dict that save got")
        resuming = saving | {"steps": RESUMED_STEPS, "resume": True}
        baseline = train(module, resuming | {"checkpoint": str(copy_of(origin, "as_saved"))}, Injection(), None).final
        without = {}
        for number, key in enumerate(state):
            target = copy_of(origin, f"without_{number}")
            module.save(
                moved(last, origin, target),
                {name: value for name, value in module.load(str(last)).items() if name != key},
            )
            without[str(key)] = outcome(module, resuming | {"checkpoint": str(target)}, baseline)
        others = []
        for number, change in enumerate(OTHER_CONFIGS):
            target = copy_of(origin, f"other_{number}")
            others.append((change, outcome(module, resuming | change | {"checkpoint": str(target)}, baseline)))
        return {"keys": [str(key) for key in state], "without": without, "others": others, "bytes": tree_bytes(origin)}

    return call(work, seconds=seconds)


def outcome(module: ModuleType, config: dict[str, Any], baseline: dict[str, torch.Tensor]) -> str:
    """How a resume ends: it is refused, it reaches the same parameters, or others."""
    try:
        final = train(module, config, Injection(), None).final
    except (Exception, SystemExit):  # noqa: BLE001  every way to refuse counts
        return FAILS
    return SAME if largest_difference(final, baseline) == 0 else DIFFERS


def largest_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest absolute difference of two sets of tensors; infinity if their names or shapes differ."""
    if one.keys() != other.keys() or any(one[name].shape != other[name].shape for name in one):
        return float("inf")
    differences = [float((one[name] - other[name]).abs().max()) for name in one if one[name].numel()]
    return max(differences, default=0.0)


def copy_of(path: Path, name: str) -> Path:
    """A copy of a checkpoint, which is a file or a folder, under the same name in a folder of its own."""
    target = path.parent / name / path.name
    target.parent.mkdir()
    if path.is_dir():
        shutil.copytree(path, target)
    else:
        for file in path.parent.glob(f"{path.name}*"):  # files beside it, such as checkpoint.json
            if file.is_file():
                shutil.copy(file, target.parent)
    return target


def moved(last: Path, origin: Path, target: Path) -> str:
    """The path of the last save in a copy of the checkpoint."""
    return str(target / last.relative_to(origin) if last.is_relative_to(origin) else target.parent / last.name)


def tree_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else path.parent.glob(f"{path.name}*")
    return sum(file.stat().st_size for file in files if file.is_file())


def read_lines(path: Path, limit: int = 4 << 20) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines; lines that are none are left out."""
    found: list[dict[str, Any]] = []
    try:
        with path.open("rb") as file:
            text = file.read(limit).decode(errors="replace")
    except OSError:
        return found
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def interrupted_saves(module: ModuleType, world: World, scratch: Path, seconds: float) -> CallResult:
    """Kills a save at every point, and says what is loadable afterwards."""
    from meshwright_practice.interview.rank.interruptions import interrupt_saves

    def work() -> list[tuple[str, str]]:
        origin = scratch / "atomic" / "checkpoint"
        origin.parent.mkdir()
        config = config_for(world, {"checkpoint": str(origin), "steps": 2})
        saves = train(module, config, Injection(), None).saves
        if not saves:
            return [("no save", "train did not call save(path, state)")]
        last = Path(saves[-1][1])
        other = scratch / "atomic" / "newer" / "checkpoint"
        other.parent.mkdir()
        newer = train(module, config | {"checkpoint": str(other), "steps": 4}, Injection(), None).saves[-1][1]
        return interrupt_saves(
            module, lambda name: copy_of(origin, name), lambda target: moved(last, origin, target), last, newer
        )

    return call(work, seconds=seconds)


PROBES: dict[str, Callable[..., CallResult]] = {
    "training": training,
    "single": single,
    "partitions": partitions,
    "batches": batches,
    "union_gradients": union_gradients,
    "restarts": restarts,
    "interrupted_saves": interrupted_saves,
}
