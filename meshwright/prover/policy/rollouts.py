"""Checks rollouts: a run that is killed at every point of its loop trains each rollout at most once, and ends with the
digest of an undisturbed run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from meshwright.base.config import RunConfig
from meshwright.base.records.incidents import read_incidents
from meshwright.base.topology.layout import Layout
from meshwright.core.data.source import Source
from meshwright.prover.claims import Claim, describe_settings, proof_folder
from meshwright.prover.oracle.sampler import Sampler
from meshwright.prover.policy.audit import AuditedRollouts, LoggedGroup, check_counts, find_unlogged, read_history
from meshwright.prover.policy.recorded_run import PolicyRun
from meshwright.prover.shrink.policy_runs import killed_policy_run
from meshwright.prover.state.checkpoint_content import published_checkpoints
from meshwright.rl.tasks.prompt_source import open_prompt_source

SERVICE_POINTS = ("rollout.append", "rollout.committed")
"""Where the rollout service is killed, once per start, before the learner has its first batch."""
LEARNER_POINTS = (
    ("step.updated", 3),
    ("policy.publish", 3),
    ("policy.published", 5),
    ("save.before_publish", 6),
    ("save.after_publish", 6),
)
"""Where rank 0 of the learner is killed, and at which step: after the policy of step 3 has generated, between two
checkpoints, and around the publication of a checkpoint.
"""
GENERATOR_POINT = "generator.assigned"
RESTARTS = len(SERVICE_POINTS) + len(LEARNER_POINTS)


def kill_schedule(groups_per_step: int) -> str:
    """The faults: one kill per attempt of the learner. A generator dies when it is assigned a later group."""
    # One append has one group or several: at most the second step has begun when the second service dies.
    appends = zip(SERVICE_POINTS, (2, groups_per_step + 1), strict=True)
    service = [f"{point}:rank0:kill@step{append}#{start}" for start, (point, append) in enumerate(appends)]
    learner = [
        f"{point}:rank0:kill@step{step}#{restart}"
        for restart, (point, step) in enumerate(LEARNER_POINTS, len(SERVICE_POINTS))
    ]
    generator = f"{GENERATOR_POINT}:rank0:kill@step{2 * groups_per_step + 2}+#0"
    return ",".join([*service, *learner, generator])


def check_rollouts(user: RunConfig) -> Iterator[Claim]:
    """Runs the config undisturbed and killed, and audits both."""
    with proof_folder() as base:
        yield from check_killed_rollouts(user, base)


def check_killed_rollouts(user: RunConfig, base: Path) -> Iterator[Claim]:
    config = killed_policy_run(user, RESTARTS)
    layout, rl = Layout.from_config(config.layout), config.rl
    undisturbed = PolicyRun(user, config, base / "undisturbed")
    claim = (
        f"{layout}{describe_settings(config)}, {rl.objective}, staleness {rl.staleness}, {config.steps} steps: an "
        "undisturbed run completes"
    )
    problem = undisturbed.train()
    yield Claim(claim, not problem, problem or f"{len(undisturbed.events('rollouts'))} batches", undisturbed.changes)
    if problem:
        return
    killed = PolicyRun(user, config, base / "killed")
    problem = killed.train(kill_schedule(config.batch.global_ // rl.group_size))
    yield check_kills(killed, problem)
    if not published_checkpoints(killed.root):
        return
    log, run_id = killed.logged_groups(find_run_id(killed)), find_run_id(undisturbed)
    history = read_history(killed.events("rollouts"), rl.staleness)
    yield check_trained_once(killed, history, log)
    yield check_staleness(history, rl.staleness)
    yield check_lineage(history)
    yield check_conservation(killed, history, log)
    yield check_prompts(config, log, [open_prompt_source(config)])
    yield compare_runs(undisturbed, undisturbed.logged_groups(run_id), killed, log, problem)


def find_run_id(run: PolicyRun) -> str:
    """The id of the run, as its checkpoints name it."""
    return str(published_checkpoints(run.root)[-1].manifest["run"])


def check_kills(killed: PolicyRun, problem: str) -> Claim:
    """Every kill happened, and the run completed all the same."""
    problems = [problem] if problem else []
    ended = [incident for incident in read_incidents(killed.folder) if incident.outcome != "complete"]
    if not problem and len(ended) != RESTARTS:
        problems.append(f"{len(ended)} of {RESTARTS} attempts ended before the last step")
    if not problem and max((event["steps"] for event in killed.events("end")), default=0) != killed.config.steps:
        problems.append("the run did not end")
    service_log = (killed.root / "rollouts" / "service.log").read_text(errors="replace")
    generators = len(re.findall(r"generator \d+\.\d+ .*(?:SIGKILL|signal 9|killed)", service_log, re.IGNORECASE))
    if not problem and not generators:
        problems.append("no generator was killed")
    points = ", ".join([*SERVICE_POINTS, *(point for point, _ in LEARNER_POINTS), GENERATOR_POINT])
    return Claim(
        f"a run whose learner, rollout service and generator are killed ({points}) completes",
        not problems,
        "; ".join([*problems[:2], f"{len(ended)} attempts and {generators} generators ended by SIGKILL"]),
        killed.changes,
    )


def check_trained_once(killed: PolicyRun, history: AuditedRollouts, log: list[LoggedGroup]) -> Claim:
    problems = [*history.twice, *find_unlogged(history, log)]
    if len(history.steps) != killed.config.steps:
        problems.append(f"the history has {len(history.steps)} steps of {killed.config.steps}")
    steps = len(killed.events("rollouts"))
    return Claim(
        "each rollout is trained at most once in the history of any weights, in the order of the groups, and is in "
        "the rollout log",
        not problems and history.trained > 0,
        "; ".join([*problems[:2], f"{history.trained} groups in {steps} steps of all attempts, {len(log)} records"]),
    )


def check_staleness(history: AuditedRollouts, bound: int) -> Claim:
    return Claim(
        f"no step trains a rollout whose policy is more than {bound} steps old, also after a resume",
        not history.late and history.trained > 0,
        "; ".join([*history.late[:2], f"{history.trained} groups, at most {history.staleness} steps old"]),
    )


def check_lineage(history: AuditedRollouts) -> Claim:
    return Claim(
        "no step trains a rollout of a policy that a restart has lost",
        not history.lost and history.trained > 0,
        "; ".join([*history.lost[:2], f"{history.trained} groups of {len(set(history.timelines))} timelines"]),
    )


def check_conservation(killed: PolicyRun, history: AuditedRollouts, log: list[LoggedGroup]) -> Claim:
    problems, checkpoints = [], published_checkpoints(killed.root)
    lost = [0, 0]
    for content in checkpoints:
        problems += check_counts(history, log, content.attempt, content.manifest["data"])
        lost = content.manifest["data"]["counts"]["dropped"]["lost_timeline"]
    generated = checkpoints[-1].manifest["data"]["counts"]["generated"] if checkpoints else [0, 0]
    return Claim(
        "rollouts and tokens: generated = trained + dropped by cause + in flight, exactly, at every checkpoint",
        bool(checkpoints) and not problems,
        "; ".join(
            [
                *problems[:2],
                f"{len(checkpoints)} checkpoints; at the last one {generated[0]} rollouts of {generated[1]} tokens, of "
                f"which {lost[0]} of a lost policy",
            ]
        ),
    )


def check_prompts(config: RunConfig, log: list[LoggedGroup], sources: list[Source]) -> Claim:
    """The prompt of every group in the log is the one that the seed defines, by the independent sampler."""
    sampler = Sampler.from_config(config, [len(source) for source in sources])
    wrong = [record for record in log if record.prompt_id != sampler.sample(record.group)]
    first = f"group {wrong[0].group} has prompt {wrong[0].prompt_id}; " if wrong else ""
    return Claim(
        "the prompt of every group is the one that the seed defines, whoever generated it",
        bool(log) and not wrong,
        f"{first}{len(log) - len(wrong)} of {len(log)} records",
    )


def compare_runs(
    undisturbed: PolicyRun, expected: list[LoggedGroup], killed: PolicyRun, found: list[LoggedGroup], problem: str
) -> Claim:
    """The killed run ends with bitwise the state of the undisturbed one, and trained the same rollouts."""
    problems = [f"the killed run failed: {problem}"] if problem else []
    ends = [run.events("end")[-1:] for run in (undisturbed, killed)]
    digests = [end[0]["parameters_digest"] if end else "none" for end in ends]
    if digests[0] != digests[1]:
        problems.append(f"the digest is {digests[1][:16]}, and that of the undisturbed run {digests[0][:16]}")
    for step, (before, after) in enumerate(zip(*map(losses, (undisturbed, killed)), strict=False)):
        if before != after:
            problems.append(f"step {step}: loss and gradient norm are {after}, undisturbed {before}")
            break
    contents = [trained_contents(run, log) for run, log in ((undisturbed, expected), (killed, found))]
    different = [step for step, (a, b) in enumerate(zip(*contents, strict=False)) if a != b]
    if different:
        problems.append(f"step {different[0]} trained other rollouts than the undisturbed run")
    return Claim(
        "the killed run trains bitwise the rollouts of the undisturbed run, and ends with its digest",
        not problems and len(contents[1]) == killed.config.steps,
        "; ".join([*problems[:2], f"parameters digest {digests[0][:16]}, {len(contents[0])} steps of rollouts"]),
    )


def losses(run: PolicyRun) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step; if several attempts computed it, of the last."""
    by_step = {event["step"]: (event["loss"], event["grad_norm"]) for event in run.events("step")}
    return [by_step[step] for step in sorted(by_step)]


def trained_contents(run: PolicyRun, log: list[LoggedGroup]) -> list[list[str]]:
    """For every step of the history, the contents of the rollouts that it trained."""
    content: dict[tuple[int, tuple[int, int]], str] = {}
    for record in log:
        content.setdefault((record.group, record.version), record.content)
    history = read_history(run.events("rollouts"), run.config.rl.staleness)
    return [[content.get((n, version), "missing") for n, version, _ in step.trained] for step in history.steps]
