"""Thousands of schedules of learners, generators and faults: no schedule breaks a rule, and three wrong queues do."""

from __future__ import annotations

from functools import lru_cache

import pytest

from meshwright.rl.queue import RolloutQueue
from meshwright.rl.queue.step_batch import GroupHeader
from meshwright.rl.rollout import RolloutGroup
from tests.rl.queue.queue_simulation import BrokenRule, Simulation, trained_sequence

SCHEDULES = 25


@pytest.fixture(autouse=True)
def decode_once(monkeypatch):
    """The recount reads the whole log after every step: a record is decoded once only, which halves the time."""
    monkeypatch.setattr(RolloutGroup, "decode", staticmethod(lru_cache(10_000)(RolloutGroup.decode)))


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("policy", ["newest", "fixed"])
def test_random_schedules_keep_every_rule(policy, staleness):
    verdicts = set()
    for seed in range(SCHEDULES):
        simulation = Simulation(seed, policy, staleness)
        simulation.run()
        verdicts |= set(simulation.verdicts)
    expected = {"accepted", "duplicate", "lost_timeline", "not_permitted", "invalid"}
    # the schedules reach every judgement; a version that would be stale is not permitted under `fixed`
    assert verdicts | {"stale"} == expected | {"stale"}
    assert policy == "fixed" or "stale" in verdicts


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_fixed_policy_trains_what_an_undisturbed_run_trains(staleness):
    for seed in range(SCHEDULES):
        undisturbed = Simulation(seed, "fixed", staleness, disturbed=False).run()
        disturbed = Simulation(seed, "fixed", staleness).run()
        assert trained_sequence(disturbed) == trained_sequence(undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["newest", "fixed"])
def test_thousands_of_random_schedules_keep_every_rule(policy):
    for seed in range(1000, 2500):
        batches = Simulation(seed, policy, staleness=seed % 4).run()
        if policy == "fixed":
            undisturbed = Simulation(seed, policy, staleness=seed % 4, disturbed=False).run()
            assert trained_sequence(batches) == trained_sequence(undisturbed)


class SkipsLineage(RolloutQueue):
    def _judge(self, header: GroupHeader):
        verdict = super()._judge(header)
        if verdict == "lost_timeline" and header.group >= self._frontier and header.group not in self._present:
            return "accepted"
        return verdict


class TrainsDuplicates(RolloutQueue):
    """A record of a consumed group moves the frontier back."""

    def _judge(self, header: GroupHeader):
        verdict = super()._judge(header)
        return "accepted" if verdict == "duplicate" and header.group >= self._frontier else verdict


class CountsDuplicatesAsTrained(RolloutQueue):
    def _place(self, header: GroupHeader):
        verdict = super()._place(header)
        if verdict == "duplicate":
            self._counts = self._counts.drop("duplicate", type(header.amount)() - header.amount).train(header.amount)
        return verdict


class OneStepTooStale(RolloutQueue):
    def _stale(self, version):
        return version.step < self._next_step - self.settings.staleness - 1


class LosesInFlight(RolloutQueue):
    """A restart forgets the groups in flight and still counts them."""

    def _restore_in_flight(self, cursor):
        super()._restore_in_flight(cursor)
        self._present.clear()
        self._first_missing = self._frontier


class NewestForFixed(RolloutQueue):
    """Assigns the newest version where the fixed one is older."""

    def _other_policy(self, group, version):
        return False

    def assign(self, generator):
        assignment = super().assign(generator)
        if assignment is None:
            return None
        return type(assignment)(assignment.group, self._published, assignment.prompt_id)


WRONG_QUEUES = [SkipsLineage, TrainsDuplicates, CountsDuplicatesAsTrained, OneStepTooStale, LosesInFlight]


@pytest.mark.parametrize("wrong", WRONG_QUEUES)
def test_simulation_finds_a_wrong_queue(wrong):
    found = 0
    for seed in range(30):
        try:
            Simulation(seed, "newest", 1, queue_class=wrong).run()
        except BrokenRule:
            found += 1
    assert found >= 3


def test_simulation_finds_a_fixed_policy_that_depends_on_arrival():
    different = 0
    for seed in range(30):
        undisturbed = Simulation(seed, "fixed", 1, disturbed=False).run()
        try:
            wrong = Simulation(seed, "fixed", 1, queue_class=NewestForFixed).run()
            different += trained_sequence(wrong) != trained_sequence(undisturbed)
        except BrokenRule:  # its groups may be refused for ever
            different += 1
    assert different >= 1
