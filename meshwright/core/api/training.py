"""The verb `train` as a function, and how the command line starts it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.base.checkpoint.listing import RunLineage
from meshwright.base.cli.python_args import errors_for_python, given_path, validated
from meshwright.base.config import RunConfig, config_to_dict
from meshwright.base.environment import require_torch
from meshwright.base.io import read_json
from meshwright.base.records.events import Event, EventFollower
from meshwright.base.records.heartbeat import process_start_time
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store.object_process import make_requests_in_another_process
from meshwright.base.terminal.event_viewer import EventViewer, SilentDisplay
from meshwright.base.terminal.terminal import EventDisplay, Terminal
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.api.run_location import PushingLauncher, default_name, open_pusher, relative_path, run_folder
from meshwright.core.api.snapshot_keeper import snapshot_keeper
from meshwright.core.channel import read_secret
from meshwright.core.data.sample_lookup import samples_in_step
from meshwright.core.launch.fork_server import ForkServer
from meshwright.core.recover.hosts.hosts_policy import hosts_policy
from meshwright.core.recover.hosts.supervise_hosts import supervise_hosts
from meshwright.core.recover.running_ranks import RunningRanks
from meshwright.core.recover.supervisor import supervise, warn
from meshwright.core.trainer.callbacks.callback import Callback, RunContext
from meshwright.core.trainer.callbacks.configured import run_callbacks
from meshwright.core.trainer.callbacks.incidents import report_last_incident
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.insight.metrics.exporter import RunExporter
from meshwright.ops.preflight.hosts.job import require_preflight

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from meshwright.core.parallel.parallel_spec import ParallelSpec

DisplayFactory = Callable[[int], EventDisplay]
"""Attempt number -> the display of that attempt's events."""


@dataclass(frozen=True)
class Result:
    """What `meshwright.train` returns when a run is complete."""

    folder: Path
    """run folder"""
    steps: int
    """optimizer steps of the whole run"""
    loss: float | None
    """training loss of the last step; None if this call had no step to do"""
    skipped: int
    """steps whose update was skipped because the loss or a gradient was not finite"""
    digest: str
    """digest of the trained parameters; equal digests mean bitwise equal parameters"""
    evaluations: list[tuple[int, float]]
    """(step, held-out loss) of the evaluations of this call"""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """the metrics, and the parts of a loss that returns several sums, of the last step"""
    model: nn.Module | None = None
    """the trained module; None for a built-in model. A module on the meta device stays without values"""
    stopped: str = ""
    """why a callback ended the run before its last step; empty: it ran to the end"""

    @property
    def parameters_digest(self) -> str:
        """The same as `digest`, under the name that records use."""
        return self.digest

    def _repr_html_(self) -> str | None:
        """What a notebook shows: the headline signals, the verdict, curves and account of the run."""
        from meshwright.insight.report.run_report import build_report

        try:
            return build_report(RunFolder(self.folder))._repr_html_()
        except ConfigError:  # the folder was deleted or moved
            return None


def train(
    config: RunConfig | None = None,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    loss: Callable[..., Any] | None = None,
    source: Any = None,
    parallel_spec: ParallelSpec | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    reduction: Literal["sum", "mean"] | None = None,
    init: Callable[[str, Tensor], Any] | None = None,
    init_from: str | Path | None = None,
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    schedule: Callable[[int, int], float] | None = None,
    reward: Callable[..., float] | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    run: str | Path | None = None,
    fresh: bool = False,
    fork: bool = False,
    accept_code: bool = False,
    fallback: bool = True,
    cluster: str | None = None,
    display: DisplayFactory | None = None,
    quiet: bool = False,
) -> Result:
    """Trains a model on the ranks of ``config.layout`` and returns when the run is complete.

    If the run folder has a checkpoint, training resumes from the newest intact one. The ranks are forked from this
    process, so a notebook cell works and no ``__main__`` guard is needed. Under torchrun, this process is one of the
    ranks, and torchrun supervises them.

    Args:
        config: settings of the run. Default: the ``tiny`` preset.
        model: module to train instead of the built-in decoder, or a callable without arguments that builds it. When
            the call returns, the module has the trained parameters.
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
        init: initializes a ``model`` on the meta device: ``init(name, tensor)`` writes the initial values of the
            parameter or buffer of this name into ``tensor``, which is full and on the CPU. Every rank calls it for the
            tensors of which it has a shard, one after the other; random numbers depend on ``config.seed`` and the name.
        init_from: folder of safetensors with the initial weights: by the names of ``model``, or those of a Hugging Face
            model, whose config.json then gives ``config.model``. The same as ``config.init_from``.
        optimizer: makes a ``torch.optim.Optimizer`` of parameter groups, to use instead of ``config.optimizer.kind``; a
            class of ``torch.optim`` is one. It is examined before the first step: on layouts that shard parameters it
            must be elementwise. ``config.optimizer`` still has the learning rate, clipping and groups.
        schedule: ``schedule(step, steps)`` returns the learning rate of a step, as a multiple of
            ``config.optimizer.lr``, to use instead of ``config.schedule``. It must be a function of its arguments.
        reward: ``reward(item, completion)`` returns the reward of the text of a completion, a finite number, in a run
            with ``config.rl.objective``; with a third argument, it gets the token ids, too. ``item`` is the item of
            ``source`` that has the prompt: a dict with ``"prompt"``, a text or a list of token ids, and anything else
            that JSON can represent. It runs in a process of its own, within ``config.rl.reward_timeout`` per group; a
            group whose reward fails is left out and recorded. Default: the reward of ``config.rl.task``.
        callbacks: receive the records of the run on rank 0, see :class:`Callback`. They run in the process of the rank:
            what they assign to their attributes is not visible in this process.
        run: run folder, or the URL of one in an object store (``s3://``, ``gs://``, ``az://``). Default:
            ``runs/PRESET``, or ``runs/NAME`` of the class or function of ``model`` in lower case.
        fresh: if True, starts from step 0. An existing run folder is renamed, not deleted.
        fork: if True, continues from the newest checkpoint although settings that change the numbers differ, and
            records a new timeline.
        accept_code: if True, continues although the code of ``model``, ``loss``, ``collate``, ``source`` or ``reward``
            changed since the run began, and records what changed.
        fallback: if False, a damaged newest checkpoint raises :class:`~meshwright.errors.CheckpointError` instead of
            falling back to an older one.
        cluster: cluster that step-time predictions assume, such as ``"h100:8"``. Default: this machine, if it has been
            measured.
        display: called with the number of each attempt; returns an object with ``show(event)`` and ``close()``.
            Default: progress on the terminal.
        quiet: if True, nothing is displayed.

    Returns:
        Result: the run folder, number of steps, last loss, metrics, evaluations, digest of the parameters, and model.

    Raises:
        ConfigError: a setting or an argument is not valid.
        IdentityError: the run folder belongs to a run with other settings, data or code.
        CheckpointError: no intact checkpoint to resume from, or a checkpoint cannot be written.
        DataError: a data source cannot provide a sample.
        NumericsError: the loss or a gradient is not finite.
        RestartsExhausted: the run failed again after ``launch.restarts`` restarts without progress.
        RankError: an exception ended a rank, for example one in ``model`` or ``loss``. ``error.rank``, ``error.step``,
            ``error.phase`` and ``error.traceback`` tell where.
        MeshwrightError: base class of all of these.
        KeyboardInterrupt: Ctrl-C; the ranks have saved a checkpoint first.

    Example::

        >>> from meshwright import RunConfig, train
        >>> result = train(RunConfig(steps=100), run="runs/first")
        >>> result.loss
    """
    with errors_for_python():
        if init_from is not None:
            config = dataclasses.replace(
                validated(config), init_from=str(given_path(init_from, "init_from").absolute())
            )
        return _train(
            config,
            run,
            (lambda _attempt: SilentDisplay()) if quiet else display,
            UserCode(
                model,
                loss,
                source,
                parallel_spec,
                collate,
                metrics,
                reduction,
                init,
                callbacks,
                optimizer,
                schedule,
                reward,
            ),
            fresh=fresh,
            fork=fork,
            accept_code=accept_code,
            fallback=fallback,
            cluster=cluster,
        )


def _train(
    config: RunConfig | None,
    run: str | Path | None,
    display: DisplayFactory | None,
    user: UserCode,
    *,
    fresh: bool = False,
    fork: bool = False,
    accept_code: bool = False,
    fallback: bool = True,
    cluster: str | None = None,
) -> Result:
    require_torch()
    started = time.time()
    from meshwright.core.launch.job import make_job, run_in_this_process, start_ranks, torchrun_rendezvous_info

    config = validated(config)
    folder = run_folder(run, default_name(config, user.entry_points, user.model))
    exporter = RunExporter(config.metrics, folder)
    rendezvous = torchrun_rendezvous_info()
    if config.launch.hosts > 1 and rendezvous is None:
        raise ConfigError(
            f"launch.hosts = {config.launch.hosts} in a Python process, whose ranks are forked on one host",
            "try the command line, meshwright train --model MODULE:NAME, on every host, or torchrun",
        )
    if rendezvous is None:
        make_requests_in_another_process()
    pusher = open_pusher(folder, fresh, rendezvous)
    try:
        job = make_job(config, folder, user, accept_code=accept_code, fallback=fallback, cluster=cluster)
    except BaseException:
        pusher.close()
        raise
    module = job.custom.module if job.custom is not None else None
    make_display = display or partial(Terminal, config, relative_path(folder))

    def listen(attempt: int) -> Callable[[Event], None]:
        exporter.start()
        return make_display(attempt).show

    def start(attempt: int, restart: int) -> RunningRanks:
        return start_ranks(job.as_attempt(attempt, restart, fork))

    with closing(exporter), closing(pusher), closing(job.rollouts) if job.rollouts is not None else nullcontext():
        if rendezvous is not None:
            pusher.start()
            return make_result(folder, run_in_this_process(job, rendezvous, listen, fresh, fork), module)
        viewers = viewer_factory(config, folder, display, exporter)
        give_up = partial(report_incidents, config, folder, lambda: job.callbacks)
        summary = supervise(
            folder,
            config.launch,
            pusher.beside(exporter.beside(start)),
            viewers,
            fresh=fresh,
            command_started=started,
            on_give_up=give_up,
            samples_in_step=samples_in_step,
        )
        return make_result(folder, summary, module)


def train_as_rank(
    config: RunConfig,
    run: str | Path | None,
    display: DisplayFactory | None,
    entry_points: Mapping[str, str],
    *,
    fresh: bool = False,
    fork: bool = False,
    accept_code: bool = False,
    fallback: bool = True,
    cluster: str | None = None,
) -> Result:
    """Trains in this process as one of torchrun's ranks, for the command line."""
    from meshwright.base.user_code.entry_points import load_user_code
    from meshwright.core.launch.user_code.make_custom_model import torch_seed

    with torch_seed(config.seed):
        user = load_user_code(entry_points)
    return _train(
        config,
        run,
        display,
        user,
        fresh=fresh,
        fork=fork,
        accept_code=accept_code,
        fallback=fallback,
        cluster=cluster,
    )


def train_with_fork_server(
    config: RunConfig,
    run: str | Path | None,
    display: DisplayFactory | None,
    entry_points: Mapping[str, str],
    *,
    fresh: bool = False,
    fork: bool = False,
    accept_code: bool = False,
    fallback: bool = True,
    cluster: str | None = None,
) -> Result:
    """Trains on ranks that a fork server starts, so that this process does not import torch, for the command line."""
    require_torch()
    folder = run_folder(run, default_name(config, entry_points))
    exporter = RunExporter(config.metrics, folder)
    fork_server = ForkServer(config, folder, fork, fallback, cluster, entry_points, accept_code)
    with (
        closing(exporter),
        closing(open_pusher(folder, fresh)) as pusher,
        closing(fork_server),
        snapshot_keeper(config) as keeper,
    ):
        viewers = viewer_factory(config, folder, display, exporter)
        give_up = partial(report_incidents, config, folder, partial(load_callbacks, config, entry_points))
        started, close = process_start_time(), fork_server.close
        options: dict[str, Any] = {"command_started": started, "on_give_up": give_up, "close": close}
        options["samples_in_step"] = samples_in_step
        if config.launch.hosts > 1:
            policy = hosts_policy(config, "model" in entry_points)
            require_preflight(config, folder, cluster)
            launcher, more = PushingLauncher(pusher, fork_server), (exporter.beside, fresh, keeper)
            summary = supervise_hosts(folder, config.launch, launcher, viewers, policy, read_secret(), *more, **options)
        else:
            start = pusher.beside(exporter.beside(fork_server.start))
            summary = supervise(folder, config.launch, start, viewers, fresh=fresh, **options)
        return make_result(folder, summary)


def load_callbacks(config: RunConfig, entry_points: Mapping[str, str]) -> tuple[Callback, ...]:
    """The callbacks of a run in this process."""
    from meshwright.base.user_code.entry_points import load_user_code, open_callbacks

    typed = {name: text for name, text in entry_points.items() if name == "callbacks"}
    return run_callbacks(config, open_callbacks(load_user_code(typed)))


def report_incidents(
    config: RunConfig, folder: RunFolder, callbacks: Callable[[], Sequence[Callback]], attempt: int
) -> None:
    """Passes the incidents of a job that gives up to the callbacks, in this process."""
    interested = [callback for callback in callbacks() if type(callback).on_incident is not Callback.on_incident]
    if interested:
        run = RunContext(folder, read_run_id(folder), attempt, 0, config_to_dict(config))
        report_last_incident(interested, run, print_callback_failure)


def print_callback_failure(callback: str, hook: str, message: str, **_fields: Any) -> None:
    warn(f"the callback {callback} failed in {hook}: {message}")


def read_run_id(folder: RunFolder) -> str:
    """The id of the run, or nothing if the job gave up before it wrote one."""
    try:
        return RunLineage.from_identity(read_json(folder.identity_file)).run
    except (MeshwrightError, OSError, KeyError, TypeError):
        return ""


def make_result(folder: RunFolder, summary: Any, module: nn.Module | None = None) -> Result:
    """The result from the summary of rank 0, which the fork server sends as a dict."""
    values = dict(summary if isinstance(summary, dict) else dataclasses.asdict(summary))
    if not values:  # another host led the job, and was gone when this one asked
        return Result(folder.root, 0, None, 0, "", [])
    return Result(folder.root, digest=values.pop("parameters_digest"), model=module, **values)


def viewer_factory(
    config: RunConfig, folder: RunFolder, display: DisplayFactory | None, exporter: RunExporter
) -> Callable[[int], EventViewer]:
    make_display = display or partial(Terminal, config, relative_path(folder))

    def make_viewer(attempt: int) -> EventViewer:
        return EventViewer(make_display(attempt), EventFollower(folder.events(0), only_new=True), exporter.check)

    return make_viewer
