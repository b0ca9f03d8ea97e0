"""Episodes with hostile input: damaged run folders, and mutated files and arguments."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

from fuzz.configs import Tree
from fuzz.damage import damage_folder
from fuzz.episode import Episode
from fuzz.jobs import ROOT, Ended
from fuzz.mutations import draw_value, mutate_json, mutate_toml
from fuzz.oracle import DOCUMENTED_CODES, expect, reported_digest, tree_digest
from fuzz.training import COLD

PUBLISHED_RUNS = ROOT / "examples" / "published_runs.json"
MODELS = ROOT / "tests" / "planner" / "huggingface_configs.json"
CLUSTER: Tree = {
    "like": "h100",
    "name": "ours",
    "nodes": 2,
    "devices_per_node": 4,
    "node_network_gbs": 400.0,
    "device": {"name": "h100", "is_cpu": False, "peak_tflops": {"bf16": 989.0}},
    "intra_node": {"bandwidth_gbs": 450.0, "latency_us": 3.0, "curve": [[1048576, 40.0], [16777216, 220.0]]},
}
ARGUMENTS = (
    "plan schedule gpipe --ranks ? --micro ? --stages ?",
    "plan schedule zbv --micro ? --forward ? --weight ?",
    "plan schedule --ranks ? --micro ?",
    "plan tiny --ranks ? --batch ? --sequence ? --top ?",
    "plan llama-8b --cluster ? --precision ?",
    "plan llama-8b --cluster h100:8x? --scale --critical-batch ?",
    "simulate --ranks ? --rank ?",
    "simulate --ranks 8 --layout.pipeline=? --layout.tensor=?",
    "data show FILE --step ? --rank ?",
    "data find FILE --sample ? --epochs ?",
    "train FILE --plan ? --cluster ? --run RUN --steps 1",
    "train FILE --ranks ? --steps 1 --run RUN",
    "checkpoint digest ? --step ?",
    "report ?",
)
"""Command lines in which every question mark becomes a hostile value."""
MEMORY_LIMIT = 2 << 30
"""Peak resident bytes of a command that reads hostile input."""
CODES_WITHOUT_MESSAGE = ("checkpoint verify", "checkpoint diff", "report")
"""Verbs whose exit code is part of a complete answer."""


def run_hostile(episode: Episode, args: list[str], timeout: float = 60.0) -> Ended:
    """Runs a command on hostile input: it ends in time, in bounded memory, with one line that says what is wrong."""
    job = episode.start(args, cold=episode.rng.random() < COLD / 2, bounded=True)
    if args[0] == "prove":  # a valid config takes long: interrupt it
        job.is_running(episode.rng.uniform(1.0, 3.0))
        job.signal(signal.SIGINT)
    ended = episode.finish(job, (*DOCUMENTED_CODES, 130), timeout, hostile=True)
    expect(ended.memory < MEMORY_LIMIT, f"at most {MEMORY_LIMIT:,} resident bytes", f"{ended.memory:,}")
    if ended.code not in (0, 130) and not " ".join(args).startswith(CODES_WITHOUT_MESSAGE):
        lines = [line for line in ended.output.splitlines() if line.startswith("meshwright: ")]
        expect(bool(lines), "one line that starts with meshwright:", ended.output[-1000:])
    return ended


def hostile_folder(episode: Episode) -> None:
    """A verb on a damaged run folder does not crash, hang or write elsewhere; a complete run has the right state."""
    rng = episode.rng
    tree = episode.draw()
    reference = episode.reference(tree)
    shutil.copytree(reference.folder, episode.run_folder)
    canary = write_canary(episode.folder / "canary")
    damage = [damage_folder(rng, episode.run_folder, canary) for _ in range(rng.choice([1, 1, 2, 3]))]
    episode.result = "; ".join(damage)
    before = tree_digest(canary)
    args = draw_verb(episode, tree, reference.folder)
    episode.result += f": {' '.join(args[:2])}" if args[0] != "train" else f": {' '.join(['train', *args[5:]])}"
    ended = run_hostile(episode, args)
    episode.result += f" -> {ended.code}"
    expect(tree_digest(canary) == before, "nothing outside of the run folder changes", describe_tree(canary))
    if args[0] == "train" and ended.code == 0 and not set(args) & {"--fork", "--steps"}:
        digest = reported_digest(ended.output)
        expect(digest == reference.outcome.parameters, f"parameters {reference.outcome.parameters}", digest)


def write_canary(folder: Path) -> Path:
    """A folder beside the run that no command may change."""
    (folder / "folder").mkdir(parents=True)
    (folder / "file").write_text("canary\n")
    (folder / "folder" / "file").write_text('{"canary": 1}\n')
    return folder


def describe_tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def draw_verb(episode: Episode, tree: Tree, other: Path) -> list[str]:
    """A verb that reads the run folder, or trains in it."""
    rng, run = episode.rng, str(episode.run_folder)
    step = str(rng.choice([0, 1, tree["steps"], 10**6]))
    options = rng.choice([[], [], [], ["--no-fallback"], ["--fresh"], ["--fork"], ["--steps", str(tree["steps"] + 1)]])
    verbs = [
        ["checkpoint", "list", run],
        ["checkpoint", "verify", run],
        ["checkpoint", "digest", run],
        ["checkpoint", "diff", run, str(other)],
        ["report", run, *rng.choice([[], ["--json"], ["--strict"], ["--html"], ["--markdown"]])],
        ["data", "show", run, "--step", step, "--json"],
        ["data", "find", run, "--sample", step],
        ["plan", f"{run}/run.toml", "--cluster", "h100:2"],
        ["simulate", f"{run}/run.toml"],
        ["prove", f"{run}/run.toml"],
    ]
    return episode.train_args(tree, *options) if rng.random() < 0.5 else rng.choice(verbs)


def hostile_file(episode: Episode) -> None:
    """A mutated run file, plan, cluster file, Hugging Face config or argument is reported in one line, or works."""
    rng = episode.rng
    kind, args = draw_command(episode, rng)
    episode.config = kind
    ended = run_hostile(episode, args)
    episode.result = f"{args[0]} -> {ended.code}"


def as_argument(value: Any) -> str:
    return str(value)[:200].replace("\0", "?")


def draw_command(episode: Episode, rng: random.Random) -> tuple[str, list[str]]:
    """What is mutated, and the command that reads it."""

    def write(name: str, content: bytes) -> str:
        path = episode.folder / name
        path.write_bytes(content)
        return str(path)

    tree = episode.draw()
    match rng.choice(["run file", "run file", "override", "cluster file", "replay file", "model file", "arguments"]):
        case "run file":
            verb = rng.choice(["train", "plan", "simulate", "prove"])
            file = write("run.toml", mutate_toml(rng, tree, mild=verb in ("train", "prove")))
            options = {
                "train": ["--run", str(episode.run_folder), "--launch.device=cpu", "--steps=2"],
                "plan": ["--cluster", "h100:2"],
            }
            return "run file", [verb, file, *options.get(verb, [])]
        case "override":
            section = rng.choice([key for key, value in tree.items() if isinstance(value, dict)])
            name = rng.choice([*tree[section], "x", ""])
            verb = rng.choice(["train", "plan", "simulate"])
            key, value = f"--{section}.{name}", as_argument(draw_value(rng, tree[section].get(name), verb == "train"))
            args = episode.train_args(tree, "--steps=2") if verb == "train" else [verb, episode.write_run_file(tree)]
            return f"override {key}={value[:20]!r}", [*args, f"{key}={value}"]
        case "arguments":
            line = rng.choice(ARGUMENTS)
            names = {"FILE": episode.write_run_file(tree), "RUN": str(episode.run_folder)}
            hostile = (as_argument(draw_value(rng, int(2 ** rng.uniform(0, 24)))) for _ in range(4))
            args = [names.get(arg, arg.replace("?", next(hostile)) if "?" in arg else arg) for arg in line.split()]
            return " ".join(args).replace(str(episode.folder), ".")[:100], args
        case "cluster file":
            file = write("cluster.toml", mutate_toml(rng, CLUSTER))
            return "cluster file", ["plan", rng.choice(["tiny", "llama-8b"]), "--cluster", file]
        case "replay file":
            runs = rng.sample(json.loads(PUBLISHED_RUNS.read_text()), 3)
            return "replay file", ["plan", "--replay", write("runs.json", mutate_json(rng, json.dumps(runs))), "--json"]
        case _:
            models = json.loads(MODELS.read_text())
            config = json.dumps(models[rng.choice(sorted(models))]["config"])
            return "model file", ["plan", write("config.json", mutate_json(rng, config))]
