"""No false alarm: every claim of `prove` holds on clean configs with every pair of family, data and settings."""

from __future__ import annotations

import json
from functools import cache
from itertools import combinations, product
from typing import get_args, get_type_hints

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from meshwright.base.config import RunConfig, SourceConfig
from meshwright.base.models.registry import FAMILIES, validate_family, validate_packing
from meshwright.core.data.prepare.command import prepare_folder
from meshwright.core.optim.build import RULES
from meshwright.errors import ConfigError
from tests.kit.small_run import load_cpu_config
from tests.prover.covering import covering_rows, pairs_of
from tests.prover.in_process import failed_claims

SEQUENCE = 96
SMALL = (
    *("--layout.replicate=1", "--batch.global=4", "--batch.micro=2", "--steps=2", f"--data.sequence={SEQUENCE}"),
    *("--model.width=16", "--model.heads=2", "--model.ffn=16", "--eval.holdout=0.1"),
)
QUOTE = '"'
WORDS = [f"word{number}" for number in range(200)]
DATA = {
    "stdlib": "",
    "tokens": "tokens.bin",
    "text": "text.txt",
    "jsonl": "records.jsonl",
    "chat": "chats.jsonl",
    "shards": "text shards",
    "shards of chats": "chat shards",
    "synthetic": "",
}
"""The kind of a source, which may say of what it is -> its file or folder."""


def choices(config: type, field: str, *without: str) -> tuple[str, ...]:
    """The values of a setting, but for those that stand for others and for a user's own code."""
    return tuple(
        value for value in get_args(get_type_hints(config)[field]) if value not in ("auto", "custom", *without)
    )


def section(name: str) -> type:
    return get_type_hints(RunConfig)[name]


FACTORS = {
    "model.family": tuple(FAMILIES),
    "data.kind": tuple(DATA),
    "optimizer.kind": tuple(RULES),
    "lora.rank": ("0", "2"),
    "data.packing": ("true", "false"),
    "data.tokenizer": ("", "tokenizer.json"),
    "data.mixture": ("", "synthetic"),
    "schedule.kind": choices(section("schedule"), "kind"),
    "precision.compute": choices(section("precision"), "compute", "fp16"),
    "activation_checkpoint.mode": choices(section("activation_checkpoint"), "mode"),
    "checkpoint.mode": choices(section("checkpoint"), "mode"),
    "data.on_bad_sample": choices(section("data"), "on_bad_sample"),
    "optimizer.cpu_offload": ("false", "true"),
    "model.separator": ("", "0"),
    "model.tie": ("false", "true"),
}
"""Setting -> its values. The values of a table of the package are all of that table."""


def options(row: tuple[str, ...]) -> list[str]:
    """The command line of a row; files are in the folder of the test."""
    chosen = dict(zip(FACTORS, row, strict=True))
    data, beside = chosen.pop("data.kind"), chosen.pop("data.mixture")
    source = {"kind": data.split()[0], "path": DATA[data], "tokenizer": chosen.pop("data.tokenizer"), "samples": 90}
    source["packing"] = chosen.pop("data.packing") == "true"
    lines = [f"--{key}={value}" for key, value in chosen.items() if value]
    if not beside:
        return [
            *lines,
            *(f"--data.{key}={json.dumps(value).strip(QUOTE)}" for key, value in source.items() if value != ""),
        ]
    parts = (source, {"kind": beside, "samples": 60, "weight": 0.5})
    tables = (", ".join(f"{key} = {json.dumps(value)}" for key, value in part.items()) for part in parts)
    return [*lines, f"--data.mixture=[{', '.join(f'{{{table}}}' for table in tables)}]"]


@cache
def sizes_of(family: str) -> tuple[str, ...]:
    """The first sizes that the family has: with or without experts, and key-value heads of their own."""
    for experts, heads in product((0, 4), (1, 2)):
        sizes = (
            f"--model.family={family}",
            f"--model.experts={experts}",
            f"--model.kv_heads={heads}",
            f"--model.layers={1 + (experts > 0)}",
        )
        try:
            validate_family(load_cpu_config(overrides=[*SMALL, *sizes]))
        except ConfigError:
            continue
        return sizes
    raise AssertionError(f"the family {family} has none of these sizes")


def config_of(row: tuple[str, ...]) -> RunConfig:
    return load_cpu_config(overrides=[*SMALL, *sizes_of(row[0]), *options(row)])


def is_valid(row: tuple[str, ...]) -> bool:
    chosen, config = dict(zip(FACTORS, row, strict=True)), config_of(row)
    try:
        validate_family(config)
        if "chat" in chosen["data.kind"] and chosen["data.packing"] == "true":
            validate_packing(config)
    except ConfigError:
        return False
    return True


ROWS = covering_rows(FACTORS, is_valid)


def test_rows_have_every_pair_of_values():
    assert {data.split()[0] for data in DATA} == set(choices(SourceConfig, "kind"))
    found = set().union(*map(pairs_of, ROWS))
    for (first, levels), (second, others) in combinations(enumerate(FACTORS.values()), 2):
        assert not {((first, a), (second, b)) for a, b in product(levels, others)} - found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of every kind of source. The question of a chat is longer than a sample of most proof runs."""
    folder, draw = tmp_path_factory.mktemp("clean"), np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(draw.choice(WORDS, count))

    tokens = draw.integers(1, 250, 2000).astype("<u2").tobytes()
    documents = [words(40) for _ in range(40)]
    pairs = [{"prompt": words(2), "completion": words(1)} for _ in range(40)]
    turns = [[("user", words(2)), ("assistant", words(1))] * number for number in (1, 2, 3, 1, 1)]
    chats = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in turns]
    (folder / DATA["tokens"]).write_bytes(tokens)
    (folder / DATA["text"]).write_text("\n".join(documents))
    for name, records in {"jsonl": [{"text": text} for text in documents], "chat": chats + pairs}.items():
        (folder / DATA[name]).write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "[UNK]": 1} | {w: n for n, w in enumerate(WORDS, 2)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }} : {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant : {% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": template}))
    for name, format in {"text": "text", "chat": "chat"}.items():
        inputs, out = [str(folder / DATA[name])], folder / f"{name} shards"
        prepare_folder(inputs, out, "", format, "text", "", "auto", workers=1, shard_tokens=700, bad_sample_budget=0)
    return folder


@pytest.fixture
def files(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(folder / "cache"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(filter(None, row)))
@pytest.mark.usefixtures("files")
def test_prove_holds_on_a_clean_config(row):
    assert failed_claims(config_of(row)) == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "data"), [*product(FAMILIES, DATA)])
@pytest.mark.usefixtures("files")
def test_prove_holds_with_every_optimizer_with_and_without_lora(family, data):
    names = ("model.family", "data.kind", "optimizer.kind", "lora.rank", "data.packing")
    failed = {}
    for levels in product((family,), (data,), *(FACTORS[name] for name in names[2:])):
        first = {name: values[0] for name, values in FACTORS.items()}
        row = tuple((first | dict(zip(names, levels, strict=True))).values())
        failed[levels] = failed_claims(config_of(row)) if is_valid(row) else []
    assert not {levels: claims for levels, claims in failed.items() if claims}
