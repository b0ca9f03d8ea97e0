"""The verbs as functions: train, plan, simulate and prove, for scripts, torchrun and notebooks."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.config import RunConfig, config_from_dict, config_to_dict
from meshwright.errors import ConfigError, MeshwrightError, with_python_hint
from meshwright.io import write_json
from meshwright.launch.fork_server import ForkServer
from meshwright.launch.user_code.user_code import UserCode
from meshwright.observe.event_viewer import EventViewer, SilentDisplay
from meshwright.observe.terminal import EventDisplay, Terminal
from meshwright.recover.failures import RanksFailed
from meshwright.recover.supervisor import RunningRanks, supervise
from meshwright.telemetry.events import EventFollower
from meshwright.telemetry.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import nn

    from meshwright.parallel.parallel_spec import ParallelSpec
    from meshwright.planner.search.plan_result import PlanResult
    from meshwright.simulator.result import Simulation

DisplayFactory = Callable[[int], EventDisplay]
"""Attempt number -> the display of that attempt's events."""


@dataclass(frozen=True)
class TrainResult:
    """What `meshwright.train` returns when a run is complete."""

    folder: Path
    """run folder"""
    steps: int
    """optimizer steps of the whole run"""
    loss: float | None
    """training loss of the last step; None if this call had no step to do"""
    skipped: int
    """steps whose update was skipped because the loss or a gradient was not finite"""
    parameters_digest: str
    """digest of the trained parameters; equal digests mean bitwise equal parameters"""
    evaluations: list[tuple[int, float]]
    """(step, held-out loss) of the evaluations of this call"""


def train(
    config: RunConfig | None = None,
    *,
    model: nn.Module | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    source: Any = None,
    parallel_spec: ParallelSpec | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    reduction: Literal["sum", "mean"] | None = None,
    run: str | Path | None = None,
    fresh: bool = False,
    fork: bool = False,
    fallback: bool = True,
    cluster: str | None = None,
    display: DisplayFactory | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Trains a model on the ranks of ``config.layout`` and returns when the run is complete.

    If the run folder has a checkpoint, training resumes from the newest intact one. The ranks are forked from this
    process, so a notebook cell works and no ``__main__`` guard is needed. Under torchrun, this process is one of the
    ranks, and torchrun supervises them.

    Args:
        config: settings of the run. Default: the ``tiny`` preset.
        model: module to train instead of the built-in decoder. When the call returns, ``model`` has the trained
            parameters.
        loss: ``loss(model(*inputs), target)``, or ``loss(outputs, batch)`` where samples are dicts or dataclasses,
            returns the *sum* of the losses of all targets, as a scalar tensor, because the sum is divided once by the
            number of targets in the global batch. Integer targets of -100 are ignored and must not contribute. It may
            return a dict of sums, each of which is recorded, and ``(sum, count)`` to have the count verified. Default:
            the model computes its loss itself and returns it as ``.loss``, as models of transformers do.
        source: dataset to train on instead of ``config.data``: any object with ``__len__`` and ``__getitem__``. A
            sample is a tuple of arrays, the last of which is the target, or a dict or dataclass of arrays. ``model``
            gets the entries of a dict or dataclass that its forward accepts by keyword, except the targets: the entries
            named ``labels``, ``label``, ``targets`` or ``target``.
        collate: makes a batch of a list of samples, for example padded to the longest one. Default: samples have one
            shape and are stacked.
        metrics: name -> function of what ``loss`` gets that returns ``(sum, count)``, or a tensor with a value per
            sample. Sums and counts are added up over ranks and micro-batches, and recorded with every step.
        reduction: ``"mean"`` if ``loss`` returns the mean over the valid targets of its batch. Default: ``"sum"``.
        parallel_spec: names the blocks of ``model`` and how to parallelize them. Fields that are not given are inferred
            from ``model``; tensor parallelism needs a ``tp_plan`` unless ``model`` is one of transformers.
        run: run folder. Default: ``runs/PRESET``.
        fresh: if True, starts from step 0. An existing run folder is renamed, not deleted.
        fork: if True, continues from the newest checkpoint although settings that change the numbers differ, and
            records a new timeline.
        fallback: if False, a damaged newest checkpoint raises :class:`~meshwright.errors.CheckpointError` instead of
            falling back to an older one.
        cluster: cluster that step-time predictions assume, such as ``"h100:8"``. Default: this machine, if it has been
            measured.
        display: called with the number of each attempt; returns an object with ``show(event)`` and ``close()``.
            Default: progress on the terminal.
        quiet: if True, nothing is displayed.

    Returns:
        TrainResult: number of steps, last loss, evaluations, and the digest of the parameters.

    Raises:
        ConfigError: a setting or an argument is not valid.
        IdentityError: the run folder belongs to a run with other settings.
        CheckpointError: no intact checkpoint to resume from, or a checkpoint cannot be written.
        DataError: a data source cannot provide a sample.
        NumericsError: the loss or a gradient is not finite.
        RestartsExhausted: the run failed again after ``launch.restarts`` restarts without progress.
        MeshwrightError: base class of all of these; also raised for an exception in ``model`` or ``loss`` on a rank.
            ``error.rank`` and ``error.step`` tell where a rank failed.
        KeyboardInterrupt: Ctrl-C; the ranks have saved a checkpoint first.

    Example::

        >>> from meshwright import RunConfig, train
        >>> result = train(RunConfig(steps=100), run="runs/first")
        >>> result.loss
    """
    with errors_for_python():
        return _train(
            config,
            run,
            (lambda _attempt: SilentDisplay()) if quiet else display,
            UserCode(model, loss, source, parallel_spec, collate, metrics, reduction),
            fresh=fresh,
            fork=fork,
            fallback=fallback,
            cluster=cluster,
        )


def plan(
    model: str | Path | RunConfig,
    cluster: str = "h100",
    *,
    ranks: int | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    choice: int = 1,
    top: int = 5,
    scale: bool = False,
    critical_batch: float | None = None,
    overrides: Sequence[str] = (),
    plan_file: str = "PLAN.toml",
) -> PlanResult:
    """Searches for the fastest layout of a model on a cluster. Does not import torch and needs no devices.

    Args:
        model: a preset, the path of a run file, the path of a Hugging Face ``config.json``, or a config.
        cluster: ``"h100"`` (one node), ``"h100:4"`` (devices), ``"h100:8x16"`` (16 nodes of 8), the path of a cluster
            file, or ``"here"`` (this machine, as measured by ``meshwright plan measure``).
        ranks: number of devices to use. Default: all devices of the cluster.
        batch: samples per optimizer step, over all ranks. Default: that of the run.
        sequence: tokens per sample. Default: that of the run.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"fp64"``, ``"fp8"`` or ``"fp4"``. Default: that of the run.
        choice: which plan of the ranking is ``result.chosen`` and is explained; the best is 1.
        top: number of plans in the ranking, at least.
        scale: if True, also estimates how the plan scales to 64 times the devices.
        critical_batch: critical batch size in tokens, for ``scale``. Default: estimated from the model size.
        overrides: config keys to fix, such as ``["layout.tensor=8"]``; the search keeps them.
        plan_file: name of the run file in the commands that the explanation suggests.

    Returns:
        PlanResult: the ranking, the chosen plan with predicted step time and memory, and its explanation.

    Raises:
        ConfigError: an argument is not valid, or no layout fits into memory.
    """
    from meshwright.planner.hardware.resolve_cluster import resolve_cluster, with_whole_nodes
    from meshwright.planner.search.plan_result import make_plan
    from meshwright.planner.workload.workload_args import build_workload, workload_from_config

    if critical_batch is not None and not 0 < critical_batch < float("inf"):
        raise ConfigError(f"critical batch {critical_batch} is out of range", "expected a number of tokens above 0")
    devices = resolve_cluster(cluster)
    if ranks is not None:
        if not 1 <= ranks <= devices.device_count:
            raise ConfigError(
                f"{ranks} ranks on {devices.device_count} devices", f"expected 1 to {devices.device_count} ranks"
            )
        devices = with_whole_nodes(devices, ranks)
    if isinstance(model, RunConfig):
        changed = {"batch.global": batch, "data.sequence": sequence, "precision.compute": precision}
        tree = config_to_dict(model)
        for key, value in changed.items():
            section, _, name = key.partition(".")
            tree[section] |= {name: value} if value is not None else {}
        workload = workload_from_config(config_from_dict(tree), overrides)
    else:
        workload = build_workload(str(model), overrides, batch, sequence, precision)
    return make_plan(workload, devices, choice, top, scale, critical_batch, plan_file)


def simulate(config: RunConfig | None = None, *, ranks: int | None = None, rank: Sequence[int] = ()) -> Simulation:
    """Runs one step of the real model and parallelism on fake tensors, and counts communication and memory.

    The simulation runs in this process on any number of ranks, needs no devices, and touches no run folder.

    Args:
        config: settings of the run. Default: the ``tiny`` preset.
        ranks: total number of ranks; sets ``layout.replicate`` accordingly. Default: those of ``config.layout``.
        rank: ranks to simulate. Default: rank 0 and, with a pipeline, the first rank of the last stage.

    Returns:
        Simulation: message and wire bytes per collective, and peak memory per class, of each simulated rank.

    Raises:
        ConfigError: the config is not valid on this number of ranks.
    """
    from meshwright.simulator.simulate import simulate as simulate_config

    return simulate_config(validated(config, ranks), rank)


def prove(
    config: RunConfig | None = None, *, ranks: int | None = None, out: str | Path | None = None, full: bool = False
) -> dict[str, Any]:
    """Checks the stream, training, communication and recovery contracts of a config on this machine.

    Args:
        config: settings of the run. Default: the ``tiny`` preset.
        ranks: total number of ranks; sets ``layout.replicate`` accordingly. Default: those of ``config.layout``.
        out: file to write the certificate to, as JSON. Default: it is not written.
        full: prove the configured runs in full size; only the number of steps shrinks. Default: ``False``.

    Returns:
        dict: the certificate. ``certificate["passed"]`` is True if every contract holds.

    Raises:
        ConfigError: the config is not valid.
    """
    from meshwright.io import output_file
    from meshwright.prover.prove import certify
    from meshwright.topology.unsupported import validate

    config = validated(config, ranks)
    validate(config)
    file = output_file(given_path(out, "out"), "out") if out is not None else None
    certificate = certify(config, full=full)
    if file is not None:
        write_json(file, certificate)
    return certificate


def validated(config: RunConfig | None, ranks: int | None = None) -> RunConfig:
    """Checks a config that was built in Python as if it had been read from a file."""
    config = config_from_dict(config_to_dict(config or RunConfig()))
    return config if ranks is None else dataclasses.replace(config, layout=config.layout.with_ranks(ranks))


@contextmanager
def errors_for_python() -> Iterator[None]:
    """Raises failures of ranks as the exception class that the rank raised, and Ctrl-C as KeyboardInterrupt."""
    try:
        yield
    except MeshwrightError as raised:
        error = raised.cause() if isinstance(raised, RanksFailed) else raised
        if error.exit_code == 128 + signal.SIGINT:
            raise KeyboardInterrupt(str(error)) from error
        raise with_python_hint(error) from None


def _train(
    config: RunConfig | None,
    run: str | Path | None,
    display: DisplayFactory | None,
    user: UserCode,
    *,
    fresh: bool = False,
    fork: bool = False,
    fallback: bool = True,
    cluster: str | None = None,
) -> TrainResult:
    from meshwright.launch.job import make_job, run_in_this_process, start_ranks, torchrun_rendezvous_info

    config = validated(config)
    folder = run_folder(run, config)
    job = make_job(config, folder, user, fallback=fallback, cluster=cluster)
    rendezvous = torchrun_rendezvous_info()
    if rendezvous is not None:
        make_display = display or partial(Terminal, config, relative_path(folder))
        summary = run_in_this_process(job, rendezvous, lambda attempt: make_display(attempt).show, fresh, fork)
        return TrainResult(folder.root, **dataclasses.asdict(summary))

    def start(attempt: int, restart: int) -> RunningRanks:
        return start_ranks(job.as_attempt(attempt, restart, fork))

    viewers = viewer_factory(config, folder, display)
    return make_result(folder, supervise(folder, config.launch, start, viewers, fresh=fresh))


def train_as_rank(
    config: RunConfig,
    run: Path | None,
    display: DisplayFactory | None,
    entry_points: Mapping[str, str],
    *,
    fresh: bool = False,
    fork: bool = False,
    fallback: bool = True,
    cluster: str | None = None,
) -> TrainResult:
    """Trains in this process as one of torchrun's ranks, for the command line."""
    from meshwright.launch.user_code.entry_points import load_user_code

    user = load_user_code(entry_points)
    return _train(config, run, display, user, fresh=fresh, fork=fork, fallback=fallback, cluster=cluster)


def train_with_fork_server(
    config: RunConfig,
    run: Path | None,
    display: DisplayFactory | None,
    entry_points: Mapping[str, str],
    *,
    fresh: bool = False,
    fork: bool = False,
    fallback: bool = True,
    cluster: str | None = None,
) -> TrainResult:
    """Trains on ranks that a fork server starts, so that this process does not import torch, for the command line."""
    folder = run_folder(run, config)
    fork_server = ForkServer(config, folder, fork, fallback, cluster, entry_points)
    try:
        viewers = viewer_factory(config, folder, display)
        return make_result(folder, supervise(folder, config.launch, fork_server.start, viewers, fresh=fresh))
    finally:
        fork_server.close()


def run_folder(run: str | Path | None, config: RunConfig) -> RunFolder:
    """Resolves the run folder once, so that a later change of a link or of the working directory has no effect."""
    try:
        return RunFolder((given_path(run, "run") if run is not None else Path("runs") / config.preset).resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a loop of symbolic links, a name with a null character
        raise ConfigError(f"run {run!s} is not a folder: {error}", "expected --run DIR") from None


def given_path(path: str | Path, name: str) -> Path:
    """Returns a path argument; empty text would be the current folder."""
    if not str(path).strip():
        raise ConfigError(f"{name} is an empty path", f"expected {name}=PATH")
    return Path(path)


def relative_path(folder: RunFolder) -> Path:
    """Returns the path of a run folder relative to the working directory if it is below it."""
    here = Path.cwd()
    return folder.root.relative_to(here) if folder.root != here and folder.root.is_relative_to(here) else folder.root


def make_result(folder: RunFolder, summary: Any) -> TrainResult:
    return TrainResult(folder.root, **(summary if isinstance(summary, dict) else dataclasses.asdict(summary)))


def viewer_factory(
    config: RunConfig, folder: RunFolder, display: DisplayFactory | None
) -> Callable[[int], EventViewer]:
    make_display = display or partial(Terminal, config, relative_path(folder))
    return lambda attempt: EventViewer(make_display(attempt), EventFollower(folder.events(0), only_new=True))
