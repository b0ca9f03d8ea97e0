"""The serialization of manifests and their parts: canonical JSON that ends with a digest of itself. Torch-free."""

from __future__ import annotations

import hashlib
import json
from typing import Any


class InvalidManifest(Exception):
    """A manifest, or a part of one, that cannot be trusted; the text gives the reason."""


def serialize(values: dict[str, Any], digest: str) -> bytes:
    """The only serialization of a manifest and of a part."""
    return json.dumps(values | {"digest": digest}, separators=(",", ":")).encode() + b"\n"


def canonical_digest(values: dict[str, Any]) -> str:
    """The SHA-256 of the canonical JSON of the values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def recorded_digest(raw: bytes) -> str:
    """The digest at the end of a file that `serialize` has made."""
    digest: str = json.loads(raw[raw.rindex(b":") + 1 : -2])
    return digest


def parse(raw: bytes, what: str) -> tuple[dict[str, Any], str]:
    """The values of a serialized file without their digest, and the digest. Raises InvalidManifest unless every byte is
    as it was written. `what` names the file in the message.
    """
    try:
        values = json.loads(raw)
        recorded = values.pop("digest")
        computed, expected_bytes = canonical_digest(values), serialize(values, recorded)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        raise InvalidManifest(f"{what} is not a complete JSON object with a digest") from None
    if computed != recorded:
        raise InvalidManifest(f"{what} records digest {str(recorded)[:16]}, its content has {computed[:16]}")
    if expected_bytes != raw:  # such as 1e-8 in place of 1e-08: equal values, different bytes
        raise InvalidManifest(f"the bytes of {what} are not those that were written")
    return values, computed
