"""Draws small configs that `validate` accepts, layouts of the same run, and settings that must not change a bit."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

from meshwright.base.config import RunConfig, config_from_dict
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.unsupported import validate
from meshwright.errors import ConfigError

Tree = dict[str, Any]
"""The settings of a run file."""
MAX_RANKS = 4
LAYOUT_SECTIONS = ("layout", "ddp", "fsdp", "pipeline", "context", "activation_checkpoint")
AXES = ("replicate", "tensor", "pipeline", "context")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev")
ONE_RANK: Tree = {"layout": {"replicate": 1}}


def draw_config(rng: random.Random, data: Path) -> Tree:
    """A config whose step takes milliseconds, on at most MAX_RANKS ranks."""
    heads = rng.choice([2, 4])
    vocab = rng.choice([64, 256])
    experts = rng.choice([0, 0, 0, 4])
    tree: Tree = {
        "seed": rng.randrange(1000),
        "steps": rng.randint(3, 6),
        "count_bytes_every": rng.choice([0, 3, 1000]),
        "model": {
            "vocab": vocab,
            "width": heads * rng.choice([4, 8]),
            "layers": rng.choice([1] * 4 + [2] * 7 + [4] * 4 + [8]),
            "heads": heads,
            "kv_heads": rng.choice([1, 2, heads]),
            "ffn": rng.choice([8, 16, 24]),
            "tie": rng.random() < 0.3,
            "experts": experts,
        },
        "data": draw_data(rng, data, vocab) | {"sequence": rng.choice([8, 8, 16])},
        "batch": {"global": rng.choice([4, 8, 8, 12])},
        "optimizer": {
            "lr": rng.choice([1e-3, 3e-3]),
            "clip": rng.choice([0.0, 0.1, 1.0]),
            "implementation": rng.choice(["fused", "foreach"]),
            "cpu_offload": rng.random() < 0.1,
        },
        "schedule": {"kind": rng.choice(["cosine", "linear", "wsd", "constant"]), "warmup": rng.randint(0, 3)},
        "precision": {"compute": rng.choice(["fp64"] * 6 + ["fp32"] * 3 + ["bf16"])},
        "eval": {"holdout": rng.choice([0.0, 0.1, 0.2])},
        "launch": {"device": "cpu", "collective_timeout": 60.0, "rendezvous_timeout": 40.0, "grace_period": 20.0},
    }
    if experts:
        tree["model"] |= {
            "experts_active": rng.choice([1, 2]),
            "experts_shared": rng.choice([0, 1]),
            "capacity_factor": rng.choice([0.0, 0.0, 0.0, 1.0]),
        }
    if rng.random() < 0.4:
        tree["model"]["separator"] = rng.choice([0, 10])
    return with_placement(rng, with_layout(rng, tree))


def draw_data(rng: random.Random, data: Path, vocab: int) -> Tree:
    """One source, or a mixture; `write_data` writes their files."""
    synthetic: Tree = {"kind": "synthetic", "samples": rng.choice([40, 200, 1000])}
    tokens: Tree = {"kind": "tokens", "path": str(data / f"tokens-{vocab}.bin")}
    text: Tree = {"kind": "text", "path": str(data / "text")}
    documents: Tree = {"kind": "jsonl", "path": str(data / "documents.jsonl")}
    sources = [synthetic, tokens] if vocab < 256 else [synthetic, tokens, text, documents]
    if rng.random() < 0.6:
        return dict(rng.choice(sources))
    chosen = rng.sample(sources, 2)
    return {"mixture": [source | {"weight": rng.choice([0.5, 1.0, 3.0])} for source in chosen]}


def write_data(data: Path) -> None:
    """Writes the files that drawn configs read: tokens, text and JSON documents, the same for every seed."""
    rng = random.Random("data")
    (data / "text").mkdir(parents=True)
    for vocab in (64, 256):
        ids = [0 if rng.random() < 0.05 else rng.randrange(vocab) for _ in range(6000)]
        (data / f"tokens-{vocab}.bin").write_bytes(b"".join(i.to_bytes(2, "little") for i in ids))
    words = ["tensor", "rank", "shard", "größe", "\n", "mesh", "stage"]
    for name in ("a.txt", "b.txt"):
        (data / "text" / name).write_text(" ".join(rng.choice(words) for _ in range(600)))
    lines = [f'{{"text": "{" ".join(rng.choice(words[:4]) for _ in range(rng.randint(1, 40)))}"}}' for _ in range(60)]
    (data / "documents.jsonl").write_text("\n".join(lines) + "\n")


def with_layout(rng: random.Random, tree: Tree, ranks: tuple[int, ...] = (1, 1, 2, 2, 2, 2, 2, 3, 4, 4)) -> Tree:
    """The same run on another layout that is supported. Everything that changes is placement."""
    count = tries = 0
    while True:
        count = count if tries % 50 else rng.choice(ranks)  # three ranks, for example, do not fit every batch
        tries += 1
        drawn = copy.deepcopy({key: value for key, value in tree.items() if key not in LAYOUT_SECTIONS})
        drawn |= draw_layout(rng, count, tree["model"]["experts"])
        drawn["batch"]["micro"] = rng.choice([1, 1, 2, 3, 4])
        if is_supported(drawn):
            return drawn


def draw_layout(rng: random.Random, ranks: int, experts: int) -> Tree:
    """Settings of the layout sections; they may be unsupported."""
    degrees = dict.fromkeys(AXES, 1)
    while ranks > 1:
        factor = 2 if ranks % 2 == 0 else ranks
        degrees[rng.choice(AXES)] *= factor
        ranks //= factor
    shard = rng.choice(["none", "none", "optimizer", "gradients", "parameters"])
    layout: Tree = {**degrees, "shard": shard, "expert": rng.choice([1, 2, 4]) if experts else 1}
    if shard != "none" and degrees["replicate"] == 4 and rng.random() < 0.5:
        layout |= {"replicate": 2, "shard_degree": 2}
    checkpointing = rng.choice(["none"] * 6 + ["full"] * 3 + ["selective"])
    return {
        "layout": layout,
        "ddp": {
            "bucket_cap_mb": rng.choice([0.001, 25.0]),
            "gradient_as_bucket_view": rng.random() < 0.5,
            "static_graph": rng.random() < 0.1,
            "find_unused_parameters": rng.random() < 0.1,
        },
        "fsdp": {"prefetch": rng.choice([1, 2]), "reshard_after_forward": rng.choice([True, True, False, 2])},
        "pipeline": {"schedule": rng.choice(SCHEDULES)},
        "context": {"method": rng.choice(["ring", "all-to-all"])},
        "activation_checkpoint": {
            "mode": checkpointing,
            "segment": rng.choice([1, 2]) if checkpointing == "full" else 1,
        },
    }


def with_placement(rng: random.Random, tree: Tree) -> Tree:
    """The same run with other settings of saving, evaluating and loading, none of which may change a bit."""
    drawn = copy.deepcopy(tree)
    drawn["checkpoint"] = {
        "mode": rng.choice(["async", "sync"]),
        "seconds": rng.choice([0.0, 0.0, 0.05]),
        "every": rng.choice([1, 1, 2, 3]),
        "keep": rng.choice([1, 2, 3]),
        "keep_every": rng.choice([0, 0, 2]),
        "overhead": 1.0,
    }
    drawn["eval"] |= {"every": rng.choice([0, 1, 2, 3]), "samples": rng.choice([1, 3, 8])}
    drawn["data"] |= {"workers": rng.choice([0, 0, 0, 1, 2]), "prefetch": rng.choice([1, 4])}
    drawn["data"]["worker_kind"] = rng.choice(["thread"] * 9 + ["process"])
    drawn["numerics"] = {"compare_every": rng.choice([0, 1, 2])}
    return drawn


def on_one_rank(tree: Tree) -> Tree:
    """The same run on one rank, without accumulation."""
    drawn = copy.deepcopy({key: value for key, value in tree.items() if key not in LAYOUT_SECTIONS}) | ONE_RANK
    drawn["batch"].pop("micro", None)
    return drawn


def is_supported(tree: Tree) -> bool:
    try:
        validate(parse(tree))
    except ConfigError:
        return False
    return True


def parse(tree: Tree) -> RunConfig:
    return config_from_dict(tree)


def rank_count(tree: Tree) -> int:
    return Layout.from_config(parse(tree).layout).ranks


def compares_with_one_rank(tree: Tree) -> bool:
    """Whether losses equal those of one rank within the rounding of float64: dropped tokens depend on the layout."""
    return bool(tree["precision"]["compute"] == "fp64" and not tree["model"].get("capacity_factor"))


def describe(tree: Tree) -> str:
    """A config in a few words."""
    config = parse(tree)
    model, layout = config.model, config.layout
    facts = [
        str(Layout.from_config(layout)),
        config.precision.compute,
        f"{config.steps} steps",
        f"{model.layers} layers",
    ]
    facts += [f"shard {layout.shard}"] if layout.shard != "none" else []
    facts += [config.pipeline.schedule] if layout.pipeline > 1 else []
    facts += [f"{model.experts} experts"] if model.experts else []
    facts += [config.activation_checkpoint.mode] if config.activation_checkpoint.mode != "none" else []
    return ", ".join([*facts, config.checkpoint.mode])
