"""A history that follows a run for a long time keeps a bounded number of steps of every rank."""

from __future__ import annotations

from meshwright.base.history.rank_steps import NEWEST_STEPS, RankSteps
from meshwright.base.records.events import EventLog

STEPS = 5 * NEWEST_STEPS


def test_steps_of_other_ranks_are_thinned_while_the_run_goes_on(tmp_path):
    path = tmp_path / "events.jsonl"
    tables = {}
    for rank in (0, 1):
        records = RankSteps(path, rank, 2)
        log = EventLog(path, 1, rank)
        for step in range(STEPS):
            log.write("step", step=step, seconds=0.5)
            if step % 500 == 0:
                records.update(lambda event: None)
        records.update(lambda event: None)
        log.close()
        path.unlink()
        tables[rank] = records.table
        assert records.totals.steps == records.totals.buckets[-1] == STEPS  # steps that are not kept count, too
        assert records.totals.seconds == STEPS * 0.5
    assert len(tables[0]) == STEPS
    steps = tables[1].step.tolist()
    assert NEWEST_STEPS < len(steps) <= 2 * NEWEST_STEPS
    assert steps == sorted(set(steps))
    assert steps[0] == 0
    assert steps[-NEWEST_STEPS // 2 :] == list(range(STEPS - NEWEST_STEPS // 2, STEPS))
