"""Writes what a Hugging Face folder has beside the weights: config.json, generation_config.json and the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.base.config import ModelConfig, RunConfig
from meshwright.base.io import read_regular_file, write_json
from meshwright.base.models.config_fields import INERT_KEYS, ConfigFields, read_config_file
from meshwright.base.models.registry import write_huggingface_config
from meshwright.core.data.tokenization import MAX_TOKENIZER_BYTES, TOKENIZER_FILE, find_run_tokenizer
from meshwright.core.weights.folder import CONFIG_FILE, file_inside
from meshwright.errors import ConfigError, DataError

GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
COMPANIONS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", TEMPLATE_FILE),
    *("chat_template.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt"),
)
"""What a folder may have beside its tokenizer.json."""
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_huggingface_files(folder: Path, model: ModelConfig, config: RunConfig, dtype: str) -> None:
    """Writes the files for a model of a run. Keys that do not change the model, such as the ids of special tokens, are
    those of the folder that the run started from.
    """
    earlier = inert_keys(Path(config.init_from)) if config.init_from else {}
    defaults: dict[str, Any] = {"max_position_embeddings": config.data.sequence, "bos_token_id": None}
    defaults["eos_token_id"] = model.separator
    sizes = write_huggingface_config(model)
    written = defaults | earlier | sizes | {"dtype": dtype, "torch_dtype": dtype}
    if "n_positions" in sizes:  # another name of the same key
        del written["max_position_embeddings"]
    write_json(folder / CONFIG_FILE, written)
    initial = Path(config.init_from).resolve() if config.init_from else None
    if initial is None or not copy_file(file_inside(initial, GENERATION_FILE), folder):
        tokens = {key: written[key] for key in TOKEN_KEYS if written.get(key) is not None}
        write_json(folder / GENERATION_FILE, {"_from_model_config": True} | tokens)
    copy_tokenizer(folder, config)


def inert_keys(folder: Path) -> dict[str, Any]:
    """The keys of an untrusted config.json that do not change what the weights compute; none if the folder is gone."""
    if not (folder / CONFIG_FILE).is_file():
        return {}
    tree = ConfigFields.of(read_config_file(folder / CONFIG_FILE), str(folder / CONFIG_FILE)).tree
    return {key: value for key, value in tree.items() if key in INERT_KEYS and key not in ("auto_map", "architectures")}


def copy_tokenizer(folder: Path, config: RunConfig) -> None:
    """Copies the tokenizer of the run and the files beside it. A tokenizer that is gone is left out."""
    initial = [Path(config.init_from).resolve()] if config.init_from else []
    try:
        found = find_run_tokenizer(config)
    except DataError:  # the data is gone
        return
    folders = initial
    if found is not None:
        file = Path(found)
        if not file.is_file():
            return
        content = read_tokenizer(file)
        (folder / TOKENIZER_FILE).write_bytes(content)
        same = [other for other in initial if is_same_file(file_inside(other, TOKENIZER_FILE), content)]
        folders = [file.parent.resolve(), *same] if file.name == TOKENIZER_FILE else same
    for beside in folders:
        for name in COMPANIONS:
            if not (folder / name).exists():
                copy_file(file_inside(beside, name), folder)
    template = Path(config.data.chat_template)
    if template.suffix == ".jinja" and not (folder / TEMPLATE_FILE).exists():
        copy_file(template, folder, TEMPLATE_FILE)
    if (folder / TOKENIZER_FILE).exists() and not (folder / "tokenizer_config.json").exists():
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def read_tokenizer(file: Path) -> bytes:
    """The content of a tokenizer.json. The run file that names it is untrusted, so that any other file is refused."""
    content = read_regular_file(file, MAX_TOKENIZER_BYTES, str(file), "a tokenizer.json file")
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
        raise ConfigError(f"{file} is not a tokenizer", "expected a tokenizer.json of the tokenizers library")
    return content


def is_same_file(file: Path, content: bytes) -> bool:
    return file.is_file() and file.stat().st_size == len(content) and file.read_bytes() == content


def copy_file(file: Path, folder: Path, name: str = "") -> bool:
    """Copies a regular file; returns whether there is one."""
    if not file.is_file():
        return False
    content = read_regular_file(file, MAX_TOKENIZER_BYTES, str(file), "a file of a Hugging Face folder")
    (folder / (name or file.name)).write_bytes(content)
    return True
