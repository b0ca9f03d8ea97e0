"""The result of a preflight: one row per check and host, the findings, and the hosts to leave out. Torch-free."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from meshwright.errors import ConfigError, MeshwrightError, PeerError
from meshwright.ops.preflight.measurements import HostMeasurements

Verdict = Literal["ok", "slow", "broken", "differs"]
EXIT_CODES: dict[Verdict, int] = {"ok": 0, "slow": 0, "differs": 2, "broken": 8}
"""Verdict -> exit code of the command: a slow host still trains, one that differs is misconfigured."""
SEVERITY: tuple[Verdict, ...] = ("broken", "differs", "slow", "ok")
"""Verdicts, the worst first."""


@dataclass(frozen=True)
class PreflightRow:
    """The result of one check on one host, one rank or one link."""

    check: str
    """what is checked: hosts, versions, clock, disk, device, network, collectives or limits"""
    name: str
    """the figure or component, such as torch or matmul rate"""
    where: str
    """the host, the host and rank, the link, or the ranks of a group"""
    expected: str
    found: str
    verdict: Verdict = "ok"
    recommendation: str = ""
    """what to do next; empty if the verdict is ok"""
    host: str = ""
    """the host that causes the finding; empty if no single host does"""
    advisory: bool = False
    """whether the row never fails the preflight and never excludes a host"""


def host_row(
    check: str,
    name: str,
    host: str,
    expected: str,
    found: str,
    verdict: Verdict,
    recommendation: str,
    *,
    rank: int | None = None,
    advisory: bool = False,
) -> PreflightRow:
    """Returns the row of a host, or of one of its ranks; a row that is ok recommends nothing."""
    where = f"host {host}" if rank is None else f"host {host}, rank {rank}"
    hint = "" if verdict == "ok" else recommendation
    return PreflightRow(check, name, where, expected, found, verdict, hint, host, advisory)


@dataclass(frozen=True)
class PreflightReport:
    """What `meshwright preflight` reports."""

    rows: tuple[PreflightRow, ...]
    measurements: HostMeasurements
    remarks: tuple[str, ...] = ()
    """what was not measured or not compared, and why"""

    @property
    def findings(self) -> tuple[PreflightRow, ...]:
        """The rows whose verdict is not ok, the worst first."""
        rows = [row for row in self.rows if row.verdict != "ok"]
        return tuple(sorted(rows, key=lambda row: (row.advisory, SEVERITY.index(row.verdict))))

    @property
    def suspect_hosts(self) -> tuple[str, ...]:
        """The hosts without which the findings that they cause disappear, in the order of their ranks. A finding that
        every host has is not the fault of one.
        """
        causes = {(row.check, row.name, row.host) for row in self.findings if row.host and not row.advisory}
        affected = Counter((check, name) for check, name, _ in causes)
        hosts = self.measurements.hosts
        suspects = {host for check, name, host in causes if affected[check, name] < len(hosts)}
        return tuple(host for host in hosts if host in suspects)

    @property
    def exit_code(self) -> int:
        """8 if something is broken, 2 if something is misconfigured, else 0."""
        return max((EXIT_CODES[row.verdict] for row in self.rows if not row.advisory), default=0)

    def raise_if_failed(self) -> None:
        """Raises PeerError if something is broken, and ConfigError if something is misconfigured."""
        if self.exit_code:
            row = self.findings[0]
            error: type[MeshwrightError] = PeerError if self.exit_code == EXIT_CODES["broken"] else ConfigError
            others = f" (and {len(self.findings) - 1} more findings)" if len(self.findings) > 1 else ""
            message = f"preflight: {row.name} of {row.where} {row.verdict}: expected {row.expected}, found {row.found}"
            raise error(message + others, row.recommendation)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> PreflightReport:
        rows = tuple(PreflightRow(**row) for row in values["rows"])
        return cls(rows, HostMeasurements.from_json(values["measurements"]), tuple(values["remarks"]))

    def to_json(self) -> dict[str, Any]:
        return {
            "exit_code": self.exit_code,
            "suspect_hosts": list(self.suspect_hosts),
            "findings": [asdict(row) for row in self.findings],
            "rows": [asdict(row) for row in self.rows],
            "remarks": list(self.remarks),
            "measurements": self.measurements.to_json(),
        }
