"""The identity of a run: the settings, data sources and stream that decide its numbers, as identity.json keeps them."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from meshwright.base.config import RunConfig, config_to_toml, fingerprint, identity, placement
from meshwright.base.config.data import INIT_FROM, TOKENIZER_FILE
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.dtypes import COMPUTE_BYTES
from meshwright.base.io import atomic_write, read_json, write_error, write_json
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store.mirror import RunMirror
from meshwright.core.data.source import Source
from meshwright.core.data.stream import Stream
from meshwright.core.trainer.custom_model import CodeRecord, CustomModel
from meshwright.core.weights.initial import InitialWeights
from meshwright.errors import ConfigError, IdentityError
from meshwright.version import __version__

MAX_DIFFERENCES = 4
"""Differences that an error lists; the rest are counted."""
MAX_CODE_CHANGES = 32
"""Changes of code that identity.json keeps of one attempt."""
NO_CODE_RECORD = "the run folder has no record of the code of the model"
"""The change of a run of an older version."""
MAX_VALUE_LENGTH = 100
"""Characters of a value that an error shows."""
TENSOR = re.compile(r"\b(\w+)(\[[\d, ]*\]) \w")
"""The name and shape of a parameter or buffer in a line of the structure of a model."""
SOURCE_CONTENT = re.compile(r"source\[(\d+)\]\.fingerprint")
"""The identity key of a data source's content hash."""

INITIAL_WEIGHTS = "initial_weights"
"""The identity key of the digest of the folder that the initial weights come from."""


def build_identity(
    config: RunConfig,
    sources: list[Source],
    stream: Stream,
    custom: CustomModel | None,
    weights: InitialWeights | None = None,
    code: CodeRecord | None = None,
) -> dict[str, Any]:
    """Returns the identity record. A custom model is identified by its parameters' names and
    shapes; `code` is the record of the user's code."""
    values = identity(config)
    if custom is not None:
        values = {key: value for key, value in values.items() if not key.startswith("model.")}
        shapes = "\n".join(f"{name} {tuple(p.shape)}" for name, p in custom.module.named_parameters())
        values["model"] = hashlib.sha256(shapes.encode()).hexdigest()[:16]
    if weights is not None:
        values[INITIAL_WEIGHTS] = weights.digest
    known = [{"name": s.name, "samples": len(s), "fingerprint": s.fingerprint()} for s in sources]
    values |= {f"source[{i}].fingerprint": s["fingerprint"] for i, s in enumerate(known)}
    return {
        "meshwright": __version__,
        "identity": values,
        "identity_fingerprint": fingerprint(values | ({"code": code["fingerprint"]} if code else {})),
        "code": code,
        "placement": placement(config),
        "placement_fingerprint": fingerprint(placement(config)),
        "sources": known,
        "stream": stream.to_json(),
    }


def check_run_folder(
    folder: RunFolder, record: dict[str, Any], *, fork: int, attempt: int, newest: int, accept_code: bool = False
) -> dict[str, Any]:
    """Returns the record that identity.json should contain for this attempt, and writes nothing.

    A folder of another run raises an IdentityError with both values. More `steps` than before extend the run. A fork
    starts a new timeline, once per job: earlier checkpoints count up to step `newest`. Other code of a custom model is
    recorded if it is accepted, and for a fork; otherwise it raises an IdentityError that says what changed.
    """
    lineage: dict[str, Any] = {
        "run": secrets.token_hex(8),
        "timeline": 1,
        "until": {},
        "forked_by": 0,
        "extensions": [],
        "code_changes": [],
        "choices": {},
    }
    if not os.path.lexists(folder.identity_file):
        return record | lineage
    before = read_identity(folder)
    lineage = {key: before.get(key, value) for key, value in lineage.items()}
    values, steps = before.get("identity", {}), record["identity"]["steps"]
    if not fork and values.get("model") != record["identity"].get("model"):  # no checkpoint of the run can be loaded
        changed = describe_changed_tensor(before.get("code"), record.get("code"))
        raise IdentityError(
            f"run folder {folder.root} belongs to another run: {describe_differences(values, record['identity'])}"
            + (f"; {changed}" if changed else ""),
            "try another --run DIR, or --fresh to set the old run aside",
        )
    changes = describe_code_changes(before.get("code"), record.get("code"))
    if changes:
        change = {"attempt": attempt, "step": max(0, newest), "changes": changes[:MAX_CODE_CHANGES]}
        lineage["code_changes"] = [*lineage["code_changes"], change]
    if changes and changes != [NO_CODE_RECORD] and 0 <= record["identity"]["steps"] <= newest:
        raise IdentityError(
            f"run folder {folder.root} is complete with other code: {list_changes(changes)}",
            f"try --steps {newest + 1} or more with --accept-code, another --run DIR, or --fresh to set it aside",
        )
    if fork:
        if record["identity"]["steps"] < newest:
            raise IdentityError(
                f"run folder {folder.root}: the newest checkpoint has {newest} steps, and steps = "
                f"{record['identity']['steps']} ends before it",
                f"try --steps {newest} or more",
            )
        if lineage["forked_by"] != fork:
            until = lineage["until"] | {str(lineage["timeline"]): newest}
            lineage |= {"timeline": lineage["timeline"] + 1, "until": until, "forked_by": fork}
        return record | lineage
    if differences := describe_differences(values, record["identity"]):
        steps_before = values.get("steps", steps)
        extend = (
            f"--steps {steps_before} or more (a run can be extended, not shortened), " if steps < steps_before else ""
        )
        compute = values.get("precision.compute")  # the default depends on the device
        moved = compute in tuple(COMPUTE_BYTES) and compute != record["identity"].get("precision.compute")
        keep = f"--precision.compute={compute} to keep the precision of the run, " if moved else ""
        found = record["identity"]
        other_data = any(values.get(key) != found[key] for key in found if SOURCE_CONTENT.fullmatch(key))
        placed = record.get("placement", {})
        tokenizer, weights = (str(placed.get(key, "")) for key in ("data.tokenizer", "init_from"))
        if other_data and weights and tokenizer == str(Path(weights) / TOKENIZER_FILE):  # which may be a default
            keep += "--data.tokenizer=bytes if the run was trained on bytes, "
        raise IdentityError(
            f"run folder {folder.root} belongs to another run: {differences}",
            f"try {extend}{keep}another --run DIR, --fresh to set the old run aside, or --fork to continue from it",
        )
    if changes and changes != [NO_CODE_RECORD] and not accept_code:
        raise IdentityError(
            f"run folder {folder.root}: the code of the run changed: {list_changes(changes)}",
            "try --accept-code to continue the run with it, another --run DIR, or --fresh to set the old run aside",
        )
    if steps > values.get("steps", steps):
        extension = {"attempt": attempt, "step": max(0, newest), "from": values["steps"], "to": steps}
        lineage["extensions"] = [*lineage["extensions"], extension]
    return record | lineage


def read_identity(folder: RunFolder) -> dict[str, Any]:
    """Reads identity.json as an untrusted file: what decides about a resume has the types that a run writes."""
    record = read_json(folder.identity_file)
    types = {"identity": dict, "run": str, "timeline": int, "until": dict, "forked_by": int, "extensions": list}
    types |= {"code_changes": list, "choices": dict}
    if not isinstance(record, dict) or "identity" not in record:
        found = "it is not an object with the key identity"
    elif wrong := [key for key, kind in types.items() if key in record and type(record[key]) is not kind]:
        found = f"{wrong[0]} is a {type(record[wrong[0]]).__name__}, expected {types[wrong[0]].__name__}"
    elif type(record["identity"].get("steps", 0)) is not int:
        found = "identity.steps is not an integer"
    elif not all(key.isdecimal() and type(step) is int for key, step in record.get("until", {}).items()):
        found = "until is not a table of timelines and steps"
    elif not all(is_extension(extension) for extension in record.get("extensions", [])):
        found = "extensions is not a list of extensions"
    elif not all(is_code_change(change) for change in record.get("code_changes", [])):
        found = "code_changes is not a list of changes of code"
    elif not is_code_record(record.get("code")):
        found = "code is not a record of code"
    else:
        return record
    raise ConfigError(
        f"{folder.identity_file} is not a valid identity record: {found}",
        "try to put the original file back, or --fresh to set the run aside",
    )


def is_extension(value: Any) -> bool:
    return isinstance(value, dict) and all(type(value.get(key)) is int for key in ("attempt", "step", "from", "to"))


def is_code_change(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(changes := value.get("changes"), list):
        return False
    numbers = all(type(value.get(key)) is int for key in ("attempt", "step"))
    return numbers and all(isinstance(text, str) for text in changes)


def is_code_record(value: Any) -> bool:
    """Whether a value of an untrusted record is the code of a custom model, or that of a built-in model: None."""
    if value is None:
        return True
    if not isinstance(value, dict) or not isinstance(parts := value.get("parts"), dict):
        return False
    lines = value.get("structure")
    return (
        isinstance(lines, list)
        and isinstance(value.get("python", ""), str)
        and all(isinstance(text, str) for text in (*parts.values(), *lines))
    )


def describe_code_changes(before: CodeRecord | None, now: CodeRecord | None) -> list[str]:
    """Returns what changed in the code of a custom model: classes, functions and settings, each with its name.

    Bytecode of another version of Python cannot be compared, which is a change; constants, versions and structure can.
    """
    if now is None:
        return []
    if before is None:
        return [NO_CODE_RECORD]
    changes = []
    same_python = before.get("python") == now["python"]
    if not same_python:
        version = short_text(before.get("python"))
        changes.append(f"Python was {version} and is {now['python']}, so code cannot be compared")
    for name in sorted(before["parts"].keys() | now["parts"].keys()):
        old, new = before["parts"].get(name), now["parts"].get(name)
        if old == new:
            continue
        if name.startswith(("function ", "class ")):
            if same_python:
                changes.append(
                    f"{name[:MAX_VALUE_LENGTH]} {'is new' if old is None else 'changed' if new else 'is gone'}"
                )
        else:
            changes.append(f"{name[:MAX_VALUE_LENGTH]} was {short_text(old)} and is {short_text(new)}")
    old_lines, lines = set(before["structure"]), set(now["structure"])
    gone = [line for line in before["structure"] if line not in lines]
    new_lines = [line for line in now["structure"] if line not in old_lines]
    changes += [f"{short_text(old)} became {short_text(new)}" for old, new in zip_longest(gone, new_lines)]
    if before["structure"] != now["structure"] and not (gone or new_lines):
        changes.append("the order of the modules changed")
    return changes


def describe_changed_tensor(before: CodeRecord | None, now: CodeRecord | None) -> str:
    """Returns the first parameter or buffer whose shape changed, with both shapes, or an empty string."""
    old, new = ({} if code is None else find_shapes(code["structure"]) for code in (before, now))
    for name in (*new, *old):
        if old and new and old.get(name) != new.get(name):
            return f"{short_text(name)} was {short_text(old.get(name))} and is {short_text(new.get(name))}"
    return ""


def find_shapes(structure: list[str]) -> dict[str, str]:
    """Returns the shapes of the parameters and buffers that the lines of a code record name."""
    lines = [line.partition(": ") for line in structure]
    return {f"{module}.{key}": shape for module, _, text in lines for key, shape in TENSOR.findall(text)}


def list_changes(changes: list[str]) -> str:
    more = f" and {len(changes) - MAX_DIFFERENCES} more" if len(changes) > MAX_DIFFERENCES else ""
    return ", ".join(changes[:MAX_DIFFERENCES]) + more


def short_text(text: str | None) -> str:
    """A line of an untrusted code record for an error message."""
    return "none" if text is None else text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."


def write_run_folder(folder: RunFolder, config: RunConfig, record: dict[str, Any]) -> None:
    """Writes run.toml and identity.json, also to the object store of the run."""
    try:
        atomic_write(folder.run_file, config_to_toml(relative_to_run(folder, config)))
        write_json(folder.identity_file, record)
        if folder.url:  # before a checkpoint is published: no other attempt may take the run for another one
            with RunMirror(folder.root) as mirror:
                mirror.push_identity()
    except OSError as error:
        raise write_error(folder.root, error) from None


def relative_to_run(folder: RunFolder, config: RunConfig) -> RunConfig:
    """The config with the paths of its initial weights and of their tokenizer as the run file has them: a run folder
    that has them can move.
    """
    if not config.init_from:
        return config
    path, data = Path(config.init_from).resolve(), config.data
    data = data.with_renamed_tokenizer(str(Path(config.init_from) / TOKENIZER_FILE), INIT_FROM)
    return replace(
        config, data=data, init_from=str(path.relative_to(folder.root) if path.is_relative_to(folder.root) else path)
    )


def describe_differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Returns the settings in which two identities differ, with both values; an empty string where they are equal. A
    key that an older record lacks had its default. A larger value of `steps` extends the run and is not a difference.
    """
    defaults = identity(with_device_defaults(RunConfig(), "cpu"))
    before = {key: defaults[key] for key in now.keys() & defaults.keys()} | before
    keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if now.get("steps", 0) > before.get("steps", 0):
        keys.remove("steps")
    if "model" in keys and ("model" in before) != ("model" in now):  # the keys of the built-in model say nothing then
        keys = [key for key in keys if not key.startswith("model.")]
    shown = ", ".join(describe_difference(key, before.get(key), now.get(key)) for key in keys[:MAX_DIFFERENCES])
    return shown + (f" and {len(keys) - MAX_DIFFERENCES} more" if len(keys) > MAX_DIFFERENCES else "")


def describe_difference(key: str, before: Any, now: Any) -> str:
    """Returns one difference with both values; for a content hash, what changed, with the short hashes."""
    hashes = f"{str(before)[:8]} -> {str(now)[:8]}"
    if key == "model":
        if before is None or now is None:
            kinds = ("the built-in model", "a custom model")
            return f"the model was {kinds[before is not None]} and is {kinds[now is not None]}"
        return f"the names or shapes of the model's parameters changed (hash {hashes})"
    if key == INITIAL_WEIGHTS:
        if before is None or now is None:
            kinds = ("initialized from the seed", "taken from a folder")
            return f"the initial weights were {kinds[before is not None]} and are {kinds[now is not None]}"
        return f"the content of the initial weights changed (hash {hashes})"
    if match := SOURCE_CONTENT.fullmatch(key):
        if before is None or now is None:
            return f"data source {match[1]} was {'added' if before is None else 'removed'}"
        return f"the content of data source {match[1]} (its files or its tokenizer) changed (hash {hashes})"
    return f"{key[:MAX_VALUE_LENGTH]} was {short_repr(before)} and is {short_repr(now)}"


def short_repr(value: Any) -> str:
    """Returns a value of an untrusted record as text for an error message."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."


def code_fingerprint() -> str:
    """Returns a hash of this package's source: ranks that run different code must not train together."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
