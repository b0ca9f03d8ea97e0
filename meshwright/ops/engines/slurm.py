"""SLURM: writes the batch script of a job, with one supervisor per node, and submits it. Torch-free."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.ops.engines.engine_job import NO_OPTIONS, EngineJob, LaunchedJob, checked, describe_job, write_files

SCRIPT_NAME = "job.sh"
SIGNAL_RESOLUTION = 60
"""Seconds that SLURM may deviate from the time of `--signal` (sbatch(1))."""

SCRIPT = """\
#!/bin/bash
# Trains {run_file} on {hosts}. Written by `meshwright launch slurm`; it is yours to edit,
# and `sbatch {script}` submits it.
{directives}

run={run}
folder={folder}
python={python}
# All hosts of the job know this secret, and nobody else; every start of the job has a new one.
export MESHWRIGHT_JOB_SECRET_FILE="$folder/secret.$SLURM_JOB_ID"
trap 'rm -f "$MESHWRIGHT_JOB_SECRET_FILE"' EXIT
# SLURM sends SIGTERM to the supervisors, which stop after a checkpoint. This shell outlives them.
trap : TERM

(umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' > "$MESHWRIGHT_JOB_SECRET_FILE") || exit 1
before=$("$python" -P -m meshwright.ops.engines.slurm_exit newest "$run") || exit 1

# One supervisor per node, whose ranks share all cores that the job has there. A supervisor that ends does not end the
# others: they decide together.
srun --ntasks-per-node=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} --cpu-bind=none \
  --kill-on-bad-exit=0 --wait=0{no_kill} bash -c '
  export MESHWRIGHT_HOST_NAME="$SLURMD_NODENAME"
  node=$(scontrol --oneliner show node "$SLURMD_NODENAME")
  export MESHWRIGHT_HOST_ADDRESS="$(sed -n "s/.* NodeAddr=\\([^ ]*\\).*/\\1/p" <<< "$node")"
  exec "$@"' supervisor \\
  {command} &
step=$!
wait "$step"; code=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done  # a signal ends `wait` early
wait "$step"; last=$?
[ "$last" = 127 ] || code=$last  # 127: its exit code is known already

# Ends the job, or puts it back into the queue: {folder_text}/exits.jsonl says which and why.
trap '' TERM  # a requeue sends SIGTERM to this script, which may have nodes to exclude after it
"$python" -P -m meshwright.ops.engines.slurm_exit decide "$run" --code "$code" --after "$before" \\
  --record "$folder/exits.jsonl" --requeues {requeues} --blame-limit {blame_limit}
"""


def slurm_script(
    job: EngineJob,
    *,
    partition: str = "",
    account: str = "",
    time: str = "",
    requeues: int = 3,
    blame_limit: int = 2,
    python: str = sys.executable,
) -> str:
    """The batch script of a job as text; the arguments are those of `launch_slurm`."""
    if min(requeues, blame_limit - 1) < 0:
        raise ConfigError(
            f"--requeues {requeues} --blame-limit {blame_limit}", "expected at least 0 requeues, and a limit of 1"
        )
    outlives_nodes = job.spares > 0 or 0 < job.config.launch.min_hosts < job.hosts
    notice = round(job.config.launch.grace_period) + SIGNAL_RESOLUTION
    hosts = f"{job.hosts} host(s)" + (f" and {job.spares} spare(s)" if job.spares else "")
    directives = {
        "job-name": job.name,
        "nodes": str(job.hosts + job.spares),
        "ntasks-per-node": "1",
        "cpus-per-task": str(job.cpus or ""),
        "gpus-per-node": str(job.gpus_per_host or ""),
        "partition": partition and checked(partition, "--partition"),
        "account": account and checked(account, "--account"),
        "time": time and checked(time, "--time", r"[0-9][0-9:-]*"),
        "signal": f"TERM@{notice}",
        "output": output_pattern(job.folder),
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in directives.items() if value]
    lines += ["#SBATCH --open-mode=append", "#SBATCH --requeue"]
    # A task has one core by default, which its ranks would share: without --cpus, the job has its nodes for itself.
    lines += ["#SBATCH --exclusive"] if job.cpus is None else []
    lines += ["#SBATCH --no-kill"] if outlives_nodes else []
    return SCRIPT.format(
        run_file=job.run_file,
        hosts=hosts,
        script=shlex.quote(str(job.folder / SCRIPT_NAME)),
        directives="\n".join(lines),
        run=shlex.quote(str(job.run)),
        folder=shlex.quote(str(job.folder)),
        folder_text=job.folder,
        python=shlex.quote(python),
        no_kill=" --no-kill" if outlives_nodes else "",
        command=shlex.join(job.train_command(python)),
        requeues=requeues,
        blame_limit=blame_limit,
    )


def output_pattern(folder: Path) -> str:
    """The file of the job's output; a percent sign has a meaning in it, and a quote ends it."""
    text = str(folder).replace("%", "%%")
    if '"' in text or "\\" in text:
        raise ConfigError(f"the path {folder} has a quote or a backslash", "try --write DIR with another folder")
    return f'"{text}/job-%j.out"'


def launch_slurm(
    run_file: str | Path,
    run: str | Path | None = None,
    *,
    hosts: int | None = None,
    spares: int = 0,
    cpus: int | None = None,
    partition: str = "",
    account: str = "",
    time: str = "",
    requeues: int = 3,
    blame_limit: int = 2,
    python: str = sys.executable,
    overrides: Sequence[str] = (),
    entry_points: Mapping[str, str] = NO_OPTIONS,
    write: str | Path | None = None,
) -> LaunchedJob:
    """Writes the batch script of a run on SLURM, and submits it.

    Args:
        run_file: the run file, on a file system that all nodes share.
        run: the run folder, also shared. Default: runs/NAME, where NAME.toml is the run file.
        hosts: the nodes that train. Default: ``launch.hosts`` of the run file.
        spares: nodes beyond them, which wait until one of them fails.
        cpus: the CPU cores of the job per node. Default: whole nodes, which no other job shares.
        partition, account, time: as sbatch takes them. Default: those of the cluster.
        requeues: how often in a row the job returns to the queue after a failure without a new checkpoint. A time limit
            and a preemption do not count.
        blame_limit: incidents after which a node is excluded when the job returns to the queue.
        python: the interpreter on the nodes.
        overrides: settings as ``"--key=value"``.
        entry_points: the options of `meshwright train` that name objects of the user's code.
        write: the folder for the script; nothing is then submitted. Default: the run folder's path with ``.launch``
            appended, and the job is submitted.
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
    script = slurm_script(
        job,
        partition=partition,
        account=account,
        time=time,
        requeues=requeues,
        blame_limit=blame_limit,
        python=python,
    )
    files = write_files(job.folder, {SCRIPT_NAME: script})
    command = ("sbatch", "--parsable", str(files[0]))
    if write is not None:
        return LaunchedJob("slurm", files, command)
    return LaunchedJob("slurm", files, command, submit(command))


def submit(command: Sequence[str]) -> str:
    """Submits a script and returns the number of the job."""
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not on this machine", "try --write DIR, and sbatch on a login node")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stderr.split())[:500]
        raise ConfigError(f"sbatch refused {command[-1]}: {reason}", "try to correct the script, and sbatch again")
    return done.stdout.strip().partition(";")[0]
