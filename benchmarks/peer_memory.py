"""Snapshots in the memory of the hosts: what they cost per step, and how soon a job continues after the loss of a host.

The cost is measured in one training of preset `small` on two hosts with a rank each, which alternates between blocks of
steps with snapshots and without. The hosts are processes of this machine that reach each other over loopback, so that
the copies compete with the training for its cores. The step time depends on what else runs on the machine. The share of
CPU does so much less: it is the CPU seconds that ranks and hosts spend beside the training threads, above those of
blocks without snapshots, and the stalls of the training threads, relative to all CPU seconds of the steps.

The time to the next step after the loss of a host is that of a real job with a spare, relative to a cold restart of the
job.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.throughput import ratio_statistics
from meshwright.base.config import load_config
from meshwright.base.records.events import EventFollower, read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.scratch_folder import ScratchFolder
from meshwright.base.topology.placement import HostPlacement
from meshwright.core.api.snapshot_keeper import PREFIX, SHARED_MEMORY
from meshwright.core.channel import SECRET_VARIABLE, Connection, Listener, read_secret
from meshwright.core.launch.job import make_job
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.parallel.world import World
from meshwright.core.store.memory.keeper import SnapshotKeeper
from meshwright.core.store.memory.session import KeeperSession, decode_hello
from meshwright.core.trainer.job import Job
from meshwright.core.trainer.loop import Training

EVERY = 5
"""Steps between snapshots."""
ROUNDS = 4
"""Pairs of EVERY steps without a snapshot and as many with one."""
Block = tuple[float, float, float]
"""Per step of a block: the seconds, the CPU seconds of the training thread, and those of everything beside it."""
MAX_OVERHEAD = 0.02
LOSSES = 3
TRAIN_OPTIONS = (
    "--steps=400",
    "--checkpoint.every=100",
    "--checkpoint.seconds=0",
    f"--checkpoint.memory_every={EVERY}",
    "--launch.device=cpu",
    "--launch.hosts=2",
    "--launch.rendezvous_timeout=90",
)
LOSE_AT = 20
"""A host is killed once this step is recorded, and a snapshot exists."""
TIMEOUT_SECONDS = 180.0


def measure() -> dict[str, Any]:
    os.environ.setdefault(SECRET_VARIABLE, os.urandom(16).hex())
    return {"overhead": measure_overhead(), "recovery": measure_recovery()}


def measure_overhead() -> dict[str, Any]:
    """The step time with snapshots relative to the one without, in blocks that alternate."""
    steps = EVERY * (2 * ROUNDS + 2)
    overrides = ["--preset=small", f"--steps={steps}", f"--checkpoint.memory_every={EVERY}", "--launch.device=cpu"]
    overrides += ["--checkpoint.seconds=0", "--numerics.compare_every=0", "--eval.every=0"]
    config = load_config(overrides=overrides, ranks=2)
    with (
        tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder,
        keeper_process() as a,
        keeper_process() as b,
    ):
        run = RunFolder(Path(folder) / "run")
        run.root.mkdir()
        job = replace(make_job(config, run), attempt=1)
        by_rank = run_ranks(measure_blocks, 2, job, (a, b), launch=job.config.launch, timeout=3600.0)
        snapshots = [event for event in read_events(run.events(0)) if event["kind"] == "snapshot"]
    without, with_snapshots = (list(zip(*(rank[kind] for rank in by_rank), strict=True)) for kind in (0, 1))
    seconds = [[max(wall for wall, _, _ in ranks) for ranks in rounds] for rounds in (without, with_snapshots)]
    beside = [[sum(cpu for _, _, cpu in ranks) for ranks in rounds] for rounds in (without, with_snapshots)]
    cpu = statistics.median(sum(training + other for _, training, other in ranks) for ranks in without)
    stall = 2 * statistics.median(s["stall_seconds"] for s in snapshots) / EVERY
    shares = sorted(round((b - a + stall) / cpu, 4) for a, b in zip(*beside, strict=True))
    extra = sorted(round(b / a - 1, 4) for a, b in zip(*seconds, strict=True))
    return {
        "preset": "small",
        "every": EVERY,
        "rounds": ROUNDS,
        "snapshots": len(snapshots),
        "snapshot_bytes": snapshots[-1]["bytes"],
        "snapshot_seconds": round(statistics.median(s["seconds"] for s in snapshots), 4),
        "stall_seconds": round(statistics.median(s["stall_seconds"] for s in snapshots), 5),
        "step_seconds": round(statistics.median(seconds[0]), 4),
        "cpu_seconds_per_step": round(cpu, 4),
        "overhead": {"median": statistics.median(extra), "all": extra},
        "cpu_share": {"median": statistics.median(shares), "all": shares},
    }


def measure_blocks(world: World, job: Job, hosts: tuple[tuple[int, int], ...]) -> tuple[list[Block], list[Block]]:
    """Each block without a snapshot, and with one, on one rank; the CPU seconds are those of the rank and its host."""
    ports = tuple(port for port, _ in hosts)
    placement = HostPlacement(world.rank, 1, ("a", "b"), ("127.0.0.1",) * 2, ports, 1)
    training = Training(replace(job, placement=placement), world)
    blocks: tuple[list[Block], list[Block]] = ([], [])
    run_block(training, EVERY - 1, 0, os.getpid())  # a snapshot then begins after the first step of a block
    for number in range(ROUNDS):
        pair = [(blocks[0], 0), (blocks[1], EVERY)]
        for rows, every in pair if number % 2 else reversed(pair):
            rows.append(run_block(training, EVERY, every, hosts[world.rank][1]))
    return blocks


def run_block(training: Training, steps: int, every: int, host: int) -> Block:
    training.snapshots.every = every
    start, training_cpu = time.perf_counter(), time.thread_time()
    cpu = time.process_time() + cpu_seconds(host)
    for _ in range(steps):
        training.run_step()
        training.save_if_due()
    training.recorder.flush()
    seconds, training_cpu = time.perf_counter() - start, time.thread_time() - training_cpu
    beside = time.process_time() + cpu_seconds(host) - cpu - training_cpu
    return seconds / steps, training_cpu / steps, beside / steps


def cpu_seconds(process: int) -> float:
    """The CPU seconds of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def keeper_process() -> Iterator[tuple[int, int]]:
    """A host that keeps snapshots: the port at which it listens, and its process."""
    context = mp.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=serve_keeper, args=(writer,), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield int(reader.recv()), process.pid
    finally:
        process.terminate()
        process.join()


def serve_keeper(writer: Any) -> None:
    folder = ScratchFolder(PREFIX, SHARED_MEMORY)
    keeper = SnapshotKeeper(folder.path)

    def serve(connection: Connection) -> None:
        if (attempt := decode_hello(connection.receive())) is not None:
            KeeperSession(keeper, connection, attempt).serve()

    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit())
    try:
        writer.send(Listener("127.0.0.1", read_secret(), serve).port)
        time.sleep(1e6)
    finally:
        folder.remove()


def measure_recovery() -> dict[str, Any]:
    rounds = []
    for number in range(LOSSES):
        with tempfile.TemporaryDirectory(prefix="meshwright-bench-", ignore_cleanup_errors=True) as folder:
            rounds.append(measure_loss(Path(folder) / "run"))
        print(f"peer_memory: loss {number + 1} of {LOSSES}: {rounds[-1]}", file=sys.stderr, flush=True)
    lost, cold = ([row[name] for row in rounds] for name in ("host_lost", "cold_restart"))
    return {
        "seconds_from_host_loss_to_next_step": round(statistics.median(lost), 3),
        "seconds_from_cold_restart_to_next_step": round(statistics.median(cold), 3),
        "cold_restart_over_host_loss": ratio_statistics(lost, cold),
        "steps_repeated_from_memory": [row["repeated"] for row in rounds],
        "steps_repeated_from_the_checkpoint": [row["repeated_from_checkpoint"] for row in rounds],
    }


def measure_loss(root: Path) -> dict[str, float]:
    """Kills a member of a job with a spare, then all of it, and starts it again."""
    hosts = LoopbackHosts(root)
    try:
        for name in "abc":
            hosts.start(name)
        hosts.wait(lambda e: e["kind"] == "step" and e["step"] >= LOSE_AT and hosts.snapshot_step > 0)
        done = hosts.last_step + 1
        start = time.monotonic()
        hosts.kill(hosts.member())
        restored = hosts.wait(lambda e: e["kind"] == "restored")
        hosts.wait(lambda e: e["kind"] == "step" and e["attempt"] == 2)
        seconds = {"host_lost": time.monotonic() - start, "repeated": done - restored["step"]}
        seconds["repeated_from_checkpoint"] = done - max(0, restored["published_step"])
        hosts.end()
        start = time.monotonic()
        for name in "de":
            hosts.start(name)
        hosts.wait(lambda e: e["kind"] == "step" and e["attempt"] == 3)
        return seconds | {"cold_restart": time.monotonic() - start}
    finally:
        hosts.end()


class LoopbackHosts:
    """Supervisors of this machine with different names, and the events of rank 0."""

    def __init__(self, root: Path) -> None:
        self.folder, self.logs = RunFolder(root), root.parent
        self.events = EventFollower(self.folder.events(0))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.pending: list[dict[str, Any]] = []
        self.last_step = self.snapshot_step = -1

    def start(self, host: str) -> None:
        command = [sys.executable, "-m", "meshwright", "train", "--run", str(self.folder.root), "--ranks", "2"]
        environment = os.environ | {"MESHWRIGHT_HOST_NAME": host, "MESHWRIGHT_HOST_ADDRESS": "127.0.0.1"}
        with open(self.logs / f"{host}.log", "ab") as log:
            run = partial(subprocess.Popen, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
            self.processes[host] = run([*command, *TRAIN_OPTIONS])

    def member(self) -> str:
        """A host with a rank that does not lead."""
        hosts = next(e for e in read_events(self.folder.events(0)) if e["kind"] == "start")["hosts"]
        placed = [name for name in self.processes if name in str(hosts)]
        return next(name for name in placed if "leads the job" not in (self.logs / f"{name}.log").read_text())

    def wait(self, matches: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next event that matches."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            self.pending += self.events.new_events()
            while self.pending:
                event = self.pending.pop(0)
                if event["kind"] == "step":
                    self.last_step = event["step"]
                elif event["kind"] == "snapshot":
                    self.snapshot_step = event["step"]
                if matches(event):
                    return event
            time.sleep(0.005)
        logs = "\n".join(path.read_text()[-1500:] for path in sorted(self.logs.glob("*.log")))
        raise RuntimeError(f"the job stopped at step {self.last_step}:\n{logs}")

    def kill(self, *hosts: str) -> None:
        for host in hosts:
            self.processes[host].kill()
        for host in hosts:
            self.processes.pop(host).wait()

    def end(self) -> None:
        self.kill(*self.processes)
