"""Runs schedules of faults: `python -m tests.simulated_hosts --seeds 10000`, or one with `--seed N --trace`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulated_hosts.schedule import ScheduleResult, run_schedule


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated_hosts", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="number of schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this seed alone")
    parser.add_argument("--trace", action="store_true", help="print what happens, in virtual time")
    args = parser.parse_args()
    if args.seed is not None:
        result = run_schedule(args.seed, args.trace)
        print_schedule(result)
        return 1 if result.violations else 0
    return run_many(range(args.first, args.first + args.seeds))


def run_many(seeds: range) -> int:
    started, counts, codes, violated = time.process_time(), Counter[str](), Counter[str](), []
    attempts = 0
    for seed in seeds:
        result = run_schedule(seed)
        counts.update(fault.partition(" at ")[0] for fault in result.faults)
        codes[",".join(map(str, sorted(result.exit_codes)))] += 1
        attempts += result.attempts
        if result.violations:
            violated.append(result)
    seconds = time.process_time() - started
    print(f"{len(seeds)} schedules, {attempts} attempts, {60 * len(seeds) / seconds:,.0f} schedules per minute of CPU")
    print(f"faults: {', '.join(f'{name} {count}' for name, count in sorted(counts.items()))}")
    print(f"exit codes: {', '.join(f'{code or None} in {count}' for code, count in sorted(codes.items()))}")
    by_invariant = Counter(result.violations[0].invariant for result in violated)
    print(f"violations: {dict(by_invariant) or 'none'}")
    if violated:
        print_schedule(violated[0])
    return 1 if violated else 0


def print_schedule(result: ScheduleResult) -> None:
    print("\n".join(result.trace))
    print(f"seed {result.seed}: {result.scenario}")
    print(f"faults: {'; '.join(result.faults) or 'none'}")
    ended = f"exit codes {sorted(result.exit_codes)}, {result.attempts} attempts"
    print(f"{ended}, {result.seconds:.1f} s of virtual time, {result.events} events, {result.messages} messages")
    for violation in result.violations[:5]:
        print(f"VIOLATION {violation}")


if __name__ == "__main__":
    sys.exit(main())
