"""The settings and versions of a run as sections of its report. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.base.config import RunConfig, config_from_dict, identity, placement
from meshwright.base.history.run_history import RunHistory
from meshwright.insight.report.document import Section, Table
from meshwright.planner.report.planned_machine import host_names, text

MAX_SETTINGS = 100
MAX_VALUE = 120
"""Characters of a value that are shown."""


def settings_section(config: RunConfig | None) -> Section:
    """What differs from the preset."""
    if config is None:
        return Section("Configuration", ["run.toml is missing or damaged."])
    defaults = identity(default := config_from_dict({"preset": config.preset})) | placement(default)
    own, decides = identity(config) | placement(config), identity(config)
    changed = [key for key, value in own.items() if key != "preset" and defaults.get(key) != value]
    if not changed:
        return Section("Configuration", [f"Every setting is that of the preset {config.preset}."])
    rows = [
        [key, shown(own[key]), shown(defaults.get(key)), "identity" if key in decides else "placement"]
        for key in changed[:MAX_SETTINGS]
    ]
    more = f", of which {MAX_SETTINGS} are listed" if len(changed) > MAX_SETTINGS else ""
    sentence = f"{len(changed)} settings differ from the preset {config.preset}{more}. Identity decides the numbers."
    return Section(
        "Configuration", [sentence], tables=[Table(("setting", "run", "preset", "part of"), rows, (0, 1, 2, 3))]
    )


def shown(value: Any) -> str:
    written = str(value)
    return written if len(written) <= MAX_VALUE else f"{written[: MAX_VALUE - 3]}..."


def versions_section(history: RunHistory, start: Mapping[str, Any]) -> Section:
    """Which code ran where; attempts with other versions are named."""
    names = ("meshwright", "torch", "python", "device", "processor", "threads", "identity", "placement")
    rows = [[name, shown(start[name])] for name in names if isinstance(start.get(name), str | int)]
    rows.append(["hosts", shown(", ".join(host_names(start)) or "-")])
    changed = {
        (name, text(attempt.start.get(name)))
        for attempt in history.attempts
        for name in ("meshwright", "torch", "python")
        if attempt.start and text(attempt.start.get(name)) not in ("", text(start.get(name)))
    }
    notes = [f"earlier attempts ran with {name} {version}" for name, version in sorted(changed)[:8]]
    if chosen := next((attempt.choices for attempt in reversed(history.attempts) if attempt.choices), ""):
        notes.insert(0, f"chosen at the start: {shown(chosen)}")
    return Section("Versions", tables=[Table(("", ""), rows, (0, 1))], notes=notes)
