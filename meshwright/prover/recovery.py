"""Checks recovery: runs of the config that are killed, damaged and moved to another layout continue bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from meshwright.base.config import RunConfig
from meshwright.base.records.failures import RanksFailed
from meshwright.base.records.incidents import read_incidents
from meshwright.base.records.phases import STEP_PHASES
from meshwright.base.topology.layout import Layout
from meshwright.errors import RestartsExhausted
from meshwright.prover.claims import Claim, describe_settings, proof_folder
from meshwright.prover.custom.subject import Subject
from meshwright.prover.oracle.optimizer import learning_rate, step_seed
from meshwright.prover.shrink.runs import changes
from meshwright.prover.state.checkpoint_content import (
    CheckpointContent,
    compare_tensors,
    compare_with_memory,
    published_checkpoints,
)
from meshwright.prover.state.comparison import Reference, compare_values, find_difference, make_reference
from meshwright.prover.state.damage import DAMAGES, DamagedCheckpoint, damage_checkpoints
from meshwright.prover.state.large_files import check_large_files
from meshwright.prover.state.proof_run import RecordedRun
from meshwright.prover.state.recording import StateRecord
from meshwright.prover.state.recovery_configs import another_layout, kill_config, with_real_blocks
from meshwright.prover.state.shard_regions import check_real_layout, compare_regions

STEP_POINTS = tuple(f"step.{phase}" for phase in (*STEP_PHASES, "updated", "collective"))
SAVE_POINTS = (
    "stage",
    "begin",
    "write",
    "after_shard",
    "after_part",
    "before_manifest",
    "before_publish",
    "after_publish",
)
KILL_POINTS = (
    "start.begin",
    *STEP_POINTS,
    "evaluate",
    *(f"save.{part}" for part in SAVE_POINTS),
    "retain.unpublished",
    "start.restore",
    "start.restored",
    "end",
)
"""Every fail point of a run, in the order of the kills: one per attempt, the first of them in attempt 1."""
RANK_0_POINTS = ("save.before_manifest", "save.before_publish", "save.after_publish", "retain.unpublished")
"""Fail points that only rank 0 reaches."""
STEPS_PER_KILL = {"sync": 1, "async": 2}
"""Steps between two kills, so that asynchronous saves complete in between and kills hit different steps."""
WRITER_DELAYS = (0.15, 1.0, 7.0)
"""Seconds by which the writer of an asynchronous save is delayed, in turn until training overtakes it."""
NONFINITE_STEPS = (1, 2, 7)
"""Steps whose loss is made NaN, so that the counters and the loss scale are not trivial."""


def kill_schedule(ranks: int, steps_per_kill: int) -> str:
    """The faults, one kill per attempt, each some steps later and on the next rank."""
    faults = []
    for restart, point in enumerate(KILL_POINTS):
        rank = 0 if point in RANK_0_POINTS else restart % ranks
        # The start, the end and the deletion of a checkpoint belong to no step of the run: the first time counts.
        step = "" if point.startswith(("start", "retain", "end")) else f"@step{steps_per_kill * restart + 1}+"
        faults.append(f"{point}:rank{rank}:kill{step}#{restart}")
    return ",".join(faults)


def nonfinite_faults() -> str:
    return ",".join(f"step.backward:rank0:nan@step{step}x1000" for step in NONFINITE_STEPS)


def check_recovery(config: RunConfig, subject: Subject | None = None) -> Iterator[Claim]:
    """Runs the config undisturbed, killed at every fail point, and with damaged checkpoints on another layout. With a
    `subject`, a user's model and data run; the regions of its shards have no formulas.
    """
    if subject is None:
        yield check_real_layout(config)
    yield check_large_files()
    with proof_folder() as base:
        yield from check_kills(config, base, subject)
        yield from check_damage_and_reshard(config, base / "resharded", subject)


def check_kills(user: RunConfig, base: Path, subject: Subject | None = None) -> Iterator[Claim]:
    """An undisturbed run with a delayed writer, and a killed run: their checkpoints, restarts and steps."""
    steps_per_kill = STEPS_PER_KILL["async" if user.checkpoint.mode == "async" else "sync"]
    config = kill_config(user, steps_per_kill * len(KILL_POINTS) + 4, subject is not None)
    layout, mode = Layout.from_config(config.layout), config.checkpoint.mode
    changed = changes(user, config)
    claim = f"{layout}{describe_settings(config)}, {mode} saves, {config.steps} steps: an undisturbed run completes"
    for delay in WRITER_DELAYS if mode == "async" else (0.0,):
        undisturbed = RecordedRun(user, config, base / f"undisturbed-{delay}", subject)
        if problem := train(undisturbed, f"{nonfinite_faults()},save.begin:slow={delay}"):
            yield Claim(claim, False, problem, changed)
            return
        if overtaken_checkpoints(undisturbed, delay):
            break
    yield Claim(claim, True, f"{len(undisturbed.events('checkpoint'))} checkpoints", changed)
    yield check_checkpoints(undisturbed, delay)
    yield check_seeds_and_rates(undisturbed, "before a restart")

    reference = make_reference(undisturbed.records())
    killed = RecordedRun(
        user,
        replace(
            config,
            checkpoint=replace(config.checkpoint, keep=2),
            launch=replace(config.launch, restarts=len(KILL_POINTS)),
        ),
        base / "killed",
        subject,
    )
    problem = train(killed, f"{nonfinite_faults()},{kill_schedule(layout.ranks, steps_per_kill)}")
    yield check_restarts(killed, problem)
    yield from check_killed_states(killed, reference)
    yield check_seeds_and_rates(killed, "after restarts")
    yield check_step_events(undisturbed, killed)


def check_checkpoints(run: RecordedRun, delay: float = 0.0) -> Claim:
    """Every published checkpoint contains the state of its step, although its writer was late."""
    batch = run.config.batch.global_
    layout, reference = Layout.from_config(run.config.layout), make_reference(run.records())
    contents = published_checkpoints(run.root)
    problems = []
    for content in contents:
        problems += [f"{content.folder.name}: {p}" for p in compare_with_memory(content, reference, layout, batch)]
        if run.subject is None:
            problems += [f"{content.folder.name}: {p}" for p in compare_regions(content, run.config)]
    overtaken = overtaken_checkpoints(run, delay)
    claim = "every checkpoint has the tensors, counters, scaler, seeds, learning rate and stream position of its step"
    measured = f"{len(contents)} checkpoints compared with the memory of {layout.ranks} ranks"
    if overtaken:
        claim += ", also when optimizer updates overtake the writer"
        measured += f", of which {overtaken} were overtaken by at least one update before their first byte"
    elif delay:
        measured += f"; that an update overtakes a writer was not observed with a writer {delay:g} s late"
    return Claim(claim, bool(contents) and not problems, "; ".join([*problems[:2], measured]))


def overtaken_checkpoints(run: RecordedRun, delay: float) -> int:
    """The checkpoints before whose first byte every rank had completed another update."""
    reference = make_reference(run.records())
    steps = [content.step for content in published_checkpoints(run.root)]
    return sum(all(updates_within(delay, of_rank, step) for of_rank in reference.values()) for step in steps)


def updates_within(seconds: float, states: dict[int, StateRecord], done: int) -> int:
    """The updates that completed within some seconds after a state was recorded."""
    start = states[done].time if done in states else float("-inf")
    return sum(state.done > done and state.time < start + seconds for state in states.values())


def check_restarts(killed: RecordedRun, problem: str) -> Claim:
    """Every kill happened, and every attempt began at the newest checkpoint that existed."""
    kills = [incident for incident in read_incidents(killed.folder) if incident.error_type == "Killed"]
    phases = ", ".join(dict.fromkeys(kill.phase for kill in kills))
    problems = [problem] if problem else []
    if not problem and len(kills) != len(KILL_POINTS):
        problems.append(f"{len(KILL_POINTS) - len(kills)} kills did not happen")
    published: dict[int, int] = {}
    events = killed.events("start", "restored", "checkpoint")
    restored = {event["attempt"] for event in events if event["kind"] == "restored"}
    killed_at_start = {number for number, point in enumerate(KILL_POINTS, 1) if point.startswith("start")}
    for event in events:
        attempt = event["attempt"]
        earlier = max((step for a, step in published.items() if a < attempt), default=-1)
        if event["kind"] == "checkpoint":
            published[attempt] = event["step"]
        elif event["kind"] == "start" and earlier >= 0 and attempt not in restored | killed_at_start:
            problems.append(f"attempt {attempt} restored no checkpoint, and step {earlier} had been published")
        elif event["kind"] == "restored" and event["step"] < earlier:
            problems.append(f"attempt {attempt} restored step {event['step']}, and step {earlier} had been published")
    kept = len(published_checkpoints(killed.root))
    if not problem and kept != killed.config.checkpoint.keep:
        problems.append(f"{kept} checkpoints are left, and checkpoint.keep = {killed.config.checkpoint.keep}")
    if not problem and published.get(max(published, default=0)) != killed.config.steps:
        problems.append("the last step has no checkpoint")
    return Claim(
        f"a run killed with SIGKILL at {len(KILL_POINTS)} fail points resumes each time from the newest checkpoint",
        not problems,
        "; ".join([*problems[:2], f"{len(kills)} kills (phases {phases}), {kept} checkpoints kept"]),
    )


def check_killed_states(killed: RecordedRun, reference: Reference) -> Iterator[Claim]:
    """What restarts restore and what the steps after them compute, each compared with the undisturbed run."""
    records = killed.records()
    restored = [state for of_rank in records.values() for state in of_rank if not state.step]
    difference = find_difference(reference, restored, "the state that attempt {attempt} starts with")
    attempts = {state.attempt for state in restored if state.done}
    tensors = {name for state in restored for name in state.tensors}
    yield Claim(
        "a restart restores bit for bit what an undisturbed run has in memory after as many steps",
        difference is None and bool(attempts),
        str(difference or f"{len(attempts)} restarts, {len(tensors)} tensors, counters, noise scale, scaler"),
    )
    wrong = {s.attempt for s in restored if find_difference(reference, [s]) is not None}
    steps = [s for of_rank in records.values() for s in of_rank if s.step and s.attempt not in wrong]
    steps = [state for state in steps if state.evaluated or not was_evaluated(reference, state)]
    difference = find_difference(reference, steps, "a step of attempt {attempt}")
    last = max((state.done for state in steps), default=0)
    left_out = f"; {len(wrong)} attempts that started with another state are left out" if wrong else ""
    yield Claim(
        "every step after a restart reads, computes and counts bit for bit what the undisturbed run does",
        difference is None and bool(steps) and (last == killed.config.steps or bool(wrong)),
        str(difference or f"{len(steps)} steps on {len(records)} ranks, up to step {last}") + left_out,
    )


def was_evaluated(reference: Reference, state: StateRecord) -> bool:
    """Whether an evaluation followed this step in the undisturbed run; a kill during it leaves the record before it."""
    expected = reference[state.rank].get(state.done)
    return expected is not None and expected.evaluated


def check_seeds_and_rates(run: RecordedRun, when: str) -> Claim:
    """The seed and the learning rate that each step used, compared with the definition."""
    config, layout = run.config, Layout.from_config(run.config.layout)
    problems, count = [], 0
    for rank, states in run.records().items():
        for state in states:
            if not state.step:
                continue
            step, count = state.done - 1, count + 1
            rate = learning_rate(step, config.steps, config.optimizer.lr, config.schedule)
            expected: dict[str, float] = {"seed": step_seed(config.seed, step, layout.data_coordinate(rank))}
            found = {"seed": state.step["seed"]}
            if abs(state.step["learning rate"] - rate) > 1e-12 * rate:
                expected["learning rate"], found["learning rate"] = rate, state.step["learning rate"]
            problems += [
                f"step {step} of attempt {state.attempt}: {text}" for _, text in compare_values(expected, found)
            ]
    return Claim(
        f"the seed and the learning rate of every step are functions of the step alone, {when}",
        count > 0 and not problems,
        problems[0] + f"; {len(problems)} of {count} steps" if problems else f"{count} steps on all ranks",
    )


def check_step_events(undisturbed: RecordedRun, killed: RecordedRun) -> Claim:
    """The events: every step and evaluation is recorded, with bitwise the numbers of the undisturbed run."""
    keys = ("loss", "grad_norm", "lr", "tokens", "loss_scale", "skipped", "noise_scale")
    problems = []
    for kind in ("step", "eval"):
        expected = {event["step"]: event for event in undisturbed.events(kind)}
        found = {event["step"]: event for event in killed.events(kind)}
        problems += [f"{kind} {step} is not recorded" for step in sorted(expected.keys() - found.keys())]
        problems += [f"{kind} {step} was never due" for step in sorted(found.keys() - expected.keys())]
        for step in sorted(expected.keys() & found.keys()):
            values = [{key: events[step].get(key) for key in keys} for events in (expected, found)]
            problems += [f"{kind} {step}: {text}" for _, text in compare_values(*values)]
    expected_end, end = (run.events("end")[-1:] for run in (undisturbed, killed))
    for before, after in zip(expected_end, end, strict=False):
        same = ("steps", "loss", "skipped", "parameters_digest", "evaluations")
        problems += [
            f"the end: {text}" for _, text in compare_values(*({k: e[k] for k in same} for e in (before, after)))
        ]
    problems += [] if end else ["the run did not end"]
    steps, evaluations = len(undisturbed.events("step")), len(undisturbed.events("eval"))
    return Claim(
        "every step and every evaluation is recorded with bitwise the numbers of the undisturbed run",
        not problems,
        "; ".join([*problems[:2], f"{len(problems)} differences in {steps} steps and {evaluations} evaluations"]),
    )


def check_damage_and_reshard(user: RunConfig, root: Path, subject: Subject | None = None) -> Iterator[Claim]:
    """Saves at every step; damages the newest checkpoints and resumes; then restarts on another layout and back."""
    own_model = subject is not None
    run = RecordedRun(user, with_real_blocks(user, len(DAMAGES) + 3, own_model), root, subject)
    layout, other = Layout.from_config(run.config.layout), another_layout(run.config, own_model)
    there = Layout.from_config(other.layout)
    claim = f"{layout}{describe_settings(run.config)}, {run.model}: a run that saves after every step completes"
    problem = train(run, nonfinite_faults())
    contents = published_checkpoints(run.root)
    if problem or len(contents) < run.config.steps:
        problem = problem or f"{len(contents)} checkpoints of {run.config.steps} steps were published"
        yield Claim(claim, False, problem, run.changes)
        return
    yield Claim(claim, True, f"{run.config.steps} steps", run.changes)
    yield check_checkpoints(run)
    damaged = damage_checkpoints(contents)
    problem = train(run, nonfinite_faults())
    yield check_damage(run, damaged, contents[-1 - len(damaged)], problem)
    if problem:
        return
    for attempt, config, direction in ((3, other, f"{layout} to {there}"), (4, run.config, f"{there} to {layout}")):
        moved = RecordedRun(user, config, run.root, subject)
        newest = next(reversed(published_checkpoints(run.root)), None)
        problem = train(moved, "", save_at_start=True)
        yield check_resharded(moved, newest, attempt, direction, problem)


def check_damage(run: RecordedRun, damaged: list[DamagedCheckpoint], intact: CheckpointContent, problem: str) -> Claim:
    """No damaged checkpoint is loaded: the events name each one, its file, and the one that was restored."""
    reported = {
        event["checkpoint"]: {item["file"] for item in event["damage"]}
        for event in run.events("damaged")
        if event["attempt"] == 2
    }
    restored = [event["checkpoint"] for event in run.events("restored") if event["attempt"] == 2]
    problems = []
    for checkpoint in damaged:
        if checkpoint.name in restored:
            problems.append(f"{checkpoint.name} was restored in spite of {checkpoint.what} ({checkpoint.files[0]})")
        elif checkpoint.name not in reported:
            problems.append(f"{checkpoint.what} in {checkpoint.name} was not reported")
        elif not reported[checkpoint.name] & set(checkpoint.files):
            problems.append(
                f"{checkpoint.what}: {checkpoint.files[0]} is damaged, reported is {reported[checkpoint.name]}"
            )
    if restored != [intact.folder.name] and not problems:
        problems.append(problem or f"restored was {restored}, expected {intact.folder.name}")
    return Claim(
        f"a damaged checkpoint is never loaded ({', '.join(checkpoint.what for checkpoint in damaged)})",
        not problems,
        "; ".join(problems[:2]) or f"{len(reported)} checkpoints reported with their files, {restored[0]} restored",
    )


def check_resharded(
    run: RecordedRun, source: CheckpointContent | None, attempt: int, direction: str, problem: str
) -> Claim:
    """The state that an attempt on another layout restores, and the steps and checkpoints that follow."""
    config, layout = run.config, Layout.from_config(run.config.layout)
    claim = f"a restart from {direction} restores every tensor, counter, the scaler and the stream position"
    records = {rank: [s for s in states if s.attempt == attempt] for rank, states in run.records().items()}
    records = {rank: states for rank, states in records.items() if states}
    if problem or source is None or not records:
        return Claim(claim, False, problem or ("no rank started" if source else "no checkpoint was left"))
    states = [of_rank[0] for of_rank in records.values()]
    restored = [event["checkpoint"] for event in run.events("restored") if event["attempt"] == attempt]
    if restored != [source.folder.name]:
        what = restored[0] if restored else "no checkpoint"
        return Claim(claim, False, f"{what} was restored, and the newest checkpoint is {source.folder.name}")
    problems = [f"started at step {s.done}, expected {source.step}" for s in states if s.done != source.step]
    if difference := compare_tensors(source, states, {}):
        problems.append(f"restored from {source.folder.name}: {difference}")
    for state in states:
        found = {name: state.small[f"counter {name}"] for name in source.manifest["counters"]}
        problems += [f"{t} (rank {state.rank})" for _, t in compare_values(source.manifest["counters"], found)]
        if state.small["gradient scaler"] != list(source.manifest["scaler"].values()):
            problems.append(f"the gradient scaler is {state.small['gradient scaler']}, not {source.manifest['scaler']}")
    ends = [event for event in run.events("end") if event["attempt"] == attempt]
    problems += [] if ends and ends[0]["steps"] == config.steps else ["the run did not end"]
    evaluated = [step for step, _ in ends[0]["evaluations"]] if ends else []
    due = [s - 1 for s in range(1, config.steps + 1) if s % config.eval.every == 0 or s == config.steps]
    if evaluated and evaluated != due:
        problems.append(f"evaluations are recorded at steps {evaluated}, expected {due}")
    written = [content for content in published_checkpoints(run.root) if content.attempt == attempt]
    reference = make_reference(records)
    for content in written:
        differences = [
            *compare_with_memory(content, reference, layout, config.batch.global_),
            *(compare_regions(content, config) if run.subject is None else ()),
        ]
        problems += [f"{content.folder.name}, written after it: {text}" for text in differences]
    tensors = {name for state in states for name in state.tensors}
    return Claim(
        claim,
        not problems,
        "; ".join(problems[:2]) or f"{len(tensors)} tensors of {run.model} on {layout.ranks} ranks, saved there again",
    )


def train(run: RecordedRun, faults: str, save_at_start: bool = False) -> str:
    """Trains; the reason if that fails, in one line, else ''. A signal ends the proof."""
    try:
        run.train(faults, save_at_start)
    except (RanksFailed, RestartsExhausted) as error:
        if error.exit_code > 128:
            raise
        lines: Iterable[str] = str(error).splitlines()
        return next(iter(lines), type(error).__name__)
    return ""
