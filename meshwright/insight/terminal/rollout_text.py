"""The rollouts of a step, the account of a run, and what became of a rollout, as text of 80 columns. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from textwrap import wrap
from typing import Any

from meshwright.base.io import printable

COLUMNS = 80
CAUSES = {
    "no_signal": "its rewards are all equal, so that it has no gradient",
    "failed": "it has no reward",
    "stale": "its policy was older than the staleness bound when a step could have trained it",
    "lost_timeline": "its policy is on a timeline that a restart took back",
    "duplicate": "the group already had a valid record, or was consumed",
    "damaged": "its record was in flight and can no longer be read",
}
"""Why a rollout is dropped."""


def show_text(answer: Mapping[str, Any]) -> str:
    """The answer of `data show` for a run that trains on rollouts."""
    rows: Sequence[Mapping[str, Any]] = answer["rollouts"]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    where = f"step {answer['step']}" + (f", rank {answer['rank']}" if "rank" in answer else "")
    mean = f", mean reward {sum(rewards) / len(rewards):.4g}" if rewards else ""
    groups = [list(members) for _, members in groupby(rows, lambda row: row["group"])]
    oldest = max((row["staleness"] for row in rows), default=0)
    lines = [
        f"{where} (attempt {answer['attempt']}): {len(rows)} rollouts of {len(groups)} groups{mean}",
        f"staleness up to {oldest}, bound {answer['staleness_bound']}; tokens with +: cut at rl.completion_tokens",
        *step_notes(answer),
    ]
    for members in groups:
        first = members[0]
        lines += [
            "",
            f"group {first['group']}  prompt {first['prompt_id']}  policy {first['version']}  "
            f"staleness {first['staleness']}",
            "  " + quoted(first["prompt"], COLUMNS - 2),
            *rollout_lines(members),
        ]
    if answer["left_out"]:
        lines += ["", *left_out_lines(answer["left_out"])]
    lines += ["", f"account after step {answer['step']}:", *account_lines(answer["counts"])]
    return "\n".join(lines)


def step_notes(answer: Mapping[str, Any]) -> Iterator[str]:
    if not answer["completed"]:
        yield "the step has begun, and is not completed"
    if answer["lost_timeline"]:
        yield "the step is lost: a later attempt resumed from a checkpoint before it"
    if answer["repeated"]:
        yield f"{answer['repeated']} earlier attempt(s) completed the step too; the last one counts"


def rollout_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line per rollout: id, rank and row, reward, tokens, completion."""
    width = max(len(row["id"]) for row in rows)
    for row in rows:
        rank = "-" if row.get("rank") is None else row["rank"]
        place = f"rank {rank} row {row['row']:<4} " if "row" in row else ""
        reward = "no reward" if row["reward"] is None else f"reward {row['reward']:<7.4g}"
        cut = "+" if row["truncated"] else " "
        head = f"  {row['id']:<{width}}  {place}{reward} {row['tokens']:>4}{cut} "
        yield head + quoted(row["completion"], max(12, COLUMNS - len(head)))


def left_out_lines(left_out: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The groups that the step left out, by cause, as ranges of their numbers."""
    by_cause: dict[str, list[int]] = {}
    for group in left_out:
        by_cause.setdefault(group["cause"], []).append(group["group"])
    for cause, numbers in by_cause.items():
        named = f"left out, {cause}: {len(numbers)} group{'' if len(numbers) == 1 else 's'} ({CAUSES[cause]}): "
        yield from wrap(named + ", ".join(number_ranges(numbers)), COLUMNS, subsequent_indent="  ")


def number_ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Increasing numbers as ranges: 3, 5-8."""
    start = before = None
    for number in [*numbers, None]:
        if number is not None and before is not None and number == before + 1:
            before = number
            continue
        if start is not None:
            yield str(start) if start == before else f"{start}-{before}"
        start = before = number


def account_rows(counts: Mapping[str, Any]) -> list[tuple[str, str, int, int]]:
    """(sign, part, rollouts, tokens): generated, and the parts that add up to it. Causes without a rollout are left
    out.
    """
    dropped = [("+", f"dropped, {cause}", *amount) for cause, amount in counts["dropped"].items() if any(amount)]
    return [
        ("", "generated", *counts["generated"]),
        ("=", "trained", *counts["trained"]),
        *dropped,
        ("+", "in flight", *counts["in_flight"]),
    ]


def account_lines(counts: Mapping[str, Any]) -> Iterator[str]:
    """generated = trained + dropped + in flight, as a column of rollouts and one of tokens."""
    yield f"  {'':<26}{'rollouts':>14}{'tokens':>16}"
    for sign, part, rollouts, tokens in account_rows(counts):
        yield f"  {sign:<2}{part:<24}{rollouts:>14,}{tokens:>16,}"


def find_text(answer: Mapping[str, Any]) -> str:
    """The answer of `data find --rollout`."""
    lines = [f"rollout {answer['rollout']}: group {answer['group']}, prompt {answer['prompt_id']}: {verdict(answer)}"]
    for record in answer["records"]:
        lines += ["", *record_lines(record)]
    for lost in answer["lost_training"]:
        had = f"step {lost['step']} of attempt {lost['attempt']} had it as {lost['fate']}, of policy {lost['version']}"
        state = "is lost: a later attempt resumed before it" if lost["why"] == "lost_timeline" else "was not completed"
        lines.append(f"{had}, and {state}")
    if answer["other_versions"]:
        lines.append(f"the group has records of other policy versions: {', '.join(answer['other_versions'])}")
    if not answer["records"]:
        lines.append(f"the run has consumed the groups before {answer['frontier']}")
    for damage in answer["damaged"]:
        lines.append(f"the log is damaged at {position_text(damage['position'])}: {damage['reason']}")
    lineage = answer["lineage"]
    if lineage is not None:
        ended = [f"{timeline} to step {step}" for timeline, step in lineage["ended"]]
        lines += ["", f"lineage: timelines {', '.join([*ended, str(lineage['timeline'])])}"]
    return "\n".join(part for line in lines for part in fit(line))


def fit(line: str) -> list[str]:
    """A line, or the lines of at most COLUMNS columns that it is broken into."""
    return [line] if len(line) <= COLUMNS else wrap(line, COLUMNS, subsequent_indent="  ")


def verdict(answer: Mapping[str, Any]) -> str:
    fate = answer["fate"]
    if fate == "never_generated":
        return "never generated: the log has no record of it"
    if fate == "in_flight":
        return "in flight: no step has trained it so far"
    if fate == "trained":
        record = next(record for record in answer["records"] if record["fate"] == "trained")
        return f"trained at step {record['step']} of attempt {record['attempt']}"
    return f"not trained, {fate}: {CAUSES[fate]}"


def record_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """A record of the log: its policy, its fate with the step, and its rollouts."""
    stale = f", staleness {record['staleness']}" if record["staleness"] is not None else ""
    step = f" at step {record['step']} of attempt {record['attempt']}" if record["step"] is not None else ""
    where = position_text(record["position"]) if record["position"] is not None else "unknown"
    yield f"policy {record['version']}: {record['fate'].replace('_', ' ')}{step}{stale}"
    by = f", by {record['generator']}" if record["generator"] else ""
    lineage = "" if record["on_lineage"] else "; its policy is not on the lineage"
    yield f"  record: {where}{by}{lineage}"
    if record.get("problem"):
        yield f"  {record['problem']}"
    if record["failure"]:
        yield f"  failure: {record['failure'].splitlines()[0][:200]}"
    if record["rollouts"]:
        yield "  prompt: " + quoted(record["rollouts"][0]["prompt"], COLUMNS - 10)
        yield from rollout_lines(record["rollouts"])


def position_text(position: Sequence[int]) -> str:
    return f"segment {position[0]}, offset {position[1]:,}"


def quoted(text: str, width: int) -> str:
    """Text in quotation marks on one line of at most `width` columns."""
    shown = printable(text.replace("\n", "\\n"))
    return f'"{shown}"' if len(shown) + 2 <= width else f'"{shown[: width - 5]}..."'
