"""Every class of incidents runs as it was drawn: its records show the truth, and the score tells it from others."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

import pytest
from meshwright_practice.incidents.acts import perform
from meshwright_practice.incidents.answer import IncidentAnswer
from meshwright_practice.incidents.catalogue import CLASSES, FIXES
from meshwright_practice.incidents.evidence import find_causes, printed_lines
from meshwright_practice.incidents.incident import SEAL_FILE, draw_incident, write_seal
from meshwright_practice.incidents.job import RUN_FOLDER, read_job, start_job, stop_job
from meshwright_practice.incidents.scoring import score_answer
from meshwright_practice.incidents.story import story_text, tell_story

from tests.practice.incidents.incident_truths import TRUTHS, Records, quotation

STEPS = 40
VARIED = ("straggler", "bubble", "hang", "nan")
"""Classes that a second seed draws in another form."""
SECONDS = 200.0
"""Seconds after which a job counts as stuck; one takes 10 to 60."""


def run_in_background(folder, incident):
    """Runs an incident as the command does. Returns what other processes could see of its processes meanwhile."""
    write_seal(folder, incident)
    job = start_job(folder)
    deadline = time.monotonic() + SECONDS
    visible = {}
    try:
        while read_job(folder).status == "running":
            assert time.monotonic() < deadline
            visible |= visible_texts(job.pid)
            time.sleep(0.2)
    finally:
        stop_job(folder)
    assert read_job(folder).status == "ended", (folder / "job.log").read_text()[-3000:]
    return visible


def visible_texts(pid):
    """Process -> its arguments and its environment, for a process and its descendants."""
    texts, waiting = {}, [str(pid)]
    while waiting:
        process = waiting.pop()
        with suppress(OSError):  # it has ended
            found = [Path(f"/proc/{process}/{name}").read_text(errors="replace") for name in ("cmdline", "environ")]
            # pytest has the name of the test in the environment.
            texts[process] = "\0".join(text for text in "\0".join(found).split("\0") if "CURRENT_TEST" not in text)
            waiting += Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return texts


def check_hidden(folder, incident, visible):
    """Neither processes nor what is written about the job at its start say what is wrong."""
    run = folder / RUN_FOLDER
    files = [folder / SEAL_FILE, folder / "job.json", run / "run.toml", run / "identity.json"]
    texts = [*visible.values(), *(path.read_text() for path in files)]
    assert len(visible) > 2  # the launcher and its ranks
    hidden = [
        f for act in incident.arrangement.acts for f in (getattr(act, "fault", ""), getattr(act, "part", "")) if f
    ]
    words = [incident.kind.name, incident.kind.fix, *hidden]
    # `tokens` and `sequences` alone are words of every run file.
    patterns = [rf"\b{re.escape(word)}\b" for word in words if word not in ("tokens", "sequences")]
    assert not [pattern for pattern in patterns for text in texts if re.search(pattern, text)]
    assert not [text for text in visible.values() if "MESHWRIGHT_FAULT" in text]


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
    check_hidden(tmp_path, incident, run_in_background(tmp_path, incident))
    check_incident(tmp_path, incident)
