"""Hosts that the incidents of a run blame repeatedly, so that an engine does not place the job there. Torch-free."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from meshwright.base.io import read_json
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import MeshwrightError

HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
"""A name that may become an argument of an engine's command; incidents are untrusted files."""
MAX_INCIDENTS = 1000
"""The newest incidents that are read."""


def newest_incidents(folder: RunFolder, after: int = 0) -> list[dict[str, Any]]:
    """The incidents of the attempts after `after`, oldest first. What cannot be read is left out."""
    incidents = []
    for attempt in folder.attempts()[-MAX_INCIDENTS:]:
        if attempt <= after:
            continue
        try:
            incident = read_json(folder.incident(attempt))
        except MeshwrightError:
            continue
        if isinstance(incident, dict):
            incidents.append(incident | {"attempt": attempt})
    return incidents


def blamed_hosts(folder: RunFolder, limit: int) -> list[str]:
    """The hosts on which at least `limit` attempts failed first, in the order of their names."""
    counts: Counter[str] = Counter()
    for incident in newest_incidents(folder):
        host = incident.get("host")
        if incident.get("outcome") in ("failed", "hang") and isinstance(host, str) and HOST_NAME.fullmatch(host):
            counts[host] += 1
    return sorted(host for host, count in counts.items() if count >= limit)
