"""Every class of incidents runs as it was drawn: its records show the truth, and the score tells it from others."""

from __future__ import annotations

import time

import pytest
from incident_truths import TRUTHS, Records, quotation

from meshwright.practice.incidents.acts import perform
from meshwright.practice.incidents.answer import IncidentAnswer
from meshwright.practice.incidents.catalogue import CLASSES, FIXES
from meshwright.practice.incidents.evidence import find_causes, printed_lines
from meshwright.practice.incidents.incident import draw_incident, write_seal
from meshwright.practice.incidents.job import RUN_FOLDER, read_job, start_job, stop_job
from meshwright.practice.incidents.scoring import score_answer
from meshwright.practice.incidents.story import story_text, tell_story

STEPS = 40
VARIED = ("straggler", "bubble", "hang", "nan")
"""Classes that a second seed draws in another form."""
SECONDS = 200.0
"""Seconds after which a job counts as stuck; one takes 10 to 60."""


def run_in_background(folder, incident):
    """Runs an incident as the command does."""
    write_seal(folder, incident)
    start_job(folder)
    deadline = time.monotonic() + SECONDS
    try:
        while read_job(folder).status == "running":
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        stop_job(folder)
    assert read_job(folder).status == "ended", (folder / "job.log").read_text()[-3000:]


def right_answer(incident, history, evidence):
    window = incident.step_window(history)
    rank = incident.arrangement.rank
    return IncidentAnswer(
        incident.kind.name, "none" if rank is None else rank, window or "none", incident.kind.fix, evidence
    )


def check_incident(folder, incident):
    """The records, the diagnosis, the story and the score of an incident that has run."""
    records = Records(folder, incident)
    TRUTHS[incident.kind.name](records)
    findings = find_causes(folder)
    story = tell_story(incident, folder, findings)
    assert story.diagnose_names_it == bool(incident.kind.cause), [finding.sentence for finding in findings]
    assert incident.kind.meaning in story_text(story)
    assert findings[0].sentence.split()[0] in story_text(story)
    lines = printed_lines(folder, findings)
    right = right_answer(incident, records.history, quotation(folder, incident))

    def score(**changes):
        answer = IncidentAnswer(**(vars(right) | changes))
        return score_answer(answer, incident, records.history, lines, 0.0, 0)

    assert score().total == score().truth == 100, score().fields
    other_class = next(name for name in CLASSES if name != incident.kind.name)
    other_fix = next(name for name in FIXES if name != incident.kind.fix)
    assert score(name=other_class).truth == 60
    assert score(rank=7).truth == 85
    assert score(steps=(100_000, 100_001)).truth == 85
    assert score(fix=other_fix).truth == 85
    assert score(evidence="123.45 parsecs").truth == 85
    assert score(evidence=None).truth == 85


def test_every_class_has_a_check_of_its_records():
    assert set(TRUTHS) == set(CLASSES)


@pytest.mark.parametrize("name", ["nan", "wrong-normalisation"])
def test_incident_shows_in_its_records(name, tmp_path):
    """Without the launcher: the acts run in this process, which has imported torch already."""
    from meshwright.errors import NumericsError

    incident = draw_incident(3, CLASSES, name, STEPS)
    write_seal(tmp_path, incident)
    [act] = incident.arrangement.acts
    if name == "nan":
        with pytest.raises(NumericsError):
            perform(act, tmp_path / RUN_FOLDER)
        (tmp_path / "ended.json").write_text('{"outcome": "failed", "exit_code": 7}')
    else:
        perform(act, tmp_path / RUN_FOLDER)
    check_incident(tmp_path, incident)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "seed"), [*((name, 1) for name in CLASSES), *((name, 2) for name in VARIED)])
def test_incident_of_every_class(name, seed, tmp_path):
    incident = draw_incident(seed, CLASSES, name, STEPS)
    run_in_background(tmp_path, incident)
    check_incident(tmp_path, incident)
