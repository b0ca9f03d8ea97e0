"""meshwright replay: runs one step of a run again and shows it in detail."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from meshwright.base.cli.args import NO_ENTRY_POINTS, Json, Ranks, option, positional
from meshwright.base.terminal.output import emit


def replay(
    run: Annotated[Path, positional("RUN", "run folder; it is only read")],
    step: Annotated[int, option("K", "step to run again; the first step is 0")],
    ranks: Ranks = None,
    tokenizer: Annotated[str, option("FILE", "tokenizer.json of token files, to show samples as text")] = "",
    json: Json = False,
    overrides: tuple[str, ...] = (),
    entry_points: Mapping[str, str] = NO_ENTRY_POINTS,
) -> None:
    """Replay: run one step again from the nearest checkpoint, with norms by layer, and loss and text by sample."""
    from meshwright.base.records.run_folder import RunFolder
    from meshwright.base.user_code.entry_points import load_user_code
    from meshwright.prover.replay.replay import replay_step
    from meshwright.prover.replay.replay_text import describe_replay

    result = replay_step(RunFolder(run), step, ranks, overrides, load_user_code(entry_points), tokenizer)
    emit(json, result.to_json(), describe_replay(result, str(run)))
