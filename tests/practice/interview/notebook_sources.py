"""The twelve notebooks of known quality: one good answer in cells, and one small replacement per flaw."""

from __future__ import annotations

import json
from pathlib import Path

NOTEBOOKS = Path(__file__).parent / "notebooks"

IMPORTS = """\
import json
import os
import random
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
"""

DATA = """\
def sample(index):
    generator = torch.Generator().manual_seed(1000 + index)
    x = torch.randn(4, generator=generator)
    return x, x.sum().sin().reshape(1)


def fetch(indices):
    pairs = [sample(index) for index in indices]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def partition(num_samples, rank, world_size, epoch, seed):
    order = list(range(num_samples))
    random.Random(f"{seed}-{epoch}").shuffle(order)
    return order[rank::world_size]
"""

MODEL = """\
def build_model(config):
    torch.manual_seed(config["seed"])
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(config["dropout"]), nn.Linear(16, 1))


def loss(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def global_batch(config):
    model_ranks = config["tensor_parallel"] * config["pipeline_parallel"]
    return config["micro_batch"] * config["accumulation"] * (config["world_size"] // model_ranks)
"""

CHECKPOINT = """\
def save(path, state):
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load(path):
    return torch.load(path)


def pack(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def unpack(state, model, optimizer):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def identity(config):
    names = ("lr", "seed", "num_samples", "dropout")
    return {name: config[name] for name in names} | {"global_batch": global_batch(config)}
"""

RECORDS = """\
@contextmanager
def timed(phases, name):
    begin = time.perf_counter()
    yield
    phases[name] += time.perf_counter() - begin


def log(config, **record):
    if config["log_dir"] is None:
        return
    rank = config["rank"]
    with open(f"{config['log_dir']}/rank{rank}.jsonl", "a") as file:
        file.write(json.dumps({"rank": rank, "world_size": config["world_size"], **record}) + "\\n")
"""

TRAIN = """\
PHASES = ("fetch", "copy", "forward", "backward", "sync", "update", "save")


def train(config):
    rank, world_size, accumulation = config["rank"], config["world_size"], config["accumulation"]
    micro = config["micro_batch"]
    model = build_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    step = epoch = position = 0
    if config["resume"]:
        state = load(config["checkpoint"])
        if state["identity"] != identity(config):
            raise ValueError(f"the checkpoint is of another run: {state['identity']}")
        unpack(state, model, optimizer)
        step = state["step"]
        epoch, position = state["epoch"], state["position"]
    steps_per_epoch = config["num_samples"] // global_batch(config)
    losses = []
    try:
        while step < config["steps"]:
            phases = dict.fromkeys(PHASES, 0.0)
            begin = time.perf_counter()
            torch.manual_seed(1_000_003 * config["seed"] + world_size * step + rank)
            mine = partition(config["num_samples"], rank, world_size, epoch, config["seed"])
            total = 0.0
            for number in range(position * accumulation, (position + 1) * accumulation):
                with timed(phases, "fetch"):
                    batch = fetch(mine[number * micro : (number + 1) * micro])
                with timed(phases, "forward"):
                    value = loss(model, batch) / accumulation
                with timed(phases, "backward"):
                    value.backward()
                total += value.item()
            with timed(phases, "sync"):
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world_size
            with timed(phases, "update"):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(total)
            step, position = step + 1, position + 1
            if position == steps_per_epoch:
                epoch, position = epoch + 1, 0
            if config["checkpoint"] is not None and step % config["save_every"] == 0 and rank == 0:
                with timed(phases, "save"):
                    state = {"step": step, "epoch": epoch, "position": position, "identity": identity(config)}
                    save(config["checkpoint"], state | pack(model, optimizer))
            log(config, step=step, loss=total, seconds=time.perf_counter() - begin, phases=phases)
    except Exception as error:
        log(config, step=step, error=repr(error))
        raise
    return {"losses": losses}
"""

CELLS = {"imports": IMPORTS, "data": DATA, "model": MODEL, "checkpoint": CHECKPOINT, "records": RECORDS, "train": TRAIN}

FLAWS: dict[str, tuple[str, str, str]] = {
    "no_sampler": ("    return order[rank::world_size]", "    return order", "partition_overlap"),
    "no_set_epoch": ('random.Random(f"{seed}-{epoch}")', "random.Random(seed)", "partition_reshuffle"),
    "padding_duplicates": (
        "    return order[rank::world_size]",
        "    order += order[: -num_samples % world_size]\n    return order[rank::world_size]",
        "partition_padding",
    ),
    "resume_replays": (
        '        epoch, position = state["epoch"], state["position"]',
        '        epoch, position = state["epoch"], 0',
        "resume_replay",
    ),
    "resume_skips": ('"position": position, "identity"', '"position": position + 1, "identity"', "resume_skip"),
    "weights_only": (
        '    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}\n\n\n'
        "def unpack(state, model, optimizer):\n"
        '    model.load_state_dict(state["model"])\n'
        '    optimizer.load_state_dict(state["optimizer"])\n',
        '    return {"model": model.state_dict()}\n\n\n'
        "def unpack(state, model, optimizer):\n"
        '    model.load_state_dict(state["model"])\n',
        "restart_state",
    ),
    "no_config_identity": (
        '        if state["identity"] != identity(config):\n'
        "            raise ValueError(f\"the checkpoint is of another run: {state['identity']}\")\n",
        "",
        "config_identity",
    ),
    "non_atomic_save": (
        '    temporary = f"{path}.tmp"\n'
        '    with open(temporary, "wb") as file:\n'
        "        torch.save(state, file)\n"
        "        file.flush()\n"
        "        os.fsync(file.fileno())\n"
        "    os.replace(temporary, path)\n",
        '    with open(path, "wb") as file:\n        torch.save(state, file)\n        os.fsync(file.fileno())\n',
        "atomic_save",
    ),
    "phases_not_timed": (", phases=phases)", ")", "phases_timed"),
    "gradients_averaged_twice": (
        "value = loss(model, batch) / accumulation",
        "value = loss(model, batch) / (accumulation * world_size)",
        "gradient_union",
    ),
    "rank_0_logs": (
        '    if config["log_dir"] is None:',
        '    if config["log_dir"] is None or config["rank"] > 0:',
        "rank_records",
    ),
}
"""flaw -> (text of the good answer, its replacement, the check that names the flaw)"""

MORE_FLAWS: dict[str, tuple[str, str, str]] = {
    "gradients_not_synchronized": ("                    dist.all_reduce(parameter.grad)\n", "", "gradient_union"),
    "gradients_summed": ("                    parameter.grad /= world_size\n", "", "gradient_union"),
    "sync_every_micro_batch": (
        "                total += value.item()\n",
        "                total += value.item()\n"
        "                for parameter in model.parameters():\n"
        "                    dist.all_reduce(parameter.grad.clone())\n",
        "sync_once",
    ),
    "global_batch_of_all_ranks": ('(config["world_size"] // model_ranks)', 'config["world_size"]', "global_batch"),
    "hidden_topology": (
        "    return order[rank::world_size]",
        '    return order[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]',
        "partition_overlap",
    ),
    "drops_the_tail": (
        "    return order[rank::world_size]",
        "    return order[: num_samples // world_size * world_size][rank::world_size]",
        "partition_union",
    ),
    "global_generator": (
        'random.Random(f"{seed}-{epoch}").shuffle(order)',
        "random.shuffle(order)",
        "deterministic_run and partition_deterministic",
    ),
    "silent_default": (
        'optimizer.load_state_dict(state["optimizer"])',
        'optimizer.load_state_dict(state.get("optimizer", optimizer.state_dict()))',
        "restart_manifest",
    ),
    "unseeded_dropout": (
        '            torch.manual_seed(1_000_003 * config["seed"] + world_size * step + rank)\n',
        "",
        "restart_state",
    ),
    "sampler_not_used": (
        'mine = partition(config["num_samples"], rank, world_size, epoch, config["seed"])',
        "mine = list(range(config['num_samples']))[rank::world_size]",
        "sampler_used",
    ),
    "wrong_phase": (
        '                with timed(phases, "fetch"):\n',
        '                with timed(phases, "copy"):\n',
        "phases_attributed",
    ),
    "sum_exceeds_step": ("seconds=time.perf_counter() - begin", "seconds=phases['forward']", "phases_within_step"),
    "errors_not_logged": ("        log(config, step=step, error=repr(error))\n", "", "rank_errors"),
    "position_of_the_rank": (
        "    return order[rank::world_size]",
        "    return order[rank * num_samples // world_size : (rank + 1) * num_samples // world_size]",
        "elastic_resume",
    ),
}


WITH_DDP = (
    (
        '    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])\n',
        '    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])\n'
        "    wrapped = nn.parallel.DistributedDataParallel(model)\n",
    ),
    ("value = loss(model, batch) / accumulation", "value = loss(wrapped, batch) / accumulation"),
    (
        '                with timed(phases, "forward"):\n',
        "                wrapped.require_backward_grad_sync = (number + 1) % accumulation == 0\n"
        '                with timed(phases, "forward"):\n',
    ),
    (
        "                for parameter in model.parameters():\n"
        "                    dist.all_reduce(parameter.grad)\n"
        "                    parameter.grad /= world_size\n",
        "                pass  # DDP has synchronized in the last backward pass\n",
    ),
)
"""The good answer with DDP instead of its own all-reduce."""
DDP_SYNCS_ALWAYS = (
    "                wrapped.require_backward_grad_sync = (number + 1) % accumulation == 0\n",
    "",
)


def cells(flaw: str = "good", table: dict[str, tuple[str, str, str]] | None = None) -> list[str]:
    """The cells of a notebook; the replacement of a flaw must be found exactly once."""
    sources = list(CELLS.values())
    if flaw != "good":
        text, replacement, _ = (table or FLAWS)[flaw]
        assert sum(source.count(text) for source in sources) == 1, flaw
        sources = [source.replace(text, replacement) for source in sources]
    return sources


def notebook(flaw: str) -> str:
    """A notebook of format 4 as text."""
    title = f"# Interview exercise: {flaw.replace('_', ' ')}\n"
    made = [{"cell_type": "markdown", "id": "title", "metadata": {}, "source": [title]}]
    for name, source in zip(CELLS, cells(flaw), strict=True):
        made.append(
            {
                "cell_type": "code",
                "execution_count": None,
                "id": name,
                "metadata": {},
                "outputs": [],
                "source": source.rstrip("\n").splitlines(keepends=True),
            }
        )
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def script(flaw: str = "good", *replacements: tuple[str, str]) -> str:
    """A notebook's cells as one script, with further replacements."""
    table = FLAWS | MORE_FLAWS
    text = "\n\n".join(cells(flaw, table))
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    return text


if __name__ == "__main__":
    NOTEBOOKS.mkdir(exist_ok=True)
    for each in ("good", *FLAWS):
        (NOTEBOOKS / f"{each}.ipynb").write_text(notebook(each))
