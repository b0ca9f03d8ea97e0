"""The verb `report` as a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.base.cli.python_args import errors_for_python, given_run
from meshwright.base.config import RunConfig
from meshwright.base.models.initial_model import load_run_config
from meshwright.base.user_code.user_code import UserCode
from meshwright.errors import ConfigError, IdentityError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from meshwright.base.records.run_folder import RunFolder
    from meshwright.core.parallel.parallel_spec import ParallelSpec
    from meshwright.insight.report.run_report import Report


def report(
    run: str | Path,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    loss: Callable[..., Any] | None = None,
    source: Any = None,
    parallel_spec: ParallelSpec | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    reduction: Literal["sum", "mean"] | None = None,
    init: Callable[[str, Tensor], Any] | None = None,
) -> Report:
    """Compares what a run measured with what was predicted for it.

    The report reads records alone: nothing that a run folder names is imported. A model that is given is compared with
    the recorded one.

    Args:
        run: folder of a run that is running, finished or failed.
        model: model of the run, as in :func:`train`.
        loss: loss of ``model``, as in :func:`train`.
        source: dataset of ``model``, as in :func:`train`.
        parallel_spec: how to parallelize ``model``, as in :func:`train`.
        collate: makes a batch of a list of samples, as in :func:`train`.
        reduction: what ``loss`` returns, as in :func:`train`.
        init: initializes a ``model`` on the meta device, as in :func:`train`.

    Returns:
        Report: measured and predicted step time, memory and communication, with the errors. ``to_html()`` and
        ``to_markdown()`` are the whole report; a notebook shows a summary.

    Raises:
        ConfigError: ``run`` is not a run folder.
        IdentityError: the run is one of another model, or of other code.
    """
    user = UserCode(model, loss, source, parallel_spec, collate, reduction=reduction, init=init)
    with errors_for_python():
        return report_run(given_run(run, "run"), user)


def report_run(run: Path, user: UserCode) -> Report:
    """Reports a run, and says which custom model it trains."""
    from meshwright.base.records.run_folder import RunFolder
    from meshwright.insight.report.run_report import build_report

    folder = RunFolder(run)
    result = build_report(folder)
    config = recorded_config(folder)
    if user.model is not None:
        from meshwright.core.launch.user_code.make_custom_model import open_model_shapes

        if config is None or config.custom_model.class_ is None:
            raise IdentityError(f"{run} has no record of a run of a custom model", "try it without --model")
        open_model_shapes(config, user)
    if config is None or config.custom_model.class_ is None:
        return result
    note = f"custom model {config.custom_model.class_}; for other verbs: {config.custom_model.options}"
    return replace(result, notes=[note, *result.notes])


def recorded_config(folder: RunFolder) -> RunConfig | None:
    """The config of a run folder, or None if it is missing or damaged: a report reads what there is."""
    try:
        return load_run_config(folder.run_file)
    except ConfigError:
        return None
