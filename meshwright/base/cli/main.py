"""Dispatches the command line to the verb that it names."""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import os
import sys
from collections.abc import Iterable, Sequence

from meshwright_practice.cli.cards import practice_cards
from meshwright_practice.cli.incident import practice_incident
from meshwright_practice.cli.interview import practice_interview
from meshwright_practice.cli.lab import practice_lab
from meshwright_practice.cli.overview import practice

from meshwright.base.cli.args import Verb, parse
from meshwright.base.io import printable
from meshwright.core.cli.checkpoint import (
    checkpoint_diff,
    checkpoint_digest,
    checkpoint_export,
    checkpoint_import,
    checkpoint_list,
    checkpoint_verify,
)
from meshwright.core.cli.data import data_find, data_prepare, data_show
from meshwright.core.cli.evaluate import evaluate
from meshwright.core.cli.sample import sample
from meshwright.core.cli.train import train
from meshwright.errors import ConfigError, MeshwrightError, limit_error
from meshwright.insight.cli.diagnose import diagnose
from meshwright.insight.cli.metrics import metrics_alerts, metrics_dashboard, metrics_serve
from meshwright.insight.cli.report import report
from meshwright.insight.cli.trace import trace
from meshwright.insight.cli.watch import watch
from meshwright.ops.cli.launch import launch_kubernetes, launch_ray, launch_slurm
from meshwright.ops.cli.preflight import preflight
from meshwright.planner.cli import plan, plan_measure, plan_schedule
from meshwright.prover.cli.bisect import bisect
from meshwright.prover.cli.prove import prove
from meshwright.prover.cli.replay import replay
from meshwright.prover.cli.simulate import simulate

VERBS: dict[str, Verb] = {
    "train": train,
    "plan": plan,
    "plan schedule": plan_schedule,
    "plan measure": plan_measure,
    "simulate": simulate,
    "preflight": preflight,
    "prove": prove,
    "launch slurm": launch_slurm,
    "launch kubernetes": launch_kubernetes,
    "launch ray": launch_ray,
    "watch": watch,
    "report": report,
    "diagnose": diagnose,
    "trace": trace,
    "replay": replay,
    "bisect": bisect,
    "metrics serve": metrics_serve,
    "metrics dashboard": metrics_dashboard,
    "metrics alerts": metrics_alerts,
    "practice interview": practice_interview,
    "sample": sample,
    "evaluate": evaluate,
    "data prepare": data_prepare,
    "data show": data_show,
    "data find": data_find,
    "checkpoint list": checkpoint_list,
    "checkpoint verify": checkpoint_verify,
    "checkpoint digest": checkpoint_digest,
    "checkpoint diff": checkpoint_diff,
    "checkpoint export": checkpoint_export,
    "checkpoint import": checkpoint_import,
    "practice cards": practice_cards,
    "practice incident": practice_incident,
    "practice lab": practice_lab,
    "practice": practice,
}
"""Verb -> its function. The docstring of a function is "Verb: summary"."""

EXIT_CODES = """\
Exit codes: 0 done or already complete, 1 unexpected error, 2 invalid config, 3 identity mismatch,
4 no intact checkpoint, 5 restarts exhausted, 6 data error, 7 non-finite loss or gradient, 8 peer lost or hung,
9 run folder in use by another job, 130 and 143 stopped by SIGINT and SIGTERM, after a checkpoint."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a verb. A user's mistake is reported in one line on standard error, with the exit code of its kind."""
    open_missing_streams()
    replace_unencodable_text()
    ignore_invalid_terminal_size()
    try:
        dispatch(list(sys.argv[1:] if argv is None else argv))
    except MeshwrightError as error:
        from meshwright.base.records.failures import RanksFailed

        # The tracebacks of ranks are in their logs.
        text = error.describe(with_traceback=False) if isinstance(error, RanksFailed) else str(error)
        print(printable(f"meshwright: {' '.join(text.splitlines())}"), file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as error:  # a full disk, a closed pipe
        reached = limit_error(error)
        with contextlib.suppress(OSError):
            where = error.filename or ("standard output" if error.errno == errno.EPIPE else "the run folder")
            print(f"meshwright: {reached or f'{error.strerror}: {where}'}", file=sys.stderr)
        # Standard output may be a broken pipe: the interpreter would fail again when it flushes the stream at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(1 if reached is None else reached.exit_code) from None


def dispatch(args: list[str]) -> None:
    """Calls the function of the verb that `args` start with."""
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return
    if args[0] == "--version":
        from meshwright.version import __version__

        print(f"meshwright {__version__}")
        return
    matches = (verb for verb in VERBS if args[: len(verb.split())] == verb.split())
    name = max(matches, key=len, default=None)  # `plan schedule` takes precedence over `plan`
    if name is None:
        group = [verb for verb in VERBS if verb.startswith(f"{args[0]} ")]
        if group and args[1:2] in (["-h"], ["--help"]):
            print("\n".join(summaries(group)))
            return
        close = difflib.get_close_matches(args[0], [verb.split()[0] for verb in VERBS], n=1)
        suggestion = f"did you mean {close[0]}? " if close and not group else ""
        raise ConfigError(
            f"unknown verb {' '.join(args[:2])!r}", f"{suggestion}expected one of {', '.join(group or VERBS)}"
        )
    verb = VERBS[name]
    verb(**parse(verb, name, args[len(name.split()) :]))


def summaries(names: Iterable[str]) -> list[str]:
    """Returns one line per verb, with the summary from its docstring."""
    return [f"  {name:<18} {(VERBS[name].__doc__ or '').partition(': ')[2].splitlines()[0]}" for name in names]


def usage() -> str:
    return "\n".join(
        [
            "Distributed training on PyTorch that plans itself, recovers exactly, explains itself and proves it.",
            "",
            "Usage: meshwright VERB [ARGUMENTS]",
            "",
            *summaries(VERBS),
            "",
            "meshwright VERB --help describes the arguments of a verb.",
            EXIT_CODES,
        ]
    )


def open_missing_streams() -> None:
    """Opens /dev/null for standard streams that the parent process closed, so that no other file gets their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def replace_unencodable_text() -> None:
    """Prints "?" for letters that the encoding of standard output does not have, where Python raises an error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def ignore_invalid_terminal_size() -> None:
    """Removes COLUMNS and LINES from the environment unless they are positive: rich fails on a width of zero."""
    for variable in ("COLUMNS", "LINES"):
        value = os.environ.get(variable, "1")
        if not value.isascii() or not value.isdigit() or int(value) == 0:
            del os.environ[variable]
