"""One episode: its random numbers, its folder, the jobs that it runs, and the undisturbed runs it is compared with."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shlex
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from fuzz.configs import Tree, describe, draw_config, write_data
from fuzz.jobs import ROOT, Ended, Job, leftover_processes
from fuzz.oracle import Outcome, check_ended, check_temporary_folder, expect, read_outcome

TIMEOUT = 120.0
"""Seconds after which a job counts as hung."""
CONFIGS = 24
"""Configs per seed that the episodes share, so that undisturbed runs are reused."""


@dataclass(frozen=True)
class Reference:
    """An undisturbed run."""

    folder: Path
    outcome: Outcome
    seconds: float


class Workspace:
    """The folder of one call of the fuzzer: data, undisturbed runs, and a folder per episode."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data, self.references = root / "data", root / "references"
        self.known: dict[str, Reference] = {}
        if not self.data.exists():
            write_data(self.data)
            self.references.mkdir()

    def environment(self, temporary: Path) -> dict[str, str]:
        return {
            "MESHWRIGHT_HOME": str(self.root / "home"),
            "MESHWRIGHT_CACHE": str(self.root / "cache"),
            "TMPDIR": str(temporary),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "MESHWRIGHT_FAULT": "",
        }


@dataclass
class Episode:
    """One episode; everything it draws follows from the seed and its number."""

    seed: int
    number: int
    kind: str
    workspace: Workspace
    verbose: bool = False
    config: str = ""
    """The config in a few words."""
    result: str = ""
    commands: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Faults injected, kills and resumes."""
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed}/{self.number}")
        self.folder = self.workspace.root / f"episode-{self.number}"
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir(parents=True)

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def draw(self) -> Tree:
        """One of the configs that the episodes of this seed share."""
        rng = random.Random(f"{self.seed}/config/{self.rng.randrange(CONFIGS)}")
        return self.use(draw_config(rng, self.workspace.data))

    def use(self, tree: Tree) -> Tree:
        self.config = describe(tree)
        return copy.deepcopy(tree)

    def write_run_file(self, tree: Tree, name: str = "run.toml") -> str:
        path = self.folder / name
        path.write_text(tomli_w.dumps(tree))
        return str(path)

    def train_args(self, tree: Tree, *options: str, folder: Path | None = None) -> list[str]:
        name = f"run-{len(self.commands)}.toml"
        return ["train", self.write_run_file(tree, name), "--run", str(folder or self.run_folder), "--json", *options]

    def start(self, args: list[str], *, fault: str = "", cold: bool = False, bounded: bool = False) -> Job:
        """Starts a job; its output is `output-N` in the folder of the episode."""
        environment = self.workspace.environment(self.temporary) | {"MESHWRIGHT_FAULT": fault}
        prefix = f"MESHWRIGHT_FAULT={shlex.quote(fault)} " if fault else ""
        self.commands.append(f"{prefix}python -m meshwright {shlex.join(args)}")
        if self.verbose:
            print(self.commands[-1], flush=True)
        log = self.folder / f"output-{len(self.commands)}"
        job = Job(args, log, environment, cold=cold, bounded=bounded)
        self.jobs = [other for other in self.jobs if other.is_running()] + [job]
        self.counts["cold" if cold else "warm"] += 1
        return job

    def finish(
        self, job: Job, codes: tuple[int, ...] = (0,), timeout: float = TIMEOUT, *, hostile: bool = False
    ) -> Ended:
        """Waits for a job and checks how it ended and what it left behind."""
        ended = job.wait(timeout)
        if self.verbose:
            print(f"exit {ended.code} after {ended.seconds:.2f} s\n{ended.output[-2000:]}", flush=True)
        check_ended(ended, codes, hostile)
        left = leftover_processes(self.jobs, 10.0)
        expect(not left, "no process after the end of the job", left)
        if ended.code >= 0 and not any(other.is_running() for other in self.jobs):
            check_temporary_folder(self.temporary)
        return ended

    def run(
        self,
        args: list[str],
        codes: tuple[int, ...] = (0,),
        *,
        fault: str = "",
        cold: bool = False,
        hostile: bool = False,
        timeout: float = TIMEOUT,
    ) -> Ended:
        return self.finish(self.start(args, fault=fault, cold=cold, bounded=hostile), codes, timeout, hostile=hostile)

    def outcome(self, ended: Ended) -> Outcome:
        return read_outcome(self.run_folder, ended.output)

    def reference(self, tree: Tree) -> Reference:
        """The undisturbed run of a config, which is kept for later episodes."""
        key = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]
        known = self.workspace.known
        if key not in known:
            folder = self.workspace.references / key
            if not (folder / "output").exists():
                draft = Path(tempfile.mkdtemp(dir=self.folder, prefix="reference-"))
                ended = self.run(self.train_args(tree, folder=draft / "run"))
                (draft / "output").write_text(f"{ended.seconds}\n{ended.output}")
                try:
                    os.rename(draft, folder)
                except OSError:  # another worker was first
                    shutil.rmtree(draft)
            seconds, output = (folder / "output").read_text().split("\n", 1)
            known[key] = Reference(folder / "run", read_outcome(folder / "run", output), float(seconds))
            steps = sorted(known[key].outcome.losses)
            expect(steps == list(range(tree["steps"])), f"a record of each of {tree['steps']} steps", steps)
        return known[key]

    def sample_ids(self, folder: Path, step: int) -> list[int]:
        """The sample ids of a step, as `meshwright data show` lists them."""
        ended = self.run(["data", "show", str(folder), "--step", str(step), "--json"])
        ids = json.loads(ended.output)["samples"]
        assert isinstance(ids, list)
        return ids

    def close(self) -> None:
        """Ends the jobs that still run."""
        for job in self.jobs:
            if job.is_running():
                job.signal(9)
                job.wait(5.0)
        leftover_processes([], 0.0)
