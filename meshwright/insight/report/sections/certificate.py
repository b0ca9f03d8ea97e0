"""The certificate of a run as a section of its report: what was proven, when, and for which identity. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.base.config import RunConfig, fingerprint, identity, placement
from meshwright.base.io import read_json
from meshwright.base.records.run_folder import CERTIFICATE, RunFolder
from meshwright.base.records.untrusted_records import bounded_object
from meshwright.errors import MeshwrightError
from meshwright.insight.report.document import Section, Table
from meshwright.planner.report.planned_machine import text

MAX_CLAIMS = 64
MISSING = f"There is no certificate: meshwright prove RUN/run.toml --out RUN/{CERTIFICATE} makes one."


def certificate_section(folder: RunFolder, config: RunConfig | None) -> Section:
    """The section of RUN/certificate.json or, if there is none, of ./certificate.json, where `prove` writes it."""
    found = read_certificate(folder.root / CERTIFICATE) or read_certificate(Path(CERTIFICATE))
    if not found:
        return Section("Certificate", [MISSING])
    claims = found.get("checks")
    rows = [bounded_object(claim) for claim in claims[:MAX_CLAIMS]] if isinstance(claims, list) else []
    held = sum(row.get("passed") is True for row in rows)
    result = "All claims hold" if found.get("passed") is True and held == len(rows) else "NOT all claims hold"
    when, torch = text(found.get("time")), text(bounded_object(found.get("machine")).get("torch"))
    versions = f"with meshwright {text(found.get('meshwright'))} and torch {torch}"
    sentences = [f"{result}: {held} of {len(rows)}, proven {when or 'at an unknown time'} {versions}."]
    sentences.append(compare_identity(found, config))
    table = Table(
        ("check", "claim", "result", "measured"),
        [
            [text(row.get("check")), long_text(row.get("claim")), outcome(row), long_text(row.get("measured"))]
            for row in rows
        ],
        (0, 1, 2, 3),
        [index for index, row in enumerate(rows) if row.get("passed") is not True],
    )
    left_open = found.get("not_proven")
    notes = [f"not proven: {long_text(item)}" for item in left_open[:8]] if isinstance(left_open, list) else []
    return Section("Certificate", sentences, tables=[table] if rows else [], notes=notes)


def read_certificate(path: Path) -> dict[str, Any]:
    """The content of a certificate, or nothing if there is none that can be read."""
    try:
        return bounded_object(read_json(path))
    except MeshwrightError:
        return {}


def compare_identity(found: dict[str, Any], config: RunConfig | None) -> str:
    proven = text(found.get("identity"))
    if config is None:
        return f"It is for identity {proven}; the identity of the run is not known, because run.toml cannot be read."
    own = fingerprint(identity(config))
    if proven != own:
        return f"It is of ANOTHER identity: {proven}, and the settings of this run have {own}. It proves nothing here."
    same = text(found.get("placement")) == fingerprint(placement(config))
    return f"It is for the identity of this run, {own}" + ("." if same else ", with another placement.")


def outcome(row: dict[str, Any]) -> str:
    return "holds" if row.get("passed") is True else "FAILS"


def long_text(value: Any) -> str:
    return value[:400] if isinstance(value, str) else ""
