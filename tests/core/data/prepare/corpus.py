"""What the tests of meshwright.core.data.prepare share: a corpus, and a call of the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from meshwright.core.data.prepare.command import prepare_folder
from meshwright.core.data.shards import TokenShards

TEXTS = [f"document {number} " + "abc " * (number % 7) for number in range(300)]


def prepare(inputs, out, **options):
    settings = {
        "tokenizer": "",
        "format": "auto",
        "field": "text",
        "template": "",
        "end_of_document": "auto",
        "workers": 1,
        "shard_tokens": 1000,
        "bad_sample_budget": 0,
    }
    inputs = [inputs] if isinstance(inputs, str | Path) else inputs
    return prepare_folder([str(name) for name in inputs], out, **settings | options)


def jsonl(texts=TEXTS, field="text"):
    return "".join(json.dumps({field: text}) + "\n" for text in texts).encode()


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def documents(folder):
    shards = TokenShards(folder)
    return [bytes(shards.document(i)[0].astype(np.uint8)).decode() for i in range(shards.index.documents)]


def save_tokenizer(path, size=10):
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "</s>": 1} | {f"w{i}": i for i in range(2, size)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(path))
    return str(path)
