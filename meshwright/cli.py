"""The verbs, and the wiring of rooms; nothing else. Imports lazily: no verb imports what it does not use."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import FlagConversionOff, FlagCreatePairsOff, Positional, arg

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.plan_verbs import plan, plan_measure, plan_schedule, settings
from meshwright.report_verb import report
from meshwright.words import Json, flag, tell, word

OVERRIDE = re.compile(
    r"^--(?P<key>[a-z][a-z0-9_-]*(\.[a-z0-9_-]+)+|preset|seed|(log|ledger)[_-]every)(?P<value>=.*)?$", re.DOTALL
)
"""`--a.b=c`, and the few keys at the top of the tree: words for the config, not for the verb."""


RunFile = Annotated[Path | None, Positional, word("[RUN.toml]", "settings of the run")]
# torchrun takes --run for one of its own options: there, say --run-dir.
RunDir = Annotated[Path | None, word("DIR", "run folder (default: runs/PRESET)", "--run-dir")]
Run = Annotated[Path, Positional, word("RUN", "a run folder, or a run file")]
Ranks = Annotated[str | None, word("N", "ranks on this host (decides layout.replicate)")]
Steps = Annotated[str | None, word("N", "optimizer steps of the whole run")]
AtStep = Annotated[int | None, word("N", "the checkpoint of this many steps (default: the newest)")]


def train(
    file: RunFile = None,
    run: RunDir = None,
    ranks: Ranks = None,
    steps: Steps = None,
    restarts: Annotated[str | None, word("N", "restarts without getting further (launch.restarts)")] = None,
    fresh: Annotated[bool, flag("set what the run folder holds aside and begin anew")] = False,
    fork: Annotated[bool, flag("go on from the newest checkpoint with other settings, as a new timeline")] = False,
    no_fallback: Annotated[bool, flag("end with exit 4 if the newest checkpoint is damaged")] = False,
    plan: Annotated[str | None, word("PLAN", "best, or PLAN.toml: spread as the planner says; words win")] = None,
    cluster: Annotated[str | None, word("CLUSTER", "the machine of the plan (default: here, as measured)")] = None,
    json: Json = False,
    *,
    overrides: tuple[str, ...] = (),
) -> None:
    """Train: the main job. Settings come from the preset, then the run file, then --KEY=VALUE words."""
    from meshwright import api, faults
    from meshwright.launch.environment import started_by_torchrun
    from meshwright.observe.terminal import JsonLines
    from meshwright.topology.unsupported import validate

    if restarts is not None:
        overrides = (*overrides, f"--launch.restarts={restarts}")
    config = settings(plan, cluster, file, overrides, ranks, steps, json)
    validate(config)
    faults.parse_faults(os.environ.get("MESHWRIGHT_FAULT", ""))  # a misspelt fault is refused here, in one line
    screen = JsonLines if json else None
    if started_by_torchrun():
        api.train(config, run=run, fresh=fresh, fork=fork, fallback=not no_fallback, cluster=cluster, screen=screen)
    else:
        api.train_from_cold(config, run, screen, fresh=fresh, fork=fork, fallback=not no_fallback, cluster=cluster)


def prove(
    file: RunFile = None,
    out: Annotated[Path, arg(metavar="FILE", help="where the certificate goes")] = Path("certificate.json"),
    ranks: Ranks = None,
    json: Json = False,
    *,
    overrides: tuple[str, ...] = (),
) -> None:
    """Prove: check the contracts of a config on this machine, and write a certificate."""
    from meshwright.config import load_config
    from meshwright.prover.prove import prove as prove_config
    from meshwright.topology.unsupported import validate

    config = load_config(file, overrides, ranks)
    validate(config)
    if not prove_config(config, out, as_json=json):
        raise SystemExit(1)


def simulate(
    file: RunFile = None,
    ranks: Annotated[str | None, word("N", "ranks in all (decides layout.replicate)")] = None,
    rank: Annotated[tuple[int, ...], word("R", "ranks to look at (default: the first, and a pipeline's last)")] = (),
    json: Json = False,
    *,
    overrides: tuple[str, ...] = (),
) -> None:
    """Simulate: what a step would send and hold on any number of ranks, without one of them."""
    from meshwright import api
    from meshwright.config import load_config
    from meshwright.observe.simulation_text import show
    from meshwright.topology.unsupported import validate

    config = load_config(file, overrides, ranks)
    validate(config)  # before torch is imported
    found = api.simulate(config, rank=rank)
    tell(True, found.to_json(), "") if json else show(found)


def data_show(
    run: Run,
    step: Annotated[int, word("K", "the step, past or future; the first is 0")],
    rank: Annotated[int | None, word("R", "this rank's samples alone")] = None,
    json: Json = False,
) -> None:
    """Data show: the samples of a step, in global order, from the contract alone."""
    from meshwright.data.sample_lookup import open_sample_lookup

    answer = open_sample_lookup(run).show(step, rank)
    tell(
        json,
        answer,
        f"step {step}" + (f" rank {rank}" if rank is not None else "") + ": " + " ".join(map(str, answer["samples"])),
    )


def data_find(
    run: Run,
    sample: Annotated[int, word("ID", "the sample's id")],
    epochs: Annotated[int, arg(metavar="N", help="how many epochs to look into")] = 3,
    json: Json = False,
) -> None:
    """Data find: the steps that meet a sample, epoch after epoch."""
    from meshwright.data.sample_lookup import open_sample_lookup

    answer = open_sample_lookup(run).find(sample, epochs)
    lines = [f"sample {sample} is index {answer['source_index']} of {answer['source']}"]
    lines += ["held out: training never meets it"] if answer["held_out"] else []
    lines += [
        "epoch {epoch}: step {step}, rank {rank}, micro-step {micro_step} (position {position})".format(**place)
        for place in answer["occurrences"]
    ]
    tell(json, answer, "\n".join(lines))


def checkpoint_list(run: Run, json: Json = False) -> None:
    """Checkpoint list: every checkpoint of a run, newest first, and what became of those that are none."""
    from meshwright.checkpoint.inspect import list_rows

    rows = list_rows(run)
    lines = [
        f"{row['name']}  timeline {row['timeline']}  {row['bytes']:,} bytes in {row['files']} files  "
        + (" x ".join(f"{axis} {degree}" for axis, degree in row["layout"].items() if degree > 1) or "one rank")
        + f"  {row['status']}"
        if "bytes" in row
        else f"{row['name']}  {row['status']}"
        for row in rows
    ]
    tell(json, {"checkpoints": rows}, "\n".join(lines) or f"{run} has no checkpoint")


def checkpoint_verify(run: Run, step: AtStep = None, json: Json = False) -> None:
    """Checkpoint verify: every byte of every published checkpoint against its digest; exit 4 if one is damaged."""
    from meshwright.checkpoint.inspect import verify_rows
    from meshwright.checkpoint.verify import Damage

    rows = verify_rows(run, step)
    lines = [f"{row['name']}  intact" for row in rows if not row["damages"]]
    lines += [f"{row['name']}  DAMAGED  {Damage(**damage)}" for row in rows for damage in row["damages"]]
    tell(json, {"checkpoints": rows}, "\n".join(lines))
    if any(row["damages"] for row in rows):
        raise SystemExit(4)


def checkpoint_digest(run: Run, step: AtStep = None, json: Json = False) -> None:
    """Checkpoint digest: one digest of all tensors unsharded, by name; the same whatever layout wrote them."""
    from meshwright.checkpoint.inspect import digest

    answer = digest(run, step)
    tell(json, answer, answer["digest"])


def checkpoint_diff(
    run: Run,
    other: Annotated[Path, Positional, word("OTHER", "another run folder, or a checkpoint's folder")],
    step: AtStep = None,
    other_step: Annotated[int | None, word("N", "the other's step (default: the same)")] = None,
    json: Json = False,
) -> None:
    """Checkpoint diff: the tensors in which two checkpoints differ, and by how much; exit 1 if they do."""
    from meshwright.checkpoint.inspect import diff

    answer = diff(run, other, step, other_step)
    lines = [difference["text"] for difference in answer["differences"]]
    tell(json, answer, "\n".join(lines) or f"{answer['one']} and {answer['other']} hold the same tensors")
    if answer["differences"]:
        raise SystemExit(1)


VERBS: dict[str, Callable[..., None]] = {
    "train": train,
    "report": report,
    "prove": prove,
    "plan": plan,
    "plan schedule": plan_schedule,
    "plan measure": plan_measure,
    "simulate": simulate,
    "data show": data_show,
    "data find": data_find,
    "checkpoint list": checkpoint_list,
    "checkpoint verify": checkpoint_verify,
    "checkpoint digest": checkpoint_digest,
    "checkpoint diff": checkpoint_diff,
}


def main(argv: list[str] | None = None) -> None:
    """Runs a verb; a mistake of the user's is one line on standard error and its own exit code."""
    words = sys.argv[1:] if argv is None else argv
    open_missing()
    try:
        run_verb(words)
    except MeshwrightError as error:
        print(f"meshwright: {' '.join(str(error).splitlines())}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as error:  # a full disk, a closed pipe: what and where, in one line
        with contextlib.suppress(OSError):
            where = error.filename or ("standard output" if error.errno == errno.EPIPE else "the run folder")
            print(f"meshwright: {error.strerror}: {where}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter would fail once more when it flushes
        raise SystemExit(1) from None


def open_missing() -> None:
    """A standard stream that was closed by whoever started us is opened to nowhere: another file must not take its
    place.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def run_verb(words: list[str]) -> None:
    import tyro

    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return
    if words[0] == "--version":
        from meshwright.version import __version__

        print(f"meshwright {__version__}")
        return
    named = (verb for verb in VERBS if words[: len(verb.split())] == verb.split())
    name = max(named, key=len, default=None)  # `plan schedule` before `plan` of a model called schedule
    if name is None:
        raise ConfigError(f"unknown verb {' '.join(words[:2])!r}", f"allowed: {', '.join(VERBS)}")
    rest = words[len(name.split()) :]
    verb = VERBS[name]
    given = {}
    if "overrides" in verb.__annotations__:
        rest, overrides = parted(rest)
        given = {"overrides": overrides}
    words_only = without_overrides(verb)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            parsed = tyro.cli(words_only, prog=f"meshwright {name}", args=rest, config=(FlagCreatePairsOff,))
    except SystemExit as done:
        if done.code:
            raise ConfigError(one_line(said.getvalue()), f"see meshwright {name} --help") from None
        print(said.getvalue(), end="")
        if given:
            print(keys_help())
        return
    verb(**parsed, **given)


def without_overrides(verb: Callable[..., None]) -> Callable[..., dict[str, Any]]:
    """The verb's own words, as a function that only hands them back."""
    import functools
    import inspect

    signature = inspect.signature(verb)

    @functools.wraps(verb)
    def parsed(**words: Any) -> dict[str, Any]:
        return words

    kept = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name != "overrides"]
    parsed.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return parsed


def parted(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """(words of the verb, `--a.b=c` words for the config); a value may also stand in the word after its key."""
    kept: list[str] = []
    overrides: list[str] = []
    coming = iter(words)
    for given in coming:
        match = OVERRIDE.match(given)
        if match and not match["value"] and (value := next(coming, None)) is not None:
            given = f"{given}={value}"
        (overrides if match else kept).append(underscored(given) if match else given)
    return kept, tuple(overrides)


def underscored(word: str) -> str:
    key, equals, value = word.partition("=")
    return "--" + key.removeprefix("--").replace("-", "_") + equals + value


def one_line(box: str) -> str:
    """The first sentences of tyro's framed message."""
    lines = [line.strip("│╭╰╮╯─ ").strip() for line in box.splitlines()]
    told = [line for line in lines if not set(line) <= set("─- ")]
    return (
        " ".join(line for line in told[1:4] if not line.startswith(("For full", "Argument helptext")))
        or "the words were not understood"
    )


def usage() -> str:
    lines = [f"  meshwright {name:<17} {(verb.__doc__ or '').split(': ', 1)[1]}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "Distributed training on PyTorch that plans itself, recovers exactly, explains itself and proves it.",
            "",
            *lines,
            "",
            "`meshwright VERB --help` lists a verb's words.",
            "Exit codes: 0 done, 1 unexpected, 2 config refused, 3 identity mismatch, 4 no intact checkpoint,",
            "5 restarts exhausted, 6 data contract broken, 7 not finite, 8 peer lost, 9 run folder held,",
            "130/143 stopped by a signal, after a checkpoint.",
        ]
    )


def keys_help() -> str:
    """Every key of the run file with its type and default."""
    import tyro

    from meshwright.config import RunConfig

    said = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(said):
        tyro.cli(RunConfig, prog="", args=["--help"], use_underscores=True, config=(FlagConversionOff,))
    return "Keys of the run file, each also --KEY=VALUE here:\n" + said.getvalue().partition("\n\n")[2].replace(
        "global_ ", "global "
    )
