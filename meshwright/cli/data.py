"""`meshwright data`: looks up which samples a step reads, and which steps read a sample."""

from __future__ import annotations

from typing import Annotated

from meshwright.cli.args import Json, Run, option
from meshwright.cli.output import emit


def data_show(
    run: Run,
    step: Annotated[int, option("K", "step to look up, past or future; the first step is 0")],
    rank: Annotated[int | None, option("R", "show the samples of this rank only")] = None,
    json: Json = False,
) -> None:
    """Data show: list the samples of a step in global order."""
    from meshwright.data.sample_lookup import open_sample_lookup

    answer = open_sample_lookup(run).show(step, rank)
    where = f"step {step}" + (f" rank {rank}" if rank is not None else "")
    emit(json, answer, f"{where}: {' '.join(map(str, answer['samples']))}")


def data_find(
    run: Run,
    sample: Annotated[int, option("ID", "id of the sample")],
    epochs: Annotated[int, option("N", "number of epochs to search")] = 3,
    json: Json = False,
) -> None:
    """Data find: list the steps and ranks that read a sample, epoch by epoch."""
    from meshwright.data.sample_lookup import open_sample_lookup

    answer = open_sample_lookup(run).find(sample, epochs)
    lines = [f"sample {sample} is index {answer['source_index']} of {answer['source']}"]
    lines += ["it is held out for evaluation: training never reads it"] if answer["held_out"] else []
    lines += [
        "epoch {epoch}: step {step}, rank {rank}, micro-step {micro_step} (position {position})".format(**occurrence)
        for occurrence in answer["occurrences"]
    ]
    emit(json, answer, "\n".join(lines))
