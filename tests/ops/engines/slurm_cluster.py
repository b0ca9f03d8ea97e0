"""A SLURM cluster of several nodes on this machine, on loopback: munged, slurmctld and one slurmd per node."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
CONFIG = """\
ClusterName=meshwright
SlurmctldHost=localhost
SlurmctldAddr=127.0.0.1
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job starts again once its credential has expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=20
SlurmdTimeout=5
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=node[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=100
PartitionName=low Nodes=node[1-{nodes}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes=node[1-{nodes}] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing_for_slurm() -> str:
    """Why no cluster can be started here; empty if one can."""
    if os.geteuid() != 0:
        return "slurmctld and slurmd need root"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)} (Debian: slurm-wlm, munge)" if absent else ""


class SlurmCluster:
    """The daemons of a cluster; `close` ends them, by their process ids."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, nodes
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        folder.chmod(0o755)  # munged refuses a socket in a folder that others cannot reach
        (folder / "state").mkdir()
        ports = free_ports(nodes + 1)
        config = CONFIG.format(folder=folder, nodes=nodes, port=ports[0], first=ports[1], last=ports[-1])
        (folder / "slurm.conf").write_text(config)
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{name}={folder}/munge.{suffix}" for name, suffix in files.items()]
        self.start("munged", ["munged", "--foreground", "--force", *options])
        wait_until(lambda: (folder / "munge.socket").exists(), "munged did not start", 10)
        self.start("slurmctld", ["slurmctld", "-D", "-c"])
        for number in range(1, nodes + 1):
            self.start_node(f"node{number}")
        wait_until(self.is_idle, "the nodes did not register", 20)

    def start(self, name: str, command: Sequence[str]) -> None:
        with open(self.folder / f"{name}.out", "ab") as log:
            process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        self.daemons[name] = process

    def start_node(self, name: str) -> None:
        self.start(name, ["slurmd", "-D", "-N", name])

    def is_idle(self) -> bool:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%T"],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        return done.stdout.split() == ["idle"] * self.nodes

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """The fields of a job."""
        text = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", text))

    def wait_for(self, number: str, *states: str, seconds: float = 60) -> str:
        """Waits until the job is in one of the states, and returns that."""
        wait_until(
            lambda: self.job(number)["JobState"] in states,
            lambda: f"job {number} is {self.job(number)}, expected {states}",
            seconds,
        )
        return self.job(number)["JobState"]

    def kill_node(self, name: str) -> None:
        """Ends a node at once: its daemon, and the processes of its steps."""
        daemon = self.daemons.pop(name)
        kill_all([daemon.pid])
        processes = step_processes(self.folder, name)
        kill_all([pid for pid in map(parent_of, processes) if command_of(pid) == "slurmstepd"])  # they would report
        kill_all(processes)
        daemon.wait()

    def close(self) -> None:
        subprocess.run(["scancel", "--quiet", "--user=root"], env=self.environment, capture_output=True)
        for number in range(1, self.nodes + 1):
            kill_all(step_processes(self.folder, f"node{number}"))
        for process in reversed(self.daemons.values()):
            process.terminate()
        for process in self.daemons.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def step_processes(folder: Path, node: str) -> list[int]:
    """The processes of the job steps of a node, which its name in their environment tells."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        own = f"SLURM_CONF={folder}/slurm.conf".encode() in environment
        if own and f"SLURMD_NODENAME={node}".encode() in environment:
            found.append(int(path.name))
    return found


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def kill_all(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)


def free_ports(count: int) -> list[int]:
    """Consecutive ports that nobody listens on."""
    for first in range(21000 + os.getpid() % 1000 * 10, 60000, count):
        sockets = []
        try:
            for port in range(first, first + count):
                listener = socket.socket()
                sockets.append(listener)
                listener.bind(("127.0.0.1", port))
        except OSError:
            continue
        finally:
            for listener in sockets:
                listener.close()
        return list(range(first, first + count))
    raise AssertionError("no free ports")


def wait_until(condition: Callable[[], bool], message: str | Callable[[], str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message if isinstance(message, str) else message()
        time.sleep(0.1)
