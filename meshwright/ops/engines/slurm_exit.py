"""What a batch script of SLURM does when its supervisors have ended: ends the job, or returns it to the queue.

`python -P -m meshwright.ops.engines.slurm_exit newest RUN` prints the newest attempt of a run, before the supervisors
start; `... decide RUN --code N --after ATTEMPT --record FILE` is the end of the script. Torch-free.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.base.io import parse_json, printable, read_regular_file
from meshwright.base.records.failures import FINAL_EXIT_CODES
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import MeshwrightError
from meshwright.ops.engines.blamed_hosts import blamed_hosts, newest_incidents
from meshwright.ops.engines.exit_codes import MEANINGS, Action, action_of

MAX_RECORD_BYTES = 4 << 20
RunCommand = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Decision:
    """One line of exits.jsonl: how a start of the job ended, and what follows."""

    job: str
    start: int
    """How often SLURM had started the job before."""
    code: int
    action: Action
    checkpoint_step: int
    reason: str


def exit_code_of_run(code: int, incidents: Sequence[Mapping[str, Any]]) -> int:
    """The exit code of the run. srun gives the largest one of all tasks, among them those of nodes that were lost; the
    incident of the last attempt of this start says how the run itself ended.
    """
    last = incidents[-1] if incidents else {}
    if last.get("outcome") == "complete":
        return 0
    recorded = last.get("gave_up") or last.get("exit_code")
    if not isinstance(recorded, int) or not recorded:
        return code
    final = last.get("outcome") == "stopped" or bool(last.get("gave_up")) or recorded in FINAL_EXIT_CODES
    return recorded if final else code


def decide(
    code: int, step: int, earlier: Sequence[Mapping[str, Any]], job: str, start: int, max_requeues: int
) -> Decision:
    """Decides what follows. `earlier` are the decisions of earlier starts, `step` is that of the newest checkpoint."""
    meaning = MEANINGS.get(code, f"ended by signal {code - 128}" if 128 < code < 160 else "unknown")
    action = action_of(code)
    if action == "retry":
        retries = 0
        for decision in reversed([entry for entry in earlier if entry.get("job") == job]):
            if decision.get("action") == "retry" and decision.get("checkpoint_step", -1) >= step:
                retries += 1
            elif decision.get("action") != "requeue":
                break
        if retries >= max_requeues:
            reason = f"exit code {code} ({meaning}) after {retries} requeue(s) without a new checkpoint"
            return Decision(job, start, code, "fail", step, reason)
    return Decision(job, start, code, action, step, f"exit code {code} ({meaning})")


def read_decisions(path: Path) -> list[dict[str, Any]]:
    """The decisions of earlier starts; a torn line is left out."""
    if not path.exists():
        return []
    decisions = []
    content = read_regular_file(path, MAX_RECORD_BYTES, str(path), "the record of a job", follow=False)
    for line in content.splitlines():
        with suppress(MeshwrightError):
            value = parse_json(line, str(path), "one decision per line")
            if isinstance(value, dict) and isinstance(value.get("checkpoint_step", -1), int):
                decisions.append(value)
    return decisions


def requeue(job: str, exclude: Sequence[str], nodes_needed: int, run: RunCommand) -> str:
    """Returns the job to the queue, without the nodes in `exclude`; returns what was done.

    A job that SLURM itself ends (scancel, a preemption without a grace time, a lost node) is not touched: a cancelled
    job would come back, and SLURM requeues the others by itself.
    """
    state = field_of(run(["scontrol", "--oneliner", "show", "job", job]), "JobState")
    if state != "RUNNING":
        return f"SLURM ends the job itself ({state})"
    run(["scontrol", "requeue", job])
    if not exclude:
        return "the job is in the queue again"
    nodes = set(run(["sinfo", "--noheader", "--Node", "--format=%N", "--states=idle,alloc,mix,comp"]).split())
    names = ",".join(exclude)
    if len(nodes - set(exclude)) < nodes_needed:
        return f"the job is in the queue again; too few other nodes to exclude {names}: try to drain and repair it"
    run(["scontrol", "update", f"JobId={job}", f"ExcNodeList={names}"])
    return f"the job is in the queue again, without {names}"


def field_of(text: str, name: str) -> str:
    """A field of the output of `scontrol --oneliner show`."""
    found = re.search(rf"(?:^|\s){name}=(\S*)", text)
    return found[1] if found else ""


def run_command(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def end_of_start(
    args: argparse.Namespace, environment: Mapping[str, str] = os.environ, run: RunCommand = run_command
) -> int:
    """Records the decision, acts on it, and returns the exit code of the batch script."""
    folder = RunFolder(args.run)
    incidents = newest_incidents(folder, args.after)
    step = max((s for s in (entry.get("checkpoint_step") for entry in incidents) if isinstance(s, int)), default=-1)
    job, start = environment["SLURM_JOB_ID"], int(environment.get("SLURM_RESTART_COUNT", "0"))
    code = exit_code_of_run(args.code, incidents)
    decision = decide(code, step, read_decisions(args.record), job, start, args.requeues)
    with args.record.open("a") as record:
        record.write(json.dumps(asdict(decision)) + "\n")
    followed = ""
    if decision.action in ("requeue", "retry"):
        nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
        try:
            followed = requeue(job, blamed_hosts(folder, args.blame_limit), nodes, run)
        except (OSError, subprocess.SubprocessError) as error:
            stderr = getattr(error, "stderr", None) or str(error)
            followed = f"the job cannot return to the queue: {' '.join(str(stderr).split())[:300]}"
    print(printable(f"meshwright: {decision.reason}; {followed or decision.action}"), file=sys.stderr, flush=True)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="slurm_exit", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    newest = verbs.add_parser("newest")
    newest.add_argument("run", type=Path)
    end = verbs.add_parser("decide")
    end.add_argument("run", type=Path)
    end.add_argument("--code", type=int, required=True)
    end.add_argument("--after", type=int, required=True)
    end.add_argument("--record", type=Path, required=True)
    end.add_argument("--requeues", type=int, default=3)
    end.add_argument("--blame-limit", type=int, default=2)
    args = parser.parse_args(argv)
    if args.verb == "newest":
        print(RunFolder(args.run).last_attempt())
        return 0
    return end_of_start(args)


if __name__ == "__main__":
    raise SystemExit(main())
