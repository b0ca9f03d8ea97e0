"""Runs random episodes against the whole product, and prints every finding with the commands that show it.

Everything in an episode follows from the seed and its number, except for the moments at which signals arrive. The exit
code is 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import cast

from fuzz.episode import Workspace
from fuzz.jobs import adopt_orphans, import_once
from fuzz.kinds import KINDS, Result, draw_kind, run_episode
from meshwright.base.parent_death import exit_with_parent


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="seed of all episodes (default: random)")
    parser.add_argument("--episodes", type=int, default=1_000_000, help="number of episodes (default: no limit)")
    parser.add_argument("--minutes", type=float, default=20.0, help="no episode starts after this time (default: 20)")
    parser.add_argument("--only", choices=KINDS, help="run episodes of one kind")
    parser.add_argument("--replay", metavar="SEED:EPISODE", help="run one episode again and print what it does")
    parser.add_argument("--workers", type=int, default=2, help="episodes that run at the same time (default: 2)")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 32)
    workspace = Workspace(Path(tempfile.mkdtemp(prefix="meshwright-fuzz-")))
    import_once()
    if args.replay:
        seed, number = map(int, args.replay.split(":"))
        adopt_orphans()
        results: Iterator[Result] = iter([run_episode(seed, number, workspace, args.only, verbose=True)])
    else:
        print(f"seed {seed}, folder {workspace.root}", flush=True)
        deadline = time.monotonic() + 60 * args.minutes
        results = run_workers(seed, workspace, args.workers, args.episodes, deadline, args.only)
    findings = report(results, seed, args.only)
    if not findings:
        shutil.rmtree(workspace.root, ignore_errors=True)
    return int(findings > 0)


def report(results: Iterator[Result], seed: int, only: str | None) -> int:
    """Prints a line per episode, every finding and a summary; returns the number of findings."""
    kinds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    findings: list[Result] = []
    began = time.monotonic()
    try:
        for result in results:
            print(result.line(), flush=True)
            kinds[result.kind] += 1
            counts.update(result.counts)
            if result.is_finding:
                findings.append(result)
                print(result.reproduction(seed, only), flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    by_kind = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    print(f"seed {seed}: {kinds.total()} episodes in {time.monotonic() - began:.0f} s ({by_kind})")
    print(f"{counts['warm']} forked and {counts['cold']} cold jobs, ", end="")
    print(f"{counts['faults']} faults, {counts['kills']} kills, {counts['resumes']} resumes, {len(findings)} findings")
    for finding in findings:
        print(f"  episode {finding.number} ({finding.kind}): expected {finding.expected}")
    return len(findings)


def run_workers(
    seed: int, workspace: Workspace, workers: int, episodes: int, deadline: float, only: str | None
) -> Iterator[Result]:
    """Runs episodes in processes, each of which takes every `workers`-th episode, and yields the results. A worker that
    fails is a finding in the episode that it did not finish.
    """
    parent = os.getpid()
    running: dict[Connection, tuple[int, int]] = {}  # pipe -> process id, number of the episode that runs
    for worker in range(workers):
        reader, writer = Pipe(duplex=False)
        process = os.fork()
        if process == 0:
            try:
                exit_with_parent(parent)
                adopt_orphans()
                for number in range(worker, episodes, workers):
                    if time.monotonic() > deadline:
                        break
                    writer.send(run_episode(seed, number, workspace, only))
                os._exit(0)
            except BaseException:  # noqa: BLE001  a worker must not return into the code of its parent
                traceback.print_exc()
            finally:
                os._exit(1)
        writer.close()
        running[reader] = process, worker
    while running:
        for pipe in cast(list[Connection], wait(list(running))):
            process, number = running[pipe]
            try:
                yield pipe.recv()
                running[pipe] = process, number + workers
            except EOFError:
                del running[pipe]
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                if code:
                    yield failed_worker(number, only or draw_kind(seed, number), code)


def failed_worker(number: int, kind: str, code: int) -> Result:
    found = f"exit code {code}" if code > 0 else f"signal {-code}"
    return Result(number, kind, "", "", 0.0, {}, expected="a worker that ends with exit code 0", found=found)


if __name__ == "__main__":
    raise SystemExit(main())
