"""Runs every check on a config, prints the table, signs the certificate."""

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
from meshwright.io import write_json
from meshwright.prover.comm_volume import check_communication
from meshwright.prover.layouts import check_layouts
from meshwright.prover.recovery import check_recovery
from meshwright.prover.stream import check_stream
from meshwright.recover.failures import RanksFailed
from meshwright.trainer.identity import code_fingerprint
from meshwright.version import __version__

Check = Callable[[RunConfig], Iterator[tuple[str, bool, str]]]

CHECKS: dict[str, Check] = {
    "stream": check_stream,
    "layout": check_layouts,
    "traffic": check_communication,
    "recovery": check_recovery,
}
"""Name -> check. A check yields (promise, kept, what was measured); one that raises has failed."""


@dataclass(frozen=True)
class CheckResult:
    check: str
    promise: str
    kept: bool
    measured: str
    seconds: float = field(compare=False, default=0.0)


def run_checks(config: RunConfig) -> Iterator[CheckResult]:
    for name, check in CHECKS.items():
        start = time.monotonic()
        try:
            for promise, kept, measured in check(config):
                yield CheckResult(name, promise, bool(kept), measured, round(time.monotonic() - start, 3))
                start = time.monotonic()
        except (RanksFailed, RestartsExhausted) as error:
            yield CheckResult(name, "the check runs to its end", False, str(error), round(time.monotonic() - start, 3))


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
    """Runs every check, prints the results and writes the certificate; True if every contract holds."""
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, width=140)
    results: list[CheckResult] = []

    def show(result: CheckResult) -> None:
        results.append(result)
        if not as_json and console.is_terminal:
            status = "[green]kept  [/]" if result.kept else "[red]BROKEN[/]"
            console.print(f"{status} {result.check}: {result.promise}", highlight=False)

    certificate = certify(config, show)
    write_json(out, certificate)
    if as_json:
        print(json.dumps(certificate))
    else:
        print_table(console, results, out)
    return bool(certificate["kept"])


def build_certificate(config: RunConfig, found: list[CheckResult]) -> dict[str, Any]:
    """The certificate: what was checked, where, of which code, and a digest of all of it."""
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
        "kept": bool(found) and all(finding.kept for finding in found),
        "findings": [asdict(finding) for finding in found],
    }
    certificate["digest"] = hashlib.sha256(json.dumps(certificate, sort_keys=True).encode()).hexdigest()
    return certificate


def print_table(console: Console, found: list[CheckResult], out: Path) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("check", "promise", "", "measured", "s"):
        table.add_column(column, overflow="fold", justify="right" if column == "s" else "left")
    for finding in found:
        word = "[green]kept[/]" if finding.kept else "[bold red]BROKEN[/]"
        table.add_row(finding.check, escape(finding.promise), word, escape(finding.measured), f"{finding.seconds:.1f}")
    console.print(table)
    broken = sum(not finding.kept for finding in found)
    console.print(
        f"{len(found) - broken} of {len(found)} promises kept; certificate in {out}", highlight=False, soft_wrap=True
    )
