"""Tests of the lookup of rollouts: every record of the log has one fate, and the fates add up to the account."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from meshwright.base.history.rollout_counts import DROP_CAUSES
from meshwright.errors import ConfigError, DataError
from meshwright.rl.log.open_log import open_rollout_reader
from meshwright.rl.lookup.lookup import RolloutLookup, is_rollout_run, open_rollout_lookup
from meshwright.rl.lookup.steps import read_rollout_steps
from tests.kit.written_rollouts import GROUP_SIZE, WrittenRollouts, write_restarted_run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> WrittenRollouts:
    return write_restarted_run(tmp_path_factory.mktemp("rollouts") / "run")


@pytest.fixture(scope="module")
def lookup(run) -> RolloutLookup:
    return open_rollout_lookup(run.folder.root)


def test_step_lists_its_rollouts_with_version_staleness_and_text(lookup):
    shown = lookup.show(0)
    assert [row["id"] for row in shown["rollouts"]] == ["0.0@1.0", "0.1@1.0", "3.0@1.0", "3.1@1.0"]
    assert [row["rank"] for row in shown["rollouts"]] == [0, 0, 1, 1]
    assert [row["micro_step"] for row in shown["rollouts"]] == [0, 1, 0, 1]
    first = shown["rollouts"][0]
    assert (first["prompt"], first["completion"], first["reward"], first["tokens"]) == ("copy a=", "a", 0.25, 2)
    assert [(left["group"], left["cause"]) for left in shown["left_out"]] == [(1, "no_signal"), (2, "failed")]
    assert (shown["attempt"], shown["completed"], shown["conserved"]) == (1, True, True)


def test_rank_restricts_the_rollouts_to_its_rows(lookup):
    assert [row["row"] for row in lookup.show(0, rank=1)["rollouts"]] == [2, 3]
    with pytest.raises(ConfigError, match="--rank 2: the run has 2 rank"):
        lookup.show(0, rank=2)


def test_step_of_another_layout_has_rows_and_no_ranks(tmp_path):
    run = write_restarted_run(tmp_path / "run")
    events = run.folder.events(0).read_text().replace('"layout":"replicate 2"', '"layout":"replicate 4"')
    run.folder.events(0).write_text(events)
    other = open_rollout_lookup(run.folder.root)
    assert {row["rank"] for row in other.show(0)["rollouts"]} == {None}
    assert [row["row"] for row in other.show(0)["rollouts"]] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="had another layout"):
        other.show(0, rank=0)


def test_repeated_step_is_that_of_the_last_attempt_that_completed_it(lookup):
    shown = lookup.show(2)
    assert (shown["attempt"], shown["repeated"], shown["lost_timeline"]) == (2, 1, False)


def test_step_that_is_not_on_record_is_an_error(lookup):
    with pytest.raises(ConfigError, match="no rollouts of step 50 are on record"):
        lookup.show(50)


def test_trained_rollout_is_found_with_step_attempt_rank_and_row(lookup):
    found = lookup.find("3.1@1.0")
    (record,) = found["records"]
    assert (found["fate"], record["step"], record["attempt"], record["staleness"]) == ("trained", 0, 1, 0)
    (row,) = record["rollouts"]
    assert (row["rank"], row["row"], row["micro_step"]) == (1, 3, 1)


def test_duplicate_is_found_beside_the_record_that_was_trained(lookup):
    assert [record["fate"] for record in lookup.find("0")["records"]] == ["trained", "duplicate"]


def test_group_without_reward_is_found_with_its_failure(lookup):
    found = lookup.find("2")
    assert (found["fate"], found["records"][0]["failure"]) == ("failed", "the reward raised ValueError: no")


def test_fates_of_all_records_add_up_to_the_account(run, lookup):
    """The lookup shares no code with the queue that counted."""
    last = read_rollout_steps(run.folder, lambda *_: True).counted()[-1]
    counted = Counter[str]()
    groups = set()
    for group in range(40):
        for record in lookup.find(str(group))["records"]:
            groups.add(group)
            if record["position"] < last.log.to_json():
                fate = record["fate"]
                # what waits at the last step may have been judged since then
                later = record["step"] is None and fate == "stale"
                counted["in_flight" if later else fate] += len(record["rollouts"])
    expected = {"trained": last.counts.trained, "in_flight": last.counts.in_flight, **last.counts.dropped}
    assert counted == Counter({fate: amount.rollouts for fate, amount in expected.items() if amount.rollouts})
    assert {"trained", "duplicate", "lost_timeline", "no_signal", "failed"} <= set(counted)
    assert max(groups) < 40


def count_fates(run: WrittenRollouts) -> tuple[list[tuple[int, int]], Counter[str]]:
    """(step, attempt) of the steps that count, and the rollouts of every fate before the last of them."""
    counted = read_rollout_steps(run.folder, lambda *_: True).counted()
    lookup, fates = open_rollout_lookup(run.folder.root), Counter[str]()
    for group in range(40):
        for record in lookup.find(str(group))["records"]:
            if record["position"] < counted[-1].log.to_json():
                fates[record["fate"]] += len(record["rollouts"])
    amounts = counted[-1].counts
    expected = {"trained": amounts.trained, "in_flight": amounts.in_flight, **amounts.dropped}
    assert fates == Counter({fate: amount.rollouts for fate, amount in expected.items() if amount.rollouts})
    return [(step.step, step.attempt) for step in counted], fates


def test_rollouts_before_a_fork_are_trained_and_those_in_flight_are_dropped(tmp_path):
    run = WrittenRollouts(tmp_path / "run")
    run.begin()
    run.complete(2)
    run.generate(3)  # one more than the next step takes: it is in flight at the fork
    cursor = run.step().cursor
    run.begin(cursor, fork=True)
    run.complete(2)
    run.close()
    steps, fates = count_fates(run)
    assert steps == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)]
    assert (fates["trained"], fates["lost_timeline"]) == (5 * 2 * GROUP_SIZE, GROUP_SIZE)
    lookup = open_rollout_lookup(run.folder.root)
    assert not lookup.show(0)["lost_timeline"]
    found = lookup.find("0.0@1.0")
    assert (found["fate"], found["lost_training"], found["records"][0]["on_lineage"]) == ("trained", [], True)
    assert found["lineage"] == {"ended": [[1, 3]], "timeline": 2}


def test_history_follows_restarts_and_forks_of_forks(tmp_path):
    run = WrittenRollouts(tmp_path / "run")
    run.begin()
    first = run.complete(1)
    run.complete(2)
    run.begin(first)  # steps 1 and 2 of attempt 1 are lost
    second = run.complete(1)
    run.complete(1)
    run.begin(second, fork=True)  # step 2 of attempt 2 is lost
    third = run.complete(2)
    run.complete(1)
    run.begin(third)  # step 4 of attempt 3 is lost
    run.complete(1)
    assert count_fates(run)[0] == [(0, 1), (1, 2), (2, 3), (3, 3), (4, 4)]
    run.begin(first, fork=True)  # before the first fork
    run.complete(2)
    run.close()
    assert count_fates(run)[0] == [(0, 1), (1, 5), (2, 5)]


def test_every_rollout_is_trained_at_most_once(lookup):
    for group in range(40):
        fates = [record["fate"] for record in lookup.find(str(group))["records"]]
        assert fates.count("trained") <= 1


def test_lost_training_is_evidence_of_a_rollout_that_was_trained_again(lookup):
    repeated = [found for group in range(40) if (found := lookup.find(str(group)))["lost_training"]]
    assert {lost["why"] for found in repeated for lost in found["lost_training"]} == {"lost_timeline"}
    assert {found["fate"] for found in repeated} == {"trained"}


def test_rollout_that_is_too_old_is_stale(run, lookup):
    frontier = read_rollout_steps(run.folder, lambda *_: True).counted()[-1].frontier
    assert "stale" in [record["fate"] for record in lookup.find(str(frontier))["records"]]


def test_group_that_waits_is_in_flight_and_later_ones_were_never_generated(run, lookup):
    frontier = read_rollout_steps(run.folder, lambda *_: True).counted()[-1].frontier
    assert lookup.find(str(frontier))["fate"] == "in_flight"
    missing = lookup.find(str(frontier + 1000))
    assert (missing["fate"], missing["frontier"]) == ("never_generated", frontier)
    assert lookup.find("0.0@9.9")["other_versions"] == ["1.0"]


@pytest.mark.parametrize("name", ["x", "1.2", "1.0@1", "-1", "1.0@1.0.0", "9" * 30, "1.0@1.0\n"])
def test_id_that_is_none_is_refused(lookup, name):
    with pytest.raises(ConfigError, match="is not the id of a rollout"):
        lookup.find(name)


def test_index_beyond_the_group_is_refused(lookup):
    with pytest.raises(ConfigError, match=f"a group has {GROUP_SIZE} rollouts"):
        lookup.find(f"0.{GROUP_SIZE}@1.0")


def test_damaged_record_is_named_and_its_training_is_still_known(tmp_path):
    run = write_restarted_run(tmp_path / "run")
    reader = open_rollout_reader(run.folder, "0123456789abcdef")
    position = next(iter(reader.scan())).position
    reader.close()
    file = tmp_path / "run" / "rollouts" / "00000001.log"
    content = bytearray(file.read_bytes())
    content[position.offset + 100] ^= 1
    file.write_bytes(content)
    lookup = open_rollout_lookup(run.folder.root)
    with pytest.raises(DataError, match="damaged"):
        lookup.show(0)
    found = lookup.find("0.0@1.0")
    assert found["damaged"][0]["position"] == position.to_json()
    trained = next(record for record in found["records"] if record["fate"] == "trained")
    assert (trained["step"], "damaged" in trained["problem"]) == (0, True)


def test_log_of_another_run_is_refused(tmp_path):
    run = write_restarted_run(tmp_path / "run")
    identity = json.loads(run.folder.identity_file.read_text())
    run.folder.identity_file.write_text(json.dumps(identity | {"run": "fedcba9876543210"}))
    with pytest.raises(DataError, match="run"):
        open_rollout_lookup(run.folder.root).show(0)


@pytest.mark.parametrize(
    "change", [{"rl.group_size": 0}, {"rl.group_size": 3}, {"rl.group_size": "2"}, {"rl.staleness": -1}]
)
def test_identity_that_no_run_writes_is_refused(run, tmp_path, change):
    identity = json.loads(run.folder.identity_file.read_text())
    (tmp_path / "identity.json").write_text(json.dumps(identity | {"identity": identity["identity"] | change}))
    with pytest.raises(ConfigError, match="not a valid identity record"):
        open_rollout_lookup(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"groups": None},
        {"groups": [[0]]},
        {"groups": [[-1, [1, 0], 3]], "positions": [[1, 64]]},
        {"groups": [], "dropped": []},
        {"positions": []},
        {"dropped": [[1, [1, 0], "lost"]]},
        {"counts": {}},
        {"lineage": 7},
        {"log": [0, 0]},
    ],
)
def test_record_that_no_run_writes_is_missing(run, tmp_path, change):
    lines = [json.loads(line) for line in run.folder.events(0).read_text().splitlines()]
    (tmp_path / "run" / "events").mkdir(parents=True)
    changed = [event | (change if event["kind"] == "rollouts" else {}) for event in lines]
    content = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in changed)
    (tmp_path / "run" / "events" / "rank-00000.jsonl").write_text(content)
    folder = type(run.folder)(tmp_path / "run")
    assert read_rollout_steps(folder, lambda *_: True).counted() == [] or "lineage" in change


def test_run_on_samples_is_no_rollout_run(tmp_path):
    assert not is_rollout_run(tmp_path / "absent")
    (tmp_path / "identity.json").write_text('{"identity": {"rl.objective": "none"}}')
    assert not is_rollout_run(tmp_path)
    (tmp_path / "identity.json").write_text("[]")
    assert not is_rollout_run(tmp_path)


def test_causes_of_the_text_are_those_of_the_queue():
    from meshwright.insight.terminal.rollout_text import CAUSES

    assert set(CAUSES) == set(DROP_CAUSES)


def test_record_that_was_in_flight_in_a_checkpoint_and_is_damaged_since_is_damaged(tmp_path, monkeypatch):
    run = write_restarted_run(tmp_path / "run")
    lookup = open_rollout_lookup(run.folder.root)
    found = [(group, record) for group in range(40) for record in lookup.find(str(group))["records"]]
    group, record = next(each for each in found if each[1]["fate"] == "lost_timeline")
    file = tmp_path / "run" / "rollouts" / "00000001.log"
    content = bytearray(file.read_bytes())
    content[record["position"][1] + 100] ^= 1
    file.write_bytes(content)
    name = f"{group}.0@{record['version']}"
    assert lookup.find(name)["fate"] == "never_generated"  # nothing says whose record is damaged
    manifest = SimpleNamespace(data={"in_flight": [[group, *record["position"]]]})
    entries = [SimpleNamespace(manifest=None), SimpleNamespace(manifest=manifest)]
    monkeypatch.setattr("meshwright.rl.lookup.lookup.list_published", lambda _store: entries)
    assert lookup.find(name)["fate"] == "damaged"
