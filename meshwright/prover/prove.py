"""Runs every check of the contracts on a config, prints the results, and writes the certificate."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshwright.config import RunConfig, fingerprint, identity, placement
from meshwright.errors import RestartsExhausted
from meshwright.io import output_file, write_json
from meshwright.prover.comm_volume import check_communication
from meshwright.prover.layouts import check_layouts
from meshwright.prover.recovery import check_recovery
from meshwright.prover.stream import check_stream
from meshwright.recover.failures import RanksFailed
from meshwright.topology.unused_settings import unused_settings
from meshwright.trainer.identity import code_fingerprint
from meshwright.version import __version__

Check = Callable[[RunConfig], Iterator[tuple[str, bool, str]]]

CHECKS: dict[str, Check] = {
    "stream": check_stream,
    "layout": check_layouts,
    "communication": check_communication,
    "recovery": check_recovery,
}
"""Name -> check. A check yields (claim, passed, measured) for each claim; a check whose ranks fail has failed."""


@dataclass(frozen=True)
class CheckResult:
    """One claim of a check, whether it holds, and what was measured."""

    check: str
    claim: str
    passed: bool
    measured: str
    seconds: float = field(compare=False, default=0.0)


def run_checks(config: RunConfig) -> Iterator[CheckResult]:
    """Runs the checks one after the other. A signal ends them: it says nothing about the contracts."""
    for name, check in CHECKS.items():
        start = time.monotonic()
        try:
            for claim, passed, measured in check(config):
                yield CheckResult(name, claim, bool(passed), measured, round(time.monotonic() - start, 3))
                start = time.monotonic()
        except (RanksFailed, RestartsExhausted) as error:
            if error.exit_code > 128:
                raise
            seconds = round(time.monotonic() - start, 3)
            yield CheckResult(name, "the check runs to its end", False, str(error), seconds)


def certify(config: RunConfig, on_result: Callable[[CheckResult], None] | None = None) -> dict[str, Any]:
    """Runs every check on this machine, passes each result to `on_result`, and returns the certificate."""
    torch.set_num_threads(config.launch.threads)
    results = []
    for result in run_checks(config):
        results.append(result)
        if on_result is not None:
            on_result(result)
    return build_certificate(config, results)


def prove(config: RunConfig, out: Path, as_json: bool = False) -> bool:
    """Runs every check, prints the results and writes the certificate; True if every claim holds. An `out` that cannot
    be written is refused before the first check.
    """
    output_file(out, "--out")
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, width=140)
    results: list[CheckResult] = []

    def show(result: CheckResult) -> None:
        results.append(result)
        if not as_json and console.is_terminal:
            status = "[green]PASS[/]" if result.passed else "[red]FAIL[/]"
            console.print(f"{status} {result.check}: {escape(result.claim)}", highlight=False)

    certificate = certify(config, show)
    write_json(out, certificate)
    if as_json:
        print(json.dumps(certificate))
    else:
        print_table(console, results, out)
        for note in certificate["notes"]:
            console.print(f"note: {note}", highlight=False, soft_wrap=True)
    return bool(certificate["passed"])


def build_certificate(config: RunConfig, results: list[CheckResult]) -> dict[str, Any]:
    """The certificate: what was checked, of which code and config, on which machine, and a digest of all of it."""
    certificate: dict[str, Any] = {
        "meshwright": __version__,
        "code": code_fingerprint(),
        "identity": fingerprint(identity(config)),
        "placement": fingerprint(placement(config)),
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "passed": bool(results) and all(result.passed for result in results),
        "checks": [asdict(result) for result in results],
        "notes": unused_settings(config),
    }
    certificate["digest"] = hashlib.sha256(json.dumps(certificate, sort_keys=True).encode()).hexdigest()
    return certificate


def print_table(console: Console, results: list[CheckResult], out: Path) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("check", "claim", "result", "measured", "seconds"):
        table.add_column(column, overflow="fold", justify="right" if column == "seconds" else "left")
    for result in results:
        status = "[green]PASS[/]" if result.passed else "[bold red]FAIL[/]"
        table.add_row(result.check, escape(result.claim), status, escape(result.measured), f"{result.seconds:.1f}")
    console.print(table)
    passed = sum(result.passed for result in results)
    console.print(f"{passed} of {len(results)} claims hold; certificate in {out}", highlight=False, soft_wrap=True)
