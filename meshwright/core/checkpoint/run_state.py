"""Verifies the values beside the tensors that a run restores; a digest only says that none changed. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from meshwright.base.checkpoint.format.index import read_parts
from meshwright.base.checkpoint.listing import CheckpointEntry
from meshwright.base.checkpoint.manifest import MANIFEST_FILE, Manifest
from meshwright.core.checkpoint.verify import WHOLE_FILE, Damage, part_damage

Test = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def is_loss(value: Any) -> bool:
    return value is None or is_number(value)  # None: it was not finite


def is_list_of(test: Test) -> Test:
    return lambda value: type(value) is list and all(map(test, value))


def is_evaluation(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and type(value[0]) is int and is_loss(value[1])


def is_dict(value: Any) -> bool:
    return type(value) is dict


COUNTERS: dict[str, Test] = {
    "bad_samples": is_count,
    "skipped": is_count,
    "in_a_row": is_count,
    "loss": is_loss,
    "evaluations": is_list_of(is_evaluation),
}
STREAM: dict[str, Test] = {
    "step": is_count,
    "position": is_count,
    "epoch": is_count,
    "next": is_list_of(is_count),
}
ROLLOUTS: dict[str, Test] = {
    "step": is_count,
    "frontier": is_count,
    "lineage": is_dict,
    "position": is_list_of(is_count),
    "counts": is_dict,
    "in_flight": is_list_of(lambda value: type(value) is list),
    "versions": is_list_of(lambda value: type(value) is list),
}
SCALER: dict[str, Test] = {"scale": is_number, "finite_steps": is_count}
NOISE: dict[str, Test] = {"signal": is_number, "noise": is_number}


def find_state_damage(entry: CheckpointEntry) -> list[Damage]:
    """The damage of an intact checkpoint that no run can resume from: a value that a restore reads is not there, or
    cannot be one.
    """
    manifest = entry.manifest
    assert manifest is not None
    damage = list(find_manifest_damage(manifest))
    first = {part.owner: name for name, part in reversed(manifest.parts.items())}
    damage += [
        Damage(MANIFEST_FILE, WHOLE_FILE, f"a part of {owner}", "none") for owner in manifest.rng if owner not in first
    ]
    names = [first[owner] for owner in manifest.rng if owner in first]
    for name, part in read_parts(entry.store, entry.folder, manifest, names):
        if isinstance(part, Exception):
            damage.append(part_damage(manifest, name, part))
        else:
            damage += find_owner_damage(name, part.state)
    return damage


def find_manifest_damage(manifest: Manifest) -> Iterator[Damage]:
    """What is wrong with the values of the manifest."""
    position = ROLLOUTS if "frontier" in manifest.data else STREAM
    yield from find_wrong_values(MANIFEST_FILE, "data.", manifest.data, position)
    if position is STREAM and manifest.data.get("step") != manifest.step:
        expected = f"data.step = {manifest.step}, the step of the checkpoint"
        yield Damage(MANIFEST_FILE, WHOLE_FILE, expected, repr(manifest.data.get("step"))[:100])
    yield from find_wrong_values(MANIFEST_FILE, "schedule.", manifest.schedule, {"lr": is_number})
    yield from find_wrong_values(MANIFEST_FILE, "counters.", manifest.counters, COUNTERS)
    if manifest.scaler or manifest.identity.get("precision.compute") == "fp16":
        yield from find_wrong_values(MANIFEST_FILE, "scaler.", manifest.scaler, SCALER)
    if "steps" in manifest.identity:
        yield from find_wrong_values(MANIFEST_FILE, "identity.", manifest.identity, {"steps": is_count})
    owners = [f"data/{coordinate}" for coordinate in range(max(1, len(manifest.rng)))]
    yield from find_wrong_values(MANIFEST_FILE, "rng.", manifest.rng, dict.fromkeys(owners, is_count))


def find_owner_damage(file: str, state: dict[str, Any]) -> Iterator[Damage]:
    """What is wrong with the state of a logical owner in a part."""
    noise = state.get("noise")
    yield from find_wrong_values(file, "noise.", noise if type(noise) is dict else {}, NOISE)


def find_wrong_values(file: str, prefix: str, values: dict[str, Any], tests: dict[str, Test]) -> Iterator[Damage]:
    for key, test in tests.items():
        if key not in values:
            yield Damage(file, WHOLE_FILE, f"the field {prefix}{key}", "none")
        elif not test(values[key]):
            yield Damage(file, WHOLE_FILE, f"a value of {prefix}{key} that a run writes", repr(values[key])[:100])
