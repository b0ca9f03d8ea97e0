"""`meshwright data`: writes token shards, and looks up the samples or rollouts of a step, and the steps of one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from meshwright.base.cli.args import Json, Run, flag, option, positional
from meshwright.base.terminal.output import emit
from meshwright.errors import ConfigError

DOCUMENT_LINE = "--- end of document ---"
"""What `data show --text` prints between two documents."""


def data_prepare(
    inputs: Annotated[tuple[str, ...], positional("INPUT", "files, folders, glob patterns, or datasets on disk")],
    out: Annotated[Path, option("DIR", "folder for the shards; a command that was killed continues there")],
    tokenizer: Annotated[str, option("FILE", "tokenizer.json, or its folder (default: bytes are tokens)")] = "",
    format: Annotated[
        Literal["auto", "text", "jsonl", "parquet", "datasets", "chat"],
        option("FORMAT", "auto (by suffix), text, jsonl, parquet, datasets, or chat: records of chats, with a mask"),
    ] = "auto",
    field: Annotated[str, option("NAME", "field or column that contains the text")] = "text",
    template: Annotated[str, option("FILE", "template in Jinja of --format chat")] = "",
    end_of_document: Annotated[str, option("TOKEN", "token that ends a document; auto or none")] = "auto",
    workers: Annotated[int | None, option("N", "processes (default: one per core); they do not change a byte")] = None,
    shard_tokens: Annotated[int, option("N", "tokens per shard")] = 1 << 24,
    bad_sample_budget: Annotated[int, option("N", "lines or rows that may be skipped as not decodable")] = 0,
    json: Json = False,
) -> None:
    """Data prepare: tokenize text, JSONL, Parquet or datasets on disk to token shards."""
    from meshwright.base.io import format_count
    from meshwright.core.data.prepare.command import prepare_folder

    result = prepare_folder(
        inputs, out, tokenizer, format, field, template, end_of_document, workers, shard_tokens, bad_sample_budget
    )
    counts = [f"{format_count(result[key])} {key}" for key in ("tokens", "documents", "shards")]
    counts += [f"{result['skipped']} skipped"] if result["skipped"] else []
    emit(json, result, f"{out}: {', '.join(counts)}, {result['dtype']}, digest {result['digest']}")


def data_show(
    run: Run,
    step: Annotated[int, option("K", "step to look up, past or future; the first step is 0")],
    rank: Annotated[int | None, option("R", "show the samples of this rank only")] = None,
    text: Annotated[bool, flag("decode the samples; this opens the data")] = False,
    tokenizer: Annotated[str, option("FILE", "tokenizer.json of token files, for --text")] = "",
    json: Json = False,
) -> None:
    """Data show: list the samples of a step in global order; of a run that trains on rollouts, its rollouts."""
    from meshwright.core.data.sample_lookup import open_sample_lookup
    from meshwright.rl.lookup.lookup import is_rollout_run, open_rollout_lookup

    if is_rollout_run(run):
        from meshwright.insight.terminal.rollout_text import show_text

        shown = open_rollout_lookup(run, tokenizer).show(step, rank)
        emit(json, shown, show_text(shown))
        return
    answer = open_sample_lookup(run).show(step, rank)
    where = f"step {step}" + (f" rank {rank}" if rank is not None else "")
    lines = [f"{where}: {' '.join(map(str, answer['samples']))}"]
    if text:
        from meshwright.core.data.sample_text import read_texts

        answer["texts"] = read_texts(run, answer["samples"], tokenizer)
        for sample in answer["texts"]:
            lines.append("\nsample {sample}, index {source_index} of {source}:".format(**sample))
            lines.append(f"\n{DOCUMENT_LINE}\n".join(document.expandtabs(4) for document in sample["documents"]))
    emit(json, answer, "\n".join(lines))


def data_find(
    run: Run,
    sample: Annotated[int | None, option("ID", "id of the sample, or of the prompt of rollouts")] = None,
    rollout: Annotated[str, option("ID", "id of a rollout, such as 12.3@1.7, or the number of a group")] = "",
    epochs: Annotated[int, option("N", "number of epochs to search")] = 3,
    tokenizer: Annotated[str, option("FILE", "tokenizer.json of the prompts, for --rollout")] = "",
    json: Json = False,
) -> None:
    """Data find: list the steps and ranks that read a sample, or say what became of a rollout."""
    from meshwright.core.data.sample_lookup import open_sample_lookup
    from meshwright.rl.lookup.lookup import is_rollout_run, open_rollout_lookup

    if (sample is None) == (not rollout):
        raise ConfigError("data find takes one of --sample and --rollout", "expected --sample ID or --rollout ID")
    if rollout:
        if not is_rollout_run(run):
            raise ConfigError(f"{run} is not the folder of a run that trains on rollouts", "expected --sample ID")
        from meshwright.insight.terminal.rollout_text import find_text

        found = open_rollout_lookup(run, tokenizer).find(rollout)
        emit(json, found, find_text(found))
        return
    assert sample is not None
    answer = open_sample_lookup(run).find(sample, epochs)
    lines = [f"sample {sample} is index {answer['source_index']} of {answer['source']}"]
    lines += ["it is held out for evaluation: training never reads it"] if answer["held_out"] else []
    if is_rollout_run(run):  # a group is a position in the stream of prompts; the step of a group is not fixed before
        answer["occurrences"] = [{"epoch": each["epoch"], "group": each["position"]} for each in answer["occurrences"]]
        lines += [
            "epoch {epoch}: group {group} (try --rollout {group})".format(**each) for each in answer["occurrences"]
        ]
    else:
        lines += [
            "epoch {epoch}: step {step}, rank {rank}, micro-step {micro_step} (position {position})".format(**each)
            for each in answer["occurrences"]
        ]
    emit(json, answer, "\n".join(lines))
