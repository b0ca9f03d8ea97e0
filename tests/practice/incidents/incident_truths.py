"""What the records of an incident's run must show, by class: facts that are counted or recorded, never times."""

from __future__ import annotations

import json
from math import floor, isclose, log
from pathlib import Path

from meshwright_practice.incidents.evidence import find_causes
from meshwright_practice.incidents.incident import PracticeIncident
from meshwright_practice.incidents.job import RUN_FOLDER, read_job
from meshwright_practice.incidents.parts import LENGTH

from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.checkpoint.inspect import verify_rows


class Records:
    """The records of a run, for the checks below."""

    def __init__(self, folder: Path, incident: PracticeIncident) -> None:
        self.folder, self.run = folder, RunFolder(folder / RUN_FOLDER)
        self.values, self.rank, self.steps = incident.values, incident.arrangement.rank, incident.steps
        self.history = RunHistory(self.run)

    def events(self, rank: int, kind: str) -> list[dict]:
        return [event for event in read_events(self.run.events(rank)) if event["kind"] == kind]

    def delayed_steps(self, rank: int, phase: str) -> list[int]:
        """The steps in which a phase of a rank lasts at least as long as the sleep that was injected into it."""
        seconds = self.values["seconds"]
        return [event["step"] for event in self.events(rank, "step") if event["phases"][phase] >= seconds]

    def incident(self, attempt: int = 1) -> dict:
        return json.loads(self.run.incident(attempt).read_text())

    def last_step(self) -> int:
        return max(event["step"] for event in self.events(0, "step"))


def check_straggler(r: Records) -> None:
    affected = set(range(r.values["step"], r.steps))
    assert affected <= set(r.delayed_steps(r.rank, r.values["phase"]))
    others = [len(r.delayed_steps(rank, r.values["phase"])) for rank in range(r.values["ranks"]) if rank != r.rank]
    assert max(others) < len(affected) / 2


def check_data_bound(r: Records) -> None:
    for rank in range(r.values["ranks"]):
        assert set(range(r.values["step"], r.steps)) <= set(r.delayed_steps(rank, "fetch"))


def check_bubble(r: Records) -> None:
    [start] = r.events(0, "start")
    assert f"micro {r.values['micro']} x data-parallel 1 x accumulation {r.values['chunks']}" in start["batch"]
    assert start["ranks"] == r.values["stages"]
    assert r.values["chunks"] < 4 * r.values["stages"]


def check_slow_checkpoints(r: Records) -> None:
    saved = {event["step"] for event in r.events(0, "checkpoint")}
    assert len(saved) == floor(r.steps / r.values["every"]) + (r.steps % r.values["every"] > 0)
    assert r.history.config["checkpoint"]["mode"] == "sync"


def check_hang(r: Records) -> None:
    incident = r.incident()
    assert (incident["outcome"], incident["rank"], incident["step"]) == ("hang", r.rank, r.values["step"])


def check_nan(r: Records) -> None:
    found = [event for rank in r.history.ranks for event in r.events(rank, "nonfinite")]
    [step] = {event["step"] for event in found}
    assert abs(step - r.values["step"]) <= 1
    assert [event["rank"] for event in found if event["module"]] == [r.rank]
    assert read_job(r.folder).exit_code == 7


def check_out_of_memory(r: Records) -> None:
    incident = r.incident()
    assert incident["rank"] == r.rank
    assert "allocate memory" in incident["message"]
    assert abs(incident["step"] - r.values["step"]) <= r.values["kept"]


def check_killed_rank(r: Records) -> None:
    incident = r.incident()
    assert (incident["rank"], incident["step"]) == (r.rank, r.values["step"])
    assert "SIGKILL" in incident["message"]
    assert r.last_step() == r.steps - 1


def check_lost_host(r: Records) -> None:
    incident = r.incident()
    assert incident["host"] == r.values["host"]
    assert incident["rank"] == r.rank
    assert [event["ranks"] for event in r.events(0, "start")][-1] == 1
    assert r.last_step() == r.steps - 1


def check_replay(r: Records) -> None:
    steps = [event["step"] for event in r.events(0, "step")]
    twice = sorted(step for step in set(steps) if steps.count(step) == 2)
    assert twice == list(range(r.values["step"], r.values["end"]))


def check_corrupt_checkpoint(r: Records) -> None:
    damage = [row for row in verify_rows(r.run.root, None) if row["damage"]]
    assert [row["step"] for row in damage] == [r.values["step"]]
    assert f"rank-{r.rank:05d}.shard" in damage[0]["damage"][0]["file"]
    assert r.events(0, "restored")[-1]["step"] == r.values["restored"]


def check_other_settings(r: Records) -> None:
    incident = r.incident(2)
    assert incident["exit_code"] == 3
    assert f"{r.values['key']} was" in incident["message"]
    assert r.last_step() == r.values["step"] - 1


def check_wrong_normalisation(r: Records) -> None:
    first = r.events(0, "step")[0]
    positions, uniform = first["samples"] * LENGTH, log(r.values["vocabulary"])
    assert first["tokens"] < positions
    assert isclose(first["loss"] * first["tokens"], uniform * positions, rel_tol=1e-5)


def check_bit_flip(r: Records) -> None:
    incident = r.incident()
    assert f"rank {r.rank} differs" in incident["message"]
    assert r.values["step"] <= incident["step"] <= r.values["step"] + r.values["every"]


TRUTHS = {
    "straggler": check_straggler,
    "data-bound": check_data_bound,
    "bubble": check_bubble,
    "slow-checkpoints": check_slow_checkpoints,
    "hang": check_hang,
    "nan": check_nan,
    "out-of-memory": check_out_of_memory,
    "killed-rank": check_killed_rank,
    "lost-host": check_lost_host,
    "replay": check_replay,
    "corrupt-checkpoint": check_corrupt_checkpoint,
    "other-settings": check_other_settings,
    "wrong-normalisation": check_wrong_normalisation,
    "bit-flip": check_bit_flip,
}
"""Class -> what its records show."""


def quotation(folder: Path, incident: PracticeIncident) -> str:
    """What a user would paste as evidence."""
    records = Records(folder, incident)
    if incident.kind.name == "corrupt-checkpoint":
        [row] = [row for row in verify_rows(records.run.root, None) if row["damage"]]
        return f"{row['name']}  DAMAGED  {row['damage'][0]['file']}"
    if not incident.kind.cause:
        return f'"loss":{records.events(0, "step")[0]["loss"]}'
    return next(finding.sentence for finding in find_causes(folder) if finding.cause == incident.kind.cause)
