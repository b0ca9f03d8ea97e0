"""Online reinforcement learning against GRPO of TRL, and how long a learner waits for its generators.

- `reward`: both train the model of examples/rl.toml from the same initial weights, on the same prompts in the same
  order, with the same tokenizer, reward, sizes and optimizer settings, for the same wall time after their start. They
  alternate by seed. TRL runs in one process; Meshwright has a learner and a generator, one step off. All processes
  compute with one thread, and neither saves checkpoints.
- `kills`: both save every 5 steps, are killed ten times at the same steps, and resume. The rollouts of the surviving
  steps are compared with those of an undisturbed run. TRL runs in two modes: a generation per step, and one for two
  steps (`steps_per_generation`), whose rollouts are up to one step old as those of Meshwright are.
- `idle`: the share of its time that a learner waits for rollouts, by the number of generators and the staleness bound.

Without TRL (the extra `bench`), its part is None.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rl_records import (
    compare_histories,
    load_run_config,
    own_curve,
    own_history,
    peer_curve,
    peer_history,
    peer_records,
    reward_after,
    rollout_events,
)

SEEDS = 5
SECONDS = 25.0
"""Wall time of a run, from its first request for rollouts."""
STEPS, SAVE_STEPS, KILLS = 40, 5, 10
PEER_MODES = {"trl": 1, "trl, steps_per_generation 2": 2}
IDLE_SECONDS = 12.0
GENERATORS = (1, 2)
STALENESS = (0, 1, 3)
MIN_RATIO = 1.0
"""The smallest median reward relative to TRL."""
PROCESS_SECONDS = 560.0
UNSAVED = ["--checkpoint.seconds=0"]
OWN, PEER = "benchmarks.rl_loop", "benchmarks.trl_grpo"


def measure(seeds: int = SEEDS, seconds: float = SECONDS) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        result["idle"] = measure_idle(folder)
        show("idle", result["idle"])
        result["kills"] = measure_kills(folder)
        show("kills", result["kills"])
        result["reward"] = measure_reward(folder, seeds, seconds)
        show("reward", result["reward"])
    return result


def show(name: str, value: Any) -> None:
    print(f"rl, {name}: {json.dumps(value)}", file=sys.stderr, flush=True)


def has_peer() -> bool:
    return importlib.util.find_spec("trl") is not None


def run(module: str, spec: dict[str, Any], **environment: str) -> dict[str, Any]:
    """Runs one process and returns the last line that it prints, if that is JSON."""
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(spec)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"{module} {spec} failed with status {done.returncode}: {done.stderr[-2000:]}")
    try:
        last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    return last


def measure_reward(folder: Path, seeds: int, seconds: float) -> dict[str, Any]:
    """Rewards of both after equal wall time, by seed, and their medians."""
    methods = {"meshwright": (OWN, UNSAVED, own_curve)}
    if has_peer():
        methods["trl"] = (PEER, [], peer_curve)
    rewards: dict[str, list[float]] = {name: [] for name in methods}
    rates: dict[str, list[float]] = {name: [] for name in methods}
    loads = []
    for seed in range(seeds):
        order = list(methods.items())
        for name, (module, overrides, curve_of) in order[seed % len(order) :] + order[: seed % len(order)]:
            place = folder / f"{name}-{seed}"
            loads.append(round(os.getloadavg()[0], 1))
            run(module, {"folder": str(place), "overrides": [f"--seed={seed}", *overrides], "seconds": seconds})
            curve = curve_of(place)
            rewards[name].append(round(reward_after(curve, seconds), 4))
            rates[name].append(round(sum(time <= seconds for time, _ in curve) / seconds, 2))
            show(f"{name}, seed {seed}", {"reward": rewards[name][-1], "steps_per_second": rates[name][-1]})
    medians = {name: round(statistics.median(values), 4) for name, values in rewards.items()}
    result: dict[str, Any] = {"seconds": seconds, "seeds": seeds, "load": loads, "reward": rewards, "median": medians}
    result["steps_per_second"] = rates
    result["ratio_to_trl"] = round(medians["meshwright"] / medians["trl"], 3) if "trl" in medians else None
    return result


def measure_kills(folder: Path) -> dict[str, Any]:
    """Rollouts lost or trained twice in the steps that survive ten kills, and those that were generated in vain."""
    kills = sorted(random.Random(0).sample(range(2, STEPS - 1), KILLS))
    result: dict[str, Any] = {"kills_at_steps": kills, "steps": STEPS, "saved_every": SAVE_STEPS}
    saving = ["--checkpoint.seconds=0", f"--checkpoint.every={SAVE_STEPS}", "--rl.policy=fixed", "--launch.restarts=20"]
    spec = {"overrides": saving, "steps": STEPS}
    faults = ",".join(f"step.updated:kill@step{step}#{restart}" for restart, step in enumerate(kills))
    undisturbed = run(OWN, spec | {"folder": str(folder / "own")})
    killed = run(OWN, spec | {"folder": str(folder / "own-killed")}, MESHWRIGHT_FAULT=faults)
    events, size = rollout_events(folder / "own-killed"), load_run_config([]).rl.group_size
    counts = events[-1]["counts"]
    result["meshwright"] = compare_histories(
        own_history(folder / "own-killed", size), own_history(folder / "own", size)
    )
    result["meshwright"] |= {
        "attempts": max(event["attempt"] for event in events),
        "same_digest": undisturbed["digest"] == killed["digest"],
        "rollouts_generated": counts["generated"][0],
        "rollouts_trained": counts["trained"][0],
        "rollouts_dropped": {cause: amount[0] for cause, amount in counts["dropped"].items() if amount[0]},
        "rollouts_unaccounted": counts["generated"][0]
        - counts["trained"][0]
        - counts["in_flight"][0]
        - sum(amount[0] for amount in counts["dropped"].values()),
    }
    for name, steps in PEER_MODES.items():
        peer_spec = {"overrides": [], "steps": STEPS, "save_steps": SAVE_STEPS, "steps_per_generation": steps}
        result[name] = None
        if has_peer():
            run(PEER, peer_spec | {"folder": str(folder / f"trl-{steps}")})
            run(PEER, peer_spec | {"folder": str(folder / f"trl-{steps}-killed"), "kills": kills})
            result[name] = describe_peer(folder / f"trl-{steps}-killed", folder / f"trl-{steps}")
    return result


def describe_peer(killed: Path, undisturbed: Path) -> dict[str, Any]:
    records = peer_records(killed)
    generated = sum(len(record["rewards"]) for record in records if "rewards" in record)
    history = peer_history(killed)
    trained = sum(len(rollouts) for rollouts in history.values())
    return compare_histories(history, peer_history(undisturbed)) | {
        "attempts": 1 + max(record["attempt"] for record in records),
        "same_digest": records[-1]["digest"] == peer_records(undisturbed)[-1]["digest"],
        "rollouts_generated": generated,
        "rollouts_trained": trained,
        "rollouts_unaccounted": generated - trained,
    }


def measure_idle(folder: Path) -> dict[str, Any]:
    """Learner idle share and generated tokens per second that were trained, by generators and staleness bound."""
    result: dict[str, Any] = {}
    for generators in GENERATORS:
        for staleness in STALENESS:
            place = folder / f"idle-{generators}-{staleness}"
            overrides = [f"--rl.generators={generators}", f"--rl.staleness={staleness}", *UNSAVED]
            load = round(os.getloadavg()[0], 1)
            run(OWN, {"folder": str(place), "overrides": overrides, "seconds": IDLE_SECONDS})
            events = rollout_events(place)
            events = events[min(3, len(events) - 2) :]  # the first steps include the start of the generators
            seconds = events[-1]["time"] - events[0]["time"]
            waits = sum(event["wait_seconds"] for event in events[1:])
            tokens = events[-1]["counts"]["trained"][1] - events[0]["counts"]["trained"][1]
            idle = [event["generator_idle_seconds"] for event in (events[0], events[-1])]
            total = [event["generator_seconds"] for event in (events[0], events[-1])]
            result[f"{generators} generators, staleness {staleness}"] = {
                "learner_idle_share": round(waits / seconds, 3),
                "generator_idle_share": round((idle[1] - idle[0]) / max(total[1] - total[0], 1e-9), 3),
                "tokens_per_second": round(tokens / seconds, 1),
                "steps_per_second": round((len(events) - 1) / seconds, 2),
                "load": load,
            }
    return result
