"""Episodes that train: undisturbed, with injected faults, and on another layout after a stop."""

from __future__ import annotations

import random

from fuzz.configs import (
    Tree,
    compares_with_one_rank,
    draw_config,
    on_one_rank,
    parse,
    rank_count,
    with_layout,
    with_placement,
)
from fuzz.episode import Episode
from fuzz.oracle import check_close, check_same, expect
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shards import uses_ddp

COLD = 0.08
"""The fraction of jobs that start `python -m meshwright` and its fork server."""
STEP_POINTS = ("fetch", "copy", "forward", "backward", "sync", "update", "updated", "collective")
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
OTHER_POINTS = ("start.begin", "evaluate", "retain.unpublished", "end")
ENDING = ("kill", "exit", "raise", "oom")
"""Actions that end a rank, after which the job restarts."""
DISK = ("enospc", "eio")
HANGING = ("stop", "hang", "spin", "lock")


def train(episode: Episode) -> None:
    """Other placement settings change no bit, and another layout only the rounding."""
    tree = episode.use(draw_config(episode.rng, episode.workspace.data))
    reference = episode.reference(tree)
    args = episode.train_args(with_placement(episode.rng, tree))
    ended = episode.run(args, cold=episode.rng.random() < COLD)
    check_same(episode.outcome(ended), reference.outcome)
    if compares_with_one_rank(tree):
        single = episode.reference(on_one_rank(tree))
        check_close(reference.outcome.losses, single.outcome.losses)
        step = episode.rng.randrange(tree["steps"])
        expected, found = episode.sample_ids(single.folder, step), episode.sample_ids(reference.folder, step)
        expect(found == expected, f"the samples {expected} at step {step}", found)
        episode.result = "equals one rank"


def fault(episode: Episode) -> None:
    """A job with injected faults recovers, or ends with the documented exit code and can be resumed."""
    tree = episode.draw()
    reference = episode.reference(tree)
    faults, codes, options = draw_faults(episode.rng, tree)
    args = episode.train_args(tree, *options)
    cold = episode.rng.random() < COLD
    episode.counts["faults"] += len(faults)
    episode.result = ",".join(faults)
    ended = episode.run(args, codes, fault=episode.result, cold=cold)
    episode.result += f" -> {ended.code}"
    if ended.code != 0:
        episode.counts["resumes"] += 1
        ended = episode.run(args)
    check_same(episode.outcome(ended), reference.outcome)


def draw_faults(rng: random.Random, tree: Tree) -> tuple[list[str], tuple[int, ...], list[str]]:
    """Faults for MESHWRIGHT_FAULT, the exit codes that they may cause, and options of the command."""
    steps, ranks = tree["steps"], rank_count(tree)
    rank, step = f"rank{rng.randrange(ranks)}", rng.randrange(steps)
    draw = rng.random()
    if draw < 0.35:
        point = f"step.{rng.choice(STEP_POINTS)}"
        return [f"{point}:{rank}:{rng.choice([*ENDING, *DISK, 'slow=0.05'])}@step{step}"], (0,), []
    if draw < 0.55:
        point = f"save.{rng.choice(SAVE_POINTS)}"
        action = rng.choice(["kill", "exit", "raise", *DISK, "slow=0.05"])
        at = rng.choice(["", f"@step{step + 1}"])
        fails_last_save = action in ("raise", *DISK) and at in ("", f"@step{steps}")
        return [f"{point}:{rank}:{action}{at}"], (0, 4) if fails_last_save else (0,), []
    if draw < 0.65:
        return [f"{rng.choice(OTHER_POINTS)}:{rank}:{rng.choice(ENDING)}"], (0,), []
    if draw < 0.75:  # the restart fails as well, while it restores
        restore = rng.choice(["start.restore", "start.restored", "start.begin"])
        return [f"step.update:{rank}:kill@step{step}", f"{restore}:rank0:{rng.choice(ENDING)}#1"], (0,), []
    if draw < 0.83:  # three failures in a row, at three steps
        chosen = sorted(rng.sample(range(steps), min(3, steps)))
        points = [f"step.{rng.choice(STEP_POINTS)}:rank{rng.randrange(ranks)}" for _ in chosen]
        return (
            [f"{p}:{rng.choice(ENDING)}@step{s}#{n}" for n, (p, s) in enumerate(zip(points, chosen, strict=True))],
            (0,),
            [],
        )
    if draw < 0.90:
        return [f"step.{rng.choice(STEP_POINTS)}:{rank}:term@step{step}"], (0, 143), []
    if draw < 0.94:
        reported = Layout.from_config(parse(tree).layout).pipeline == 1
        return [f"step.backward:{rank}:nan@step{step}"], (7,) if reported else (0, 7), []
    if draw < 0.96 and ranks > 1 and uses_ddp(Layout.from_config(parse(tree).layout)):
        return [f"step.fetch:{rank}:flip@step{step}"], (0,), ["--numerics.compare_every=1"]
    if draw < 0.98 and ranks > 1:
        return [f"step.collective:{rank}:desync@step{step}"], (0,), ["--launch.hang_timeout=5"]
    point = f"step.{rng.choice(STEP_POINTS)}"
    return [f"{point}:{rank}:{rng.choice(HANGING)}@step{step}"], (0,), ["--launch.hang_timeout=5"]


def reshard(episode: Episode) -> None:
    """A run that is stopped and continues on other layouts has the losses and the samples of one rank."""
    rng = episode.rng
    tree = episode.draw()
    tree["precision"]["compute"] = "fp64"
    tree["model"].pop("capacity_factor", None)
    episode.use(tree)
    single = episode.reference(on_one_rank(tree))
    layouts = [str(Layout.from_config(parse(tree).layout))]
    for step in sorted(rng.sample(range(1, tree["steps"]), rng.choice([1, 1, 2]))):
        fault = f"step.fetch:rank{rng.randrange(rank_count(tree))}:term@step{step}"
        episode.run(episode.train_args(tree), (0, 143), fault=fault, cold=rng.random() < COLD)
        tree = with_placement(rng, with_layout(rng, tree))
        layouts.append(str(Layout.from_config(parse(tree).layout)))
        episode.counts["resumes"] += 1
    ended = episode.run(episode.train_args(tree))
    check_close(episode.outcome(ended).losses, single.outcome.losses)
    step = rng.randrange(tree["steps"])
    expected, found = episode.sample_ids(single.folder, step), episode.sample_ids(episode.run_folder, step)
    expect(found == expected, f"the samples {expected} at step {step}", found)
    episode.result = " -> ".join(layouts)
