"""`replay` and `bisect` as functions: one step of a run again in detail, and where two runs part.

The run folders are only read, so that a run can be replayed while it trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.base.cli.python_args import errors_for_python, given_run
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.user_code.user_code import UserCode

if TYPE_CHECKING:
    from meshwright.prover.replay.run_difference import RunDifference
    from meshwright.prover.replay.step_detail import StepReplay


def replay(
    run: str | Path,
    step: int,
    *,
    ranks: int | str | None = None,
    overrides: Sequence[str] = (),
    user: UserCode | None = None,
    tokenizer: str = "",
) -> StepReplay:
    """Runs one step of a run again, from the newest checkpoint at or before it, in a temporary folder.

    Args:
        run: run folder.
        step: the step; the first one is 0.
        ranks: number of ranks. Default: the layout of the run, on which the numbers are bitwise those of the record.
        overrides: settings of another placement, such as ``"layout.tensor=1"`` or ``"launch.device=cpu"``.
        user: the user's model, loss and data.
        tokenizer: tokenizer.json of token files, to show the samples as text.

    Returns:
        StepReplay: gradients and updates by parameter, outputs by module, loss and text by sample, and the comparison
        with the record of the step.

    Raises:
        ConfigError: the run does not have the step.
        CheckpointError: no checkpoint is left from which the step can be reached.
    """
    from meshwright.prover.replay.replay import replay_step

    with errors_for_python():
        folder = RunFolder(given_run(run, "run"))
        return replay_step(folder, step, ranks, overrides, user or UserCode(), tokenizer)


def bisect(run: str | Path, other: str | Path, *, user: UserCode | None = None) -> RunDifference:
    """Finds the first step, then the first parameter, in which two runs of one model part.

    Records are compared first, then common checkpoints by a binary search. From the newest state that the runs share,
    both are replayed in temporary folders up to the step in which they part.

    Args:
        run: run folder.
        other: folder of the other run.
        user: the user's model, loss and data.

    Returns:
        RunDifference: ``agree``, ``step``, ``parameter`` and the evidence.

    Raises:
        ConfigError: the runs train different models.
    """
    from meshwright.prover.replay.bisect import bisect_runs

    with errors_for_python():
        folders = RunFolder(given_run(run, "run")), RunFolder(given_run(other, "other"))
        return bisect_runs(*folders, user or UserCode())
