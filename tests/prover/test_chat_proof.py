"""The proof of chats: an independent reader finds wrong samples, and small proof runs keep answers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.base.config import IGNORE_INDEX
from meshwright.core.data.chat import packing
from meshwright.core.data.chat.packing import PackedChats
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.prepare.command import prepare_folder
from meshwright.core.models.layers.decoder import LanguageModel
from meshwright.prover.oracle import source_files
from meshwright.prover.shrink import open_proof_sources, proof_runs
from meshwright.prover.shrink.source import DOCUMENTS
from meshwright.prover.stream import check_stream
from meshwright.prover.stream.checked_stream import CheckedStream, WrongStream
from meshwright.prover.stream.sources import check_sources
from tests.kit.small_run import load_cpu_config
from tests.prover.in_process import failed_claims

CHATS = "data/chats.jsonl"
ONE_RANK = ("--layout.replicate=1", "--batch.global=4", "--steps=2", "--model.width=16", "--model.heads=2")
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set end = '.' %}{{ m.content | trim }}"
    "{{ end }}{% endgeneration %}{% else %}{{ m | tojson }}{% endif %}{% endfor %}"
)
PREFIXES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True)
def chats(tmp_path, monkeypatch):
    """Chats and completions whose first answers are at many places, and templates beside them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    draw = np.random.default_rng(0)

    def text(length):
        return "".join(draw.choice([*"abc é"], length))

    def turns(number):
        roles = [role for _ in range(number) for role in ("user", "assistant")]
        return [{"role": role, "content": text(draw.integers(1, 40))} for role in roles]

    records = [{"messages": turns(draw.integers(1, 4))} for _ in range(40)]
    records += [{"prompt": text(draw.integers(1, 60)), "completion": text(draw.integers(1, 9))} for _ in range(60)]
    (tmp_path / "data").mkdir()
    (tmp_path / CHATS).write_text("\n".join(map(json.dumps, records)))
    for name, template in {"generation": GENERATION, "prefixes": PREFIXES}.items():
        (tmp_path / name).write_text(template)


def config(*options):
    return load_cpu_config(overrides=["--data.kind=chat", f"--data.path={CHATS}", "--data.sequence=120", *options])


@pytest.mark.parametrize("template", ["", "generation", "prefixes"])
@pytest.mark.parametrize("packed", ["true", "false"])
def test_samples_equal_those_of_the_independent_reader(template, packed):
    checked = CheckedStream.open(config(f"--data.chat_template={template}", f"--data.packing={packed}"))
    assert check_sources(checked).endswith("of 1 of 1 source(s) equal an independent reading")


def test_chats_beside_text_and_in_shards_equal_those_of_the_independent_reader(tmp_path):
    prepare_folder([CHATS], tmp_path / "shards", "", "chat", "text", "", "auto", 1, 333, 0)
    check_sources(CheckedStream.open(config("--data.kind=shards", "--data.path=shards")))
    parts = '{kind = "chat", path = "data"}, {kind = "shards", path = "shards"}, {kind = "text", path = "data"}'
    check_sources(CheckedStream.open(config(f"--data.mixture=[{parts}]", "--model.separator=97")))


def first_fit(chats, lengths, sequence):
    samples = []
    for chat, length in zip(chats.tolist(), lengths.tolist(), strict=True):
        found = next((sample for sample in samples if sum(n for _, n in sample) + length <= sequence), None)
        samples += [] if found is not None else [found := []]
        found.append((chat, length))
    return [[chat for chat, _ in sample] for sample in samples]


def changed_sample(change):
    right = PackedChats.__getitem__
    return PackedChats, "__getitem__", lambda self, index: change(*right(self, index))


FAULTS = {
    "chats are packed by first fit": lambda: (packing, "pack", first_fit),
    "the question counts": lambda: changed_sample(lambda t, x, d: (t, np.where(t == 0, x, np.append(t[1:], 0)), d)),
    "one document": lambda: changed_sample(lambda t, x, d: (t, x, np.zeros_like(d))),
    "labels are not shifted": lambda: changed_sample(lambda t, x, d: (t, np.where(x == IGNORE_INDEX, x, t), d)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_samples_of_chats_are_found(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault]())
    with pytest.raises(WrongStream):
        check_sources(CheckedStream.open(config()))


def test_content_of_chats_that_are_too_large_to_be_read_again_is_not_proven(monkeypatch):
    monkeypatch.setattr(source_files, "MAX_PACKED_BYTES", 1000)
    claims = [claim for claim in check_stream(config()) if claim.not_proven]
    assert [claim.passed for claim in claims] == [True, True]  # what the file contains, and what the loader returns
    unread = f"the content of {CHATS}: its chats have more than 1,000 bytes"
    assert {claim.not_proven for claim in claims} == {(unread,)}
    monkeypatch.setattr(source_files, "MAX_TOKENIZED_BYTES", 1000)
    checked = CheckedStream.open(config("--data.packing=false"))
    assert 0 < checked.readers[0].samples < len(checked.sources[0])
    check_sources(checked)


@pytest.mark.parametrize("packed", ["true", "false"])
def test_every_sample_of_a_small_proof_run_has_an_answer(packed):
    user = config(f"--data.packing={packed}")
    [own] = open_sources(user.data, user.model.vocab, None)
    for run in proof_runs(user):
        [source] = open_proof_sources(user, run.config)
        answers = [int((source[index][1] != IGNORE_INDEX).sum()) for index in range(len(source))]
        assert min(answers) > 0
        assert {len(array) for array in source[0]} == {run.config.data.sequence}
        if packed == "true" and run.name != "long sequence":
            assert all(len(set(source[index][2].tolist())) == DOCUMENTS for index in range(len(source)))
        if run.name == "long sequence":
            assert np.array_equal(source[3][0], own[3][0] % run.config.model.vocab)


def test_attention_across_packed_chats_is_found(monkeypatch):
    right = LanguageModel.forward
    monkeypatch.setattr(LanguageModel, "forward", lambda self, tokens, labels, *_: right(self, tokens, labels))
    assert "forward and backward are wrong" in "; ".join(failed_claims(config(*ONE_RANK)))
