"""Runs a preflight on all hosts of a job; this host leads it or takes part. Torch-free."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from typing import Any

from meshwright.base.config import RunConfig
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.channel import mac, read_secret
from meshwright.core.launch.fork_server import ForkServer
from meshwright.core.recover.hosts.hosts_policy import hosts_policy
from meshwright.core.recover.hosts.supervise_hosts import job_id, supervise_hosts
from meshwright.core.recover.lease import host_name, view_newest_lease
from meshwright.errors import ConfigError, PeerError
from meshwright.ops.preflight.report import PreflightReport

SECONDS = 10.0
"""Time budget of the measurements before a job."""


class PreflightServer(ForkServer):
    """Client of the fork server of a preflight."""

    module = "meshwright.ops.preflight.hosts.server_process"

    def __init__(
        self, config: RunConfig, folder: RunFolder, run: RunFolder, cluster: str | None, seconds: float
    ) -> None:
        super().__init__(config, folder, fork=False, fallback=False)
        self._options = {"run": str(run.root), "cluster": cluster, "seconds": seconds}


class NoViewer:
    """Shows nothing while the ranks measure."""

    def tick(self) -> None: ...

    def show(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def preflight_on_hosts(config: RunConfig, run: RunFolder, cluster: str | None, seconds: float) -> PreflightReport:
    """The report of a preflight on `launch.hosts` hosts, the same on every host. Its supervisors meet in a folder
    beside the run folder, which is removed at the end.
    """
    if run.url:
        raise ConfigError(
            f"the hosts of a preflight meet in a shared folder, and {run.url} is in an object store",
            "try launch.preflight = off, or torchrun ... -m meshwright preflight",
        )
    config = replace(config, launch=replace(config.launch, restarts=0, min_hosts=0))
    secret = mac(read_secret(), b"preflight")
    meeting = RunFolder(run.root.parent / f"{run.root.name}.preflight-{job_id(secret)[:12]}")
    server = PreflightServer(config, meeting, run, cluster, seconds)
    with closing(server):
        values = supervise_hosts(
            meeting,
            config.launch,
            server,
            lambda _attempt: NoViewer(),
            hosts_policy(config),
            secret,
            lambda start: start,
            fresh=False,
            close=server.close,
        )
    shutil.rmtree(meeting.root, ignore_errors=True)  # every host has the report
    if not values:
        raise PeerError("the preflight has ended on the other hosts without this one", "try it again on every host")
    return PreflightReport.from_json(values)


def require_preflight(config: RunConfig, run: RunFolder, cluster: str | None) -> None:
    """Runs the preflight that `launch.preflight` asks for. Raises PeerError on every host if something is broken, or,
    with `exclude`, only on the hosts that are left out.
    """
    mode = config.launch.preflight
    lease = view_newest_lease(run) if mode != "off" else None
    # A supervisor that joins a job that runs has nobody to measure with.
    if mode == "off" or (lease is not None and lease.job == job_id(read_secret())):
        return
    report = preflight_on_hosts(config, run, cluster, SECONDS)
    suspects = report.suspect_hosts
    if mode == "exclude" and suspects and len(suspects) < len(report.measurements.hosts):
        if host_name() in suspects:
            row = next(row for row in report.findings if row.host == host_name())
            found = f"{row.name} is {row.verdict}: expected {row.expected}, found {row.found}"
            raise PeerError(f"the preflight leaves this host out: {found}", row.recommendation)
        return
    report.raise_if_failed()
