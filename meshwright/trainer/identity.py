"""What a run is, as its folder keeps it: settings, sources and the stream. Another run is refused entry."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.config import RunConfig, config_to_toml, fingerprint, identity, placement
from meshwright.data.source import Source
from meshwright.data.stream import Stream
from meshwright.errors import IdentityError
from meshwright.io import atomic_write, read_json, write_json
from meshwright.telemetry.run_folder import RunFolder
from meshwright.version import __version__


def build_identity(
    config: RunConfig, sources: list[Source], stream: Stream, user_model: nn.Module | None
) -> dict[str, Any]:
    """The identity record. A user's own model is known by its parameters' names and shapes."""
    values = identity(config)
    if user_model is not None:
        values = {key: value for key, value in values.items() if not key.startswith("model.")}
        shapes = "\n".join(f"{name} {tuple(p.shape)}" for name, p in user_model.named_parameters())
        values["model"] = hashlib.sha256(shapes.encode()).hexdigest()[:16]
    known = [{"name": s.name, "samples": len(s), "fingerprint": s.fingerprint()} for s in sources]
    values |= {f"source[{i}].fingerprint": s["fingerprint"] for i, s in enumerate(known)}
    return {
        "meshwright": __version__,
        "identity": values,
        "identity_fingerprint": fingerprint(values),
        "placement": placement(config),
        "placement_fingerprint": fingerprint(placement(config)),
        "sources": known,
        "stream": stream.to_json(),
    }


def claim_run_folder(folder: RunFolder, config: RunConfig, record: dict[str, Any], fork: int, newest: int) -> None:
    """Writes run.toml and identity.json, or refuses a folder that holds another run, with both values. A fork is let
    in as a new timeline, once: what came before counts up to the `newest` step, and what follows is its own.
    """
    lineage: dict[str, Any] = {"run": secrets.token_hex(8), "timeline": 1, "until": {}, "forked_by": 0}
    if folder.identity_file.exists():
        before = read_json(folder.identity_file)
        if not fork and (differs := describe_differences(before.get("identity", {}), record["identity"])):
            raise IdentityError(
                f"run folder {folder.root} holds another run: {differs}",
                "give another --run DIR, --fresh to set the old one aside, or --fork to go on from it on purpose",
            )
        lineage = {key: before.get(key, value) for key, value in lineage.items()}
        if fork and lineage["forked_by"] != fork:
            until = lineage["until"] | {str(lineage["timeline"]): newest}
            lineage |= {"timeline": lineage["timeline"] + 1, "until": until, "forked_by": fork}
    atomic_write(folder.run_file, config_to_toml(config))
    write_json(folder.identity_file, record | lineage)


def describe_differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The settings in which two identities differ, with both values; '' where they are one. What an older record does
    not know had its default.
    """
    usual = identity(RunConfig())
    before = {key: usual[key] for key in now.keys() & usual.keys()} | before
    keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    shown = ", ".join(f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in keys[:4])
    return shown + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


def code_fingerprint() -> str:
    """A digest of this package's own source: ranks that run other code must not train together."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
