"""Runs every check of the contracts on a config, prints the results, and writes the certificate."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshwright.base.config import RunConfig, fingerprint, identity, placement
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.io import output_file, write_json
from meshwright.base.records.failures import RanksFailed
from meshwright.base.topology.unsupported import validate
from meshwright.base.topology.unused_settings import unused_settings
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.source import Source, find_structure
from meshwright.core.launch.user_code.update import require_built_in_update
from meshwright.core.parallel.world import device_type
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.identity import code_fingerprint
from meshwright.errors import MeshwrightError, RestartsExhausted
from meshwright.prover.claims import Claim, cuda_devices
from meshwright.prover.custom.family_model import (
    BALANCING,
    family_custom_model,
    has_reference,
    without_balancing,
)
from meshwright.prover.custom.proof import CustomProof
from meshwright.prover.custom.subject import Subject
from meshwright.prover.device.check import DEVICE_AXES, check_device, require_device
from meshwright.prover.frozen_parameters import check_frozen
from meshwright.prover.initialization import check_initialization
from meshwright.prover.optimizer_updates import check_optimizer
from meshwright.prover.policy.proof import policy_checks, policy_not_proven, require_built_in_policy
from meshwright.prover.recovery import check_recovery
from meshwright.prover.relations import check_relations_of_config
from meshwright.prover.schedule import check_schedule
from meshwright.prover.shrink import estimate_seconds, not_proven, proof_runs
from meshwright.prover.shrink.coverage import INITIAL_WEIGHTS
from meshwright.prover.stream import check_stream
from meshwright.prover.training import check_training
from meshwright.version import __version__

Check = Callable[[RunConfig, bool], Iterator[Claim]]

CHECKS: dict[str, Check] = {
    "stream": lambda config, _full: check_stream(config),
    "model": lambda config, _full: check_model(config),
    "schedule": lambda config, _full: check_schedule(config),
    "optimizer": lambda config, _full: check_optimizer(config),
    "training": check_training,
    "recovery": lambda config, _full: check_recovery(config),
}
"""Name -> check of a config, in full size or not. A check whose ranks fail has failed."""


def check_model(config: RunConfig) -> Iterator[Claim]:
    """The relations that hold for every decoder, and the initial weights."""
    yield from check_relations_of_config(config)
    yield from check_initialization(config)


QUICK = {"blocks": 16, "micro-batches": 8, "ranks": 4}
"""Up to these sizes, on most layouts and without compilation, all checks take about a minute on two cores."""
QUICK_SECONDS = 30.0
"""The longest estimate of the training check that is not announced."""


@dataclass(frozen=True)
class CheckResult:
    """One claim of a check, whether it holds, and what was measured."""

    check: str
    claim: str
    passed: bool
    measured: str
    seconds: float = field(compare=False, default=0.0)
    changes: tuple[str, ...] = ()
    """The settings of the run that was checked which differ from the user's; they belong to the claim."""
    not_proven: tuple[str, ...] = ()
    """What the claim leaves open."""


def run_checks(
    config: RunConfig, full: bool = False, checks: Mapping[str, Check] | None = None
) -> Iterator[CheckResult]:
    """Runs the checks one after the other. A signal ends them: it says nothing about the contracts."""
    for name, check in (checks or CHECKS).items():
        start = time.monotonic()
        try:
            for claim in check(config, full):
                seconds = round(time.monotonic() - start, 3)
                passed = bool(claim.passed)
                row = (claim.check or name, claim.claim, passed, claim.measured, seconds, claim.changes)
                yield CheckResult(*row, claim.not_proven)
                start = time.monotonic()
        except (RanksFailed, RestartsExhausted) as error:
            if error.exit_code > 128:
                raise
            yield unfinished(name, str(error), start)
        except MeshwrightError:  # the config or its data: nothing can be proven
            raise
        except Exception as error:  # noqa: BLE001  what a check does not expect may be the work of a defect
            yield unfinished(name, f"{type(error).__name__}: {error}", start)


def unfinished(check: str, problem: str, start: float) -> CheckResult:
    seconds = round(time.monotonic() - start, 3)
    return CheckResult(check, "the check runs to its end", False, problem, seconds)


def certify(
    config: RunConfig,
    on_result: Callable[[CheckResult], None] | None = None,
    full: bool = False,
    *,
    custom: CustomModel | None = None,
    sources: list[Source] | None = None,
    on_device: bool = False,
) -> dict[str, Any]:
    """Runs every check on this machine, passes each result to `on_result`, and returns the certificate. With `custom`,
    the user's own model is proven as it is; `sources` are its data, by default those of the config. `on_device` adds
    the check of every axis on CUDA; for a model without an independent reference, the axes are listed as not proven.
    """
    require_built_in_update(config, "prove")
    require_built_in_policy(config, {"model": custom, "source": sources or None})
    if on_device:
        require_device(config)
    config = with_device_defaults(config, device_type(config.launch), custom is not None)
    configured, left_open = config, [INITIAL_WEIGHTS] if config.init_from else []
    of_family = custom is None and not has_reference(config) and not config.rl.enabled
    if of_family:
        config, custom = without_balancing(config), family_custom_model(config)
        left_open += [BALANCING] if config != configured else []
    torch.set_num_threads(config.launch.threads)
    checks, proof = CHECKS, None
    if config.rl.enabled:
        checks = policy_checks(config)
    elif custom is not None:
        opened = sources or open_sources(config.data, config.model.vocab, config.model.separator)
        custom = replace(custom, batch=find_structure(opened[0], custom.collate))  # read where its check refuses it
        proof = CustomProof(config, Subject(custom, opened), of_family)
        checks = proof.checks()
        left_open += [DEVICE_AXES] if on_device else []
        if config.lora.enabled:
            checks = {**checks, "frozen": lambda config, _full: check_frozen(config)}
    elif on_device:
        checks = {**checks, "device": lambda config, _full: check_device(config)}
    results = []
    for result in run_checks(config, full, checks):
        results.append(result)
        if on_result is not None:
            on_result(result)
    if proof is not None:
        return build_certificate(configured, results, [*left_open, *proof.not_proven()], proof.describe())
    if config.rl.enabled:
        return build_certificate(config, results, policy_not_proven(config))
    devices = cuda_devices(config.launch)
    return build_certificate(config, results, not_proven(config, proof_runs(config, full, devices), devices))


def expected_duration(config: RunConfig, full: bool) -> str:
    """What to expect of a config beyond `QUICK` or `QUICK_SECONDS`, or ''."""
    if config.rl.enabled:
        return ""
    layout, batch = validate(config)
    sizes = {"blocks": config.model.layers, "micro-batches": batch.accumulation, "ranks": layout.ranks}
    beyond = [f"{sizes[name]} {name}" for name in sizes if sizes[name] > QUICK[name]]
    beyond += ["compile.enabled"] if config.compile.enabled else []
    beyond += ["--full"] if full else []
    seconds = estimate_seconds(proof_runs(config, full, cuda_devices(config.launch)))
    if not beyond and seconds <= QUICK_SECONDS:
        return ""
    what = f" of {', '.join(beyond)}" if beyond else ""
    return f"the training check{what} takes about {seconds:,.0f} s on this machine, the other checks about 30 s"


def prove(
    config: RunConfig,
    out: Path,
    as_json: bool = False,
    full: bool = False,
    *,
    custom: CustomModel | None = None,
    sources: list[Source] | None = None,
    on_device: bool = False,
) -> bool:
    """Runs every check, prints the results and writes the certificate; True if every claim holds. An `out` that cannot
    be written is refused before the first check. `custom`, `sources` and `on_device` are those of `certify`.
    """
    file = output_file(out, "--out")
    config = with_device_defaults(config, device_type(config.launch), custom is not None)
    # An exception removes temporary folders; SIGTERM alone would not.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, width=140)
    results: list[CheckResult] = []

    def show(result: CheckResult) -> None:
        results.append(result)
        if not as_json and console.is_terminal:
            status = "[green]PASS[/]" if result.passed else "[red]FAIL[/]"
            console.print(f"{status} {result.check}: {escape(result.claim)}", highlight=False)

    if custom is None and (duration := expected_duration(config, full)):
        console.print(duration, highlight=False, soft_wrap=True)
    certificate = certify(config, show, full, custom=custom, sources=sources, on_device=on_device)
    if as_json:
        print(json.dumps(certificate))
    else:
        print_table(console, results, out)
        for title in ("not_proven", "notes"):
            for line in certificate[title]:
                console.print(f"{title.replace('_', ' ').rstrip('s')}: {line}", highlight=False, soft_wrap=True)
    write_json(file, certificate)  # last, so that a full disk does not hide the results
    return bool(certificate["passed"])


def build_certificate(
    config: RunConfig, results: list[CheckResult], left_open: list[str], model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The certificate: what was checked at what size, what was not, of which code, model and config, on which machine,
    and a digest of all of it. `model` describes a custom model.
    """
    certificate: dict[str, Any] = {
        "meshwright": __version__,
        "code": code_fingerprint(),
        "identity": fingerprint(identity(config)),
        "placement": fingerprint(placement(config)),
        "model": model or {"class": "built-in"},
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
        "not_proven": [*left_open, *(text for result in results for text in result.not_proven)],
        "notes": unused_settings(config),
    }
    certificate["digest"] = hashlib.sha256(json.dumps(certificate, sort_keys=True).encode()).hexdigest()
    return certificate


def print_table(console: Console, results: list[CheckResult], out: Path) -> None:
    """The claims, then the settings that were changed, each list once with the numbers of its claims."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "check", "claim", "result", "measured", "seconds"):
        table.add_column(column, overflow="fold", justify="right" if column in ("", "seconds") else "left")
    changes: dict[tuple[str, ...], list[int]] = {}
    for number, result in enumerate(results, 1):
        status = "[green]PASS[/]" if result.passed else "[bold red]FAIL[/]"
        seconds = f"{result.seconds:.1f}"
        table.add_row(str(number), result.check, escape(result.claim), status, escape(result.measured), seconds)
        if result.changes:
            changes.setdefault(result.changes, []).append(number)
    console.print(table)
    for settings, numbers in changes.items():
        rows = ", ".join(map(str, numbers))
        console.print(f"changed for {rows}: {', '.join(settings)}", highlight=False, soft_wrap=True, markup=False)
    passed = sum(result.passed for result in results)
    console.print(f"{passed} of {len(results)} claims hold; certificate in {out}", highlight=False, soft_wrap=True)
