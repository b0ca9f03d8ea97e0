"""Writes what a Hugging Face folder has beside the weights: config.json, generation_config.json and the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.base.config import ModelConfig, RunConfig
from meshwright.base.config.data import TOKENIZER_FILE
from meshwright.base.io import file_inside, read_regular_file, write_json
from meshwright.base.models.config_fields import INERT_KEYS, ConfigFields, read_config_file
from meshwright.base.models.registry import write_huggingface_config
from meshwright.core.data.chat.rendering import DEFAULT_TEMPLATE
from meshwright.core.data.chat.template import read_tokenizer_config
from meshwright.core.data.tokenization import MAX_TOKENIZER_BYTES, find_run_tokenizer, has_tokenizer
from meshwright.core.weights.folder import CONFIG_FILE
from meshwright.errors import ConfigError, DataError

GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FILES = (TEMPLATE_FILE, "chat_template.json")
COMPANIONS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", *TEMPLATE_FILES),
    *("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt"),
)
"""What a folder may have beside its tokenizer.json."""
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENIZER_KEYS = ("_token_id", "tokenizer_class")
"""The ends of the keys of a config.json that say something about its tokenizer."""


def write_huggingface_files(folder: Path, model: ModelConfig, config: RunConfig, dtype: str) -> None:
    """Writes the files for a model of a run. Keys that do not change the model, such as the ids of special tokens, are
    those of the folder that the run started from, unless the run has another tokenizer.
    """
    initial = Path(config.init_from).resolve() if config.init_from else None
    is_known, tokenizer = True, None
    try:
        tokenizer = find_run_tokenizer(config)
    except DataError:  # the data is gone, or has several tokenizers
        is_known = False
    has_tokens = initial is not None and (not is_known or has_tokenizer(initial, tokenizer))
    earlier = inert_keys(initial) if initial is not None else {}
    if not has_tokens:
        earlier = {key: value for key, value in earlier.items() if not key.endswith(TOKENIZER_KEYS)}
    defaults: dict[str, Any] = {"max_position_embeddings": config.data.sequence, "bos_token_id": None}
    defaults["eos_token_id"] = model.separator
    sizes = write_huggingface_config(model)
    written = defaults | earlier | sizes | {"dtype": dtype, "torch_dtype": dtype}
    if "n_positions" in sizes:  # another name of the same key
        del written["max_position_embeddings"]
    write_json(folder / CONFIG_FILE, written)
    if initial is None or not (has_tokens and copy_file(file_inside(initial, GENERATION_FILE), folder)):
        tokens = {key: written[key] for key in TOKEN_KEYS if written.get(key) is not None}
        write_json(folder / GENERATION_FILE, {"_from_model_config": True} | tokens)
    if is_known:
        copy_tokenizer(folder, config, tokenizer, [initial] if initial is not None and has_tokens else [])


def inert_keys(folder: Path) -> dict[str, Any]:
    """The keys of an untrusted config.json that do not change what the weights compute; none if the folder is gone."""
    if not (folder / CONFIG_FILE).is_file():
        return {}
    tree = ConfigFields.of(read_config_file(folder / CONFIG_FILE), str(folder / CONFIG_FILE)).tree
    return {key: value for key, value in tree.items() if key in INERT_KEYS and key not in ("auto_map", "architectures")}


def copy_tokenizer(folder: Path, config: RunConfig, found: str | None, initial: list[Path]) -> None:
    """Copies the tokenizer of the run and the files beside it. `initial` is the folder of the initial weights if it is
    their tokenizer, too. A tokenizer that is gone is left out.
    """
    folders = initial
    if found is not None:
        file = Path(found)
        if not file.is_file():
            return
        (folder / TOKENIZER_FILE).write_bytes(read_tokenizer(file))
        folders = [file.parent.resolve(), *initial] if file.name == TOKENIZER_FILE else initial
    for beside in folders:
        for name in COMPANIONS:
            if not (folder / name).exists():
                copy_file(file_inside(beside, name), folder)
    settings = folder / "tokenizer_config.json"
    if (folder / TOKENIZER_FILE).exists() and not settings.exists():
        write_json(settings, {"tokenizer_class": "PreTrainedTokenizerFast"})
    copy_template(folder, {source.chat_template for source in config.data.sources if source.kind == "chat"})


def copy_template(folder: Path, named: set[str]) -> None:
    """Puts the template of a run's chats in the place of the tokenizer's own one; `named` are the settings of its
    sources. A template that is gone is left out, as is one without the suffix .jinja: the run file that names it is
    untrusted.
    """
    settings = folder / "tokenizer_config.json"
    own = read_tokenizer_config(settings)
    if any(named):
        for name in TEMPLATE_FILES:
            (folder / name).unlink(missing_ok=True)
        if own.pop("chat_template", None) is not None:
            write_json(settings, own)
        if len(named) == 1 and (template := Path(*named)).suffix == ".jinja":
            copy_file(template, folder, TEMPLATE_FILE)
    elif (
        named and own and not own.get("chat_template") and not any((folder / name).exists() for name in TEMPLATE_FILES)
    ):
        (folder / TEMPLATE_FILE).write_text(DEFAULT_TEMPLATE)


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


def copy_file(file: Path, folder: Path, name: str = "") -> bool:
    """Copies a regular file; returns whether there is one."""
    if not file.is_file():
        return False
    content = read_regular_file(file, MAX_TOKENIZER_BYTES, str(file), "a file of a Hugging Face folder")
    (folder / (name or file.name)).write_bytes(content)
    return True
