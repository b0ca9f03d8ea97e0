"""The practice page: its answers tell nothing too early, its POST requests are guarded, and its queue is bounded."""

from __future__ import annotations

import inspect
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from meshwright_practice.cards.schedule import local_clock
from meshwright_practice.page.handbook import Chapter, find_chapters, handbook_folder, render_chapter
from meshwright_practice.page.jobs import MAX_MESSAGES, MAX_WAITING
from meshwright_practice.page.routes import serve_page
from meshwright_practice.progress import PracticeProgress, load_progress, progress_file, save_progress

from meshwright.base.cli.main import dispatch
from meshwright.errors import ConfigError
from tests.practice.cards.fake_cards import CHOSEN, PICTURED, PREDICTED, SLOW, WRONG

CARDS = {card.id: card for card in (PREDICTED, CHOSEN, WRONG, PICTURED, SLOW)}


class KeptRunner:
    """The server of experiments of the tests, which is started here and not ended with the page."""

    def __init__(self, runner):
        runner.start()
        self.run = runner.run

    def start(self):
        pass

    def interrupt(self):
        pass

    def close(self):
        pass


@pytest.fixture
def client(runner, home):
    server, stop = serve_page(cards=CARDS, runner=KeptRunner(runner))
    address = server.address.rstrip("/")
    with httpx.Client(base_url=address, timeout=60, headers={"origin": address}) as found:
        page = found.get("/").text
        found.headers["x-meshwright-token"] = page.partition('name="token" content="')[2].partition('"')[0]
        yield found
    stop()


def finish(client, answer):
    assert answer.status_code == 200, answer.text
    number = answer.json()["run"]
    with client.stream("GET", f"/api/runs/{number}/events") as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    assert events[-1]["state"] == "done"
    return events[-1]["result"], events


def start(client, card, **fields):
    return client.post("/api/runs", json={"card": card, **fields})


def test_a_review_on_the_page_is_graded_and_recorded(client):
    assert client.get("/api/queue").json()["new"] == 5
    result, events = finish(client, start(client, "fake-double", answers=["20"]))
    assert {event["state"] for event in events} >= {"done"}
    assert (result["rating"], result["recorded"], result["predictions"][0]["error"]) == ("hard", True, "25.0%")
    assert result["picture"]["type"] == "bars"
    assert result["relations"][0] == {
        "text": "Twice the size is sent.",
        "sides": "16 (doubled) = 16",
        "judged": True,
        "holds": True,
        "must_hold": True,
    }
    assert result["explanation"]["answer"] == "Twice the size."
    queue = client.get("/api/queue").json()
    assert (queue["new"], queue["reviewed_today"], queue["begun"]) == (4, 1, 1)
    assert len(load_progress(progress_file(), pytest.fail).cards["fake-double"]["reviews"]) == 1
    assert client.get("/api/cards/fake-double").json()["ratings"] == ["hard"]


def test_a_question_does_not_tell_its_answer(client):
    text = client.get("/api/cards/fake-claims").text
    assert [claim["letter"] for claim in json.loads(text)["claims"]] == ["a", "b", "c", "d"]
    for hidden in ("Twice", "true", "doubled", "mistake"):
        assert hidden not in text.replace('"is_new":true', "")
    assert client.get("/api/cards/fake-claims/explanation").json()["mistake"] == "Every byte is sent once."


def test_knobs_run_without_a_review(client):
    result, _ = finish(client, start(client, "fake-double", knobs={"size": "16"}))
    assert result["values"]["doubled"] == 32.0
    assert load_progress(progress_file(), pytest.fail).cards == {}


def test_a_card_that_is_wrong_here_is_not_recorded(client):
    result, _ = finish(client, start(client, "fake-wrong", answers=["16"]))
    assert (result["recorded"], result["problems"]) == (False, ["does not hold: Twice the size is sent."])
    assert "rating" not in result


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"card": "fake-dubble"}, "did you mean fake-double"),
        ({"card": "fake-double", "answers": ["much"]}, "expected a number"),
        ({"card": "fake-double", "answers": "16"}, "list of texts"),
        ({"card": "fake-double", "knobs": {"size": "9"}}, "expected one of 8, 16"),
        ({"card": "fake-double", "knobs": {"a": 1, "b": 2}}, "not those of the card"),
        ({"card": 3}, "names no card"),
        ([], "names no card"),
    ],
)
def test_mistakes_are_answered_with_what_is_expected(client, body, message):
    answer = client.post("/api/runs", json=body)
    assert answer.status_code == 400
    assert message in answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-meshwright-token": ""}, 403),
        ({"x-meshwright-token": "x" * 43}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"host": "evil.example"}, 421),
    ],
)
def test_post_requests_need_the_token_the_origin_and_a_bounded_body(client, headers, status):
    content = b'{"card": "fake-double"}'
    sent = {"content-type": "application/json"} | headers
    request = client.build_request("POST", "/api/runs", content=content, headers=sent)
    assert client.send(request).status_code == status
    assert client.get("/api/runs/1").status_code == 404


def test_a_long_body_is_rejected(client):
    assert start(client, "x" * 20_000).status_code == 413


def test_a_body_without_a_length_is_rejected(client):
    def chunks():
        yield b'{"card": "fake-double"}'

    answer = client.post("/api/runs", content=chunks(), headers={"content-type": "application/json"})
    assert answer.status_code == 411


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_are_rejected(client, method):
    assert client.request(method, "/api/runs").status_code == 405


def test_the_queue_of_experiments_is_bounded_and_runs_one_at_a_time(client):
    answers = [start(client, "fake-slow") for _ in range(MAX_WAITING + 3)]
    codes = [answer.status_code for answer in answers]
    assert codes.count(200) in (MAX_WAITING, MAX_WAITING + 1)  # the first one may be running already
    assert set(codes) == {200, 429}
    runs = [answer.json()["run"] for answer in answers if answer.status_code == 200]
    states = [client.get(f"/api/runs/{run}").json()["state"] for run in runs]
    assert states.count("running") <= 1
    deadline = time.monotonic() + 120
    while client.get(f"/api/runs/{runs[-1]}").json()["state"] != "done" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert {client.get(f"/api/runs/{run}").json()["state"] for run in runs} == {"done"}


def test_only_files_of_the_page_are_served(client):
    assert client.get("/static/practice.js").status_code == 200
    assert client.get("/static/meshwright.css").status_code == 200
    for path in (
        "/static/../routes.py",
        "/static/..%2froutes.py",
        "/static/%2fetc%2fpasswd",
        "/api/handbook/..%2f..%2fREADME",
    ):
        assert client.get(path).status_code in (400, 404)
    page = client.get("/")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["cache-control"] == "no-store"


def test_progress_shows_what_is_there_and_survives_odd_entries(client):
    labs = {"ring": {"passed": True, "attempts": 2, "checks_passed": 3, "checks": 8}, "odd": [1], "x" * 500: {"y": {}}}
    gates = {"gates": {"a": True, "b": False}, "finished": False}
    save_progress(
        PracticeProgress(labs=labs, incidents={"0001": {"state": "answered"}}, interviews={"one": gates}),
        progress_file(),
    )
    found = client.get("/api/progress").json()["sections"]
    assert found["labs"]["entries"][0] == {"name": "ring", "fields": labs["ring"]}
    assert [section["done"] for section in found.values()] == [1, 1, 0]
    assert found["interviews"]["entries"][0]["fields"]["gates"] == "1 of 2"
    assert len(found["labs"]["entries"][2]["name"]) == 120


def test_a_damaged_progress_file_is_reported_on_the_page(client):
    assert client.get("/api/progress").json()["messages"] == []
    progress_file().parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, MAX_MESSAGES + 3):
        progress_file().write_text("{")
        messages = client.get("/api/queue").json()["messages"]
        assert f"practice.json.damaged-{number}" in messages[-1]
    assert len(messages) == MAX_MESSAGES
    assert client.get("/api/progress").json()["messages"] == messages
    script = client.get("/static/practice.js").text
    assert script.count("notices(queue.messages)") == script.count("notices(messages)") == 1


def test_a_progress_file_of_a_newer_version_is_named_and_kept(client):
    progress_file().parent.mkdir(parents=True, exist_ok=True)
    progress_file().write_text('{"format": 2}')
    answer = client.get("/api/queue")
    assert (answer.status_code, progress_file().read_text()) == (400, '{"format": 2}')
    assert "newer version of Meshwright" in answer.text


def test_the_page_is_served_on_loopback_alone(client):
    assert client.base_url.host == "127.0.0.1"
    assert "host" not in inspect.signature(serve_page).parameters


def test_no_chapter_of_the_handbook_shows_raw_html():
    chapters = find_chapters(handbook_folder())
    assert "formulas" in chapters
    for chapter in chapters.values():
        html = render_chapter(chapter, chapters)
        assert "&lt;" not in html, chapter.name
        assert "needs JavaScript" not in html
        assert not re.search("<(?:script|div|iframe|img)", html)
    assert "documentation site" in render_chapter(chapters["formulas"], chapters)
    assert "<br>" in render_chapter(chapters["coverage"], chapters)


def test_chapters_are_rendered_without_raw_html_and_link_to_each_other(tmp_path):
    (tmp_path / "index.md").write_text(
        "# The map\n\nSee [sharding](sharding.md#x) and [code](../../meshwright/base/io.py).\n"
    )
    (tmp_path / "sharding.md").write_text(
        "# Sharding\n\n<script>alert(1)</script> <img onerror=alert(2)> <!-- call: f() -->12<!-- end -->\n\n"
        "| a |\n|---|\n| 1 |\n\n[x](javascript:alert(1))"
    )
    chapters = find_chapters(tmp_path)
    assert [chapter.title for chapter in chapters.values()] == ["The map", "Sharding"]
    first = render_chapter(chapters["index"], chapters)
    assert '<a href="#/handbook/sharding">' in first
    assert '<a class="inert">code' in first
    second = render_chapter(chapters["sharding"], chapters)
    assert "<script" not in second
    assert "alert(1)" not in second.replace("javascript:alert(1)", "")
    assert "&lt;img onerror=alert(2)&gt;" in second
    assert "call:" not in second
    assert "<table>" in second
    assert "javascript:" not in second.replace("[x](javascript:alert(1))", "")
    assert find_chapters(None) == {}
    assert isinstance(chapters["index"], Chapter)


def test_the_overview_says_what_is_due_and_where_to_go(monkeypatch, capsys, home):
    monkeypatch.setattr("meshwright_practice.cards.registry.all_cards", lambda: CARDS)
    save_progress(PracticeProgress(labs={"ring": {"passed": True}}), progress_file())
    dispatch(["practice"])
    text = capsys.readouterr().out
    for part in ("0 due, 5 new", "1 done of 1 begun", "meshwright practice cards", "meshwright practice --page"):
        assert part in text
    dispatch(["practice", "--json"])
    assert json.loads(capsys.readouterr().out)["cards"]["new"] == 5
    with pytest.raises(ConfigError, match="expected --page --port N"):
        dispatch(["practice", "--port", "1"])


def test_ctrl_c_ends_the_page_and_the_server_of_experiments(home):
    command = [sys.executable, "-m", "meshwright", "practice", "--page"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().split()[1]
        assert "Meshwright practice" in httpx.get(address, timeout=60).text
        children = Path(f"/proc/{process.pid}/task").glob("*/children")
        servers = [int(pid) for path in children for pid in path.read_text().split()]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert servers
    assert not [pid for pid in servers if Path(f"/proc/{pid}").exists()]


def test_the_clock_has_a_time_zone():
    assert local_clock().tzinfo is not None
