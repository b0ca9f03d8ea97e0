"""Writes what a Hugging Face folder has beside the weights: config.json, generation_config.json and the tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from meshwright.config import ModelConfig, RunConfig
from meshwright.io import open_regular_file, write_json
from meshwright.models.config_fields import INERT_KEYS, ConfigFields, read_config_file
from meshwright.models.registry import write_huggingface_config
from meshwright.weights.folder import CONFIG_FILE, file_inside

GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("chat_template.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt"),
)
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
    """Copies the tokenizer of the data, with the files beside it, or that of the folder that the run started from."""
    if config.data.tokenizer:
        file = Path(config.data.tokenizer)
        copy_file(file, folder, TOKENIZER_FILE)
        beside = file.parent.resolve() if file.name == TOKENIZER_FILE else None
    else:
        beside = Path(config.init_from).resolve() if config.init_from else None
    for name in TOKENIZER_FILES if beside is not None else ():
        if not (folder / name).exists():
            assert beside is not None
            copy_file(file_inside(beside, name), folder)
    if (folder / TOKENIZER_FILE).exists() and not (folder / "tokenizer_config.json").exists():
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def copy_file(file: Path, folder: Path, name: str = "") -> bool:
    """Copies a regular file; returns whether there is one."""
    if not file.is_file():
        return False
    with open_regular_file(file, follow=True) as source, (folder / (name or file.name)).open("xb") as target:
        shutil.copyfileobj(source, target)
    return True
