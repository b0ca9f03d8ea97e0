"""Ray: writes the script of a job, with one supervisor per node, and runs it. Torch-free."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.ops.engines.engine_job import NO_OPTIONS, EngineJob, LaunchedJob, describe_job, write_files
from meshwright.ops.engines.exit_codes import MEANINGS
from meshwright.ops.engines.ray_cluster import import_ray

SCRIPT_NAME = "ray_job.py"

SCRIPT = '''\
"""Trains {run_file} on {hosts}. Written by `meshwright launch ray`; it is yours to edit.

`python {name}` runs it until the run is complete; its exit code is that of `meshwright train`.
"""

from meshwright.ops.engines.ray_cluster import train_on_ray

if __name__ == "__main__":
    code = train_on_ray(
        {command!r},
        run={run!r},
        folder={folder!r},
        hosts={host_count},
        spares={spares},
        cpus={cpus},
        gpus={gpus},
        retries={retries},
        address={address!r},
    )
    raise SystemExit(code)
'''


class RayJobFailed(MeshwrightError):
    """The script of a job on Ray ended with an exit code that is not zero."""

    def __init__(self, code: int, script: str) -> None:
        super().__init__(
            f"{script} ended with exit code {code} ({MEANINGS.get(code, 'unknown')})",
            "try attempts/*/incident.json in the run folder for the causes",
        )
        self.exit_code = code


def ray_script(job: EngineJob, *, retries: int = 3, address: str = "auto", python: str = sys.executable) -> str:
    """The script of a job as text; the arguments are those of `launch_ray`."""
    return SCRIPT.format(
        run_file=str(job.run_file).replace("\\", "\\\\").replace('"', '\\"'),
        hosts=f"{job.hosts} host(s)" + (f" and {job.spares} spare(s)" if job.spares else ""),
        name=SCRIPT_NAME,
        command=job.train_command(python),
        run=str(job.run),
        folder=str(job.folder),
        host_count=job.hosts,
        spares=job.spares,
        cpus=job.cpus_per_host,
        gpus=job.gpus_per_host,
        retries=retries,
        address=address,
    )


def launch_ray(
    run_file: str | Path,
    run: str | Path | None = None,
    *,
    hosts: int | None = None,
    spares: int = 0,
    cpus: int | None = None,
    ray_address: str = "auto",
    retries: int = 3,
    python: str = sys.executable,
    overrides: Sequence[str] = (),
    entry_points: Mapping[str, str] = NO_OPTIONS,
    write: str | Path | None = None,
) -> LaunchedJob:
    """Writes the script of a run on Ray, and runs it until the run is complete.

    Args:
        run_file: the run file, on a file system that all nodes share.
        run: the run folder, also shared. Default: runs/NAME, where NAME.toml is the run file.
        hosts: the nodes that train. Default: ``launch.hosts`` of the run file.
        spares: nodes beyond them, which wait until one of them fails.
        cpus: the CPU cores of a node that Ray reserves. Default: one per thread and data worker of a rank.
        ray_address: the Ray cluster. Default: the one that runs on this machine.
        retries: restarts of a supervisor by Ray, and of the job in a row without a new checkpoint.
        python: the interpreter on the nodes.
        overrides: settings as ``"--key=value"``.
        entry_points: the options of `meshwright train` that name objects of the user's code.
        write: the folder for the script; nothing is then started. Default: the run folder's path with ``.launch``
            appended, and the script runs.

    Raises:
        RayJobFailed: the job ended with an exit code that is not zero.
    """
    job = describe_job(
        run_file,
        run,
        hosts=hosts,
        spares=spares,
        cpus=cpus,
        overrides=overrides,
        entry_points=entry_points,
        write=write,
    )
    files = write_files(job.folder, {SCRIPT_NAME: ray_script(job, retries=retries, address=ray_address, python=python)})
    command = (python, "-P", str(files[0]))
    if write is not None:
        return LaunchedJob("ray", files, command)
    import_ray()
    code = subprocess.run(command).returncode
    if code:
        raise RayJobFailed(code if code > 0 else 128 - code, str(files[0]))
    return LaunchedJob("ray", files, command, job.name, "the run is complete")
