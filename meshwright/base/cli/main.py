"""Dispatches the command line to the verb that it names."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence

from meshwright.base.cli.args import parse
from meshwright.base.cli.verbs import find_verb, load_verb, summaries, summaries_by_package, verbs
from meshwright.base.io import printable
from meshwright.errors import MeshwrightError, limit_error

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
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", "safetensors"):
            raise
        print(f"meshwright: this command needs {missing}; try pip install 'meshwright[train]'", file=sys.stderr)
        raise SystemExit(2) from None
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
    group = [verb for verb in verbs() if verb.startswith(f"{args[0]} ")]
    if group and args[0] not in verbs() and args[1:2] in (["-h"], ["--help"]):
        print("\n".join(summaries(group)))
        return
    name = find_verb(args)
    verb = load_verb(name)
    verb(**parse(verb, name, args[len(name.split()) :]))


def usage() -> str:
    return "\n".join(
        [
            "Distributed training on PyTorch that plans itself, recovers exactly, explains itself and proves it.",
            "",
            "Usage: meshwright VERB [ARGUMENTS]",
            *summaries_by_package(),
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
