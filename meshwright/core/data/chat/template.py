"""Encodes a record of chat data as token ids and a mask, which is 1 where the loss counts: on answers. Torch-free."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.base.config import RunConfig, SourceConfig
from meshwright.base.config.data import TOKENIZED_KINDS, TOKENIZER_FILE
from meshwright.base.io import file_inside, read_json, read_regular_file
from meshwright.core.data.chat.rendering import DEFAULT_TEMPLATE, MAX_TEMPLATE_BYTES, ChatTemplate, Span
from meshwright.core.data.chat.sandbox import OTHER_TEMPLATE
from meshwright.core.data.source import content_digest
from meshwright.core.data.tokenization import end_of_bytes, find_end_of_document, has_tokenizer, load_tokenizer
from meshwright.errors import ConfigError, DataError

Tokenize = Callable[[str, bool], tuple[list[int], list[Span]]]
"""(text, whether to add the special tokens of the post-processor) -> token ids, and the characters of each token."""
MAX_MESSAGES = 1 << 12
SETTINGS_FILE = "tokenizer_config.json"
UNREADABLE = (ConfigError, DataError, OSError, RuntimeError, ValueError)
"""What is raised for a template that cannot be read."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatEncoder:
    """Encodes the records of a source: by a template, a tokenizer, and the token that ends a completion."""

    def __init__(self, template: ChatTemplate, tokenize: Tokenize, end: int | None, tokenizer_digest: str) -> None:
        self.template, self.tokenize, self.end = template, tokenize, end
        self.digest = content_digest("chat", template.source, sorted(template.special.items()), tokenizer_digest, end)
        """a digest of everything that decides about the token ids of a record"""

    def encode(self, record: Any) -> tuple[list[int], list[int]]:
        return encode_chat(record, self.template, self.tokenize, self.end)


def encode_chat(
    record: Any, template: ChatTemplate, tokenize: Tokenize, end: int | None
) -> tuple[list[int], list[int]]:
    """The token ids of a record and their mask.

    `{"messages": [{"role", "content"}, ...]}` is rendered by the template. `{"prompt", "completion"}` is plain text,
    and `end` follows the completion. Raises ValueError for any other record.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"the record is a {type(record).__name__}, expected an object")
    if "messages" in record:
        text, spans = template.render_chat(read_messages(record["messages"]))
        ids, offsets = tokenize(text, False)
    elif "prompt" in record and "completion" in record:
        prompt, completion = read_text(record, "prompt"), read_text(record, "completion")
        spans = [(len(prompt), len(prompt) + len(completion))]
        ids, offsets = tokenize(prompt + completion, True)
    else:
        raise ValueError("the record has neither messages nor prompt and completion")
    mask = mask_tokens(offsets, spans)
    if "messages" not in record and end is not None:
        if ids[-1:] == [end]:  # the post-processor has added it
            mask[-1] = 1
        else:
            ids, mask = [*ids, end], [*mask, 1]
    return ids, mask


def mask_tokens(offsets: Sequence[Span], spans: list[Span]) -> list[int]:
    """1 for every token that has a character inside of a span."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    stops = [stop for _, stop in merged]
    found = [(bisect_right(stops, first), last) for first, last in offsets]
    return [int(number < len(merged) and merged[number][0] < last) for number, last in found]


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of an untrusted record; each has a role and a content, and one of them is the assistant's."""
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise ValueError(f"messages is not a list of 1 to {MAX_MESSAGES} messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {index} is not an object with a role")
        read_text(message, "content", f"message {index} ")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no message is the assistant's, so there is nothing to learn")
    return messages


def read_text(record: Mapping[str, Any], key: str, where: str = "") -> str:
    text = record.get(key)
    if not isinstance(text, str):
        raise ValueError(f"{where}{key} is a {type(text).__name__}, expected text")
    text.encode()  # an unpaired surrogate raises ValueError here, where the line number is known
    return text


def open_chat_encoder(source: SourceConfig, separator: int | None) -> ChatEncoder:
    """The encoder of a chat source: the template and the tokenizer of the config; without a tokenizer, bytes."""
    template = open_template(source)
    if not source.tokenizer:
        return ChatEncoder(template, tokenize_bytes, end_of_bytes(source), "bytes")
    tokenizer, digest = load_tokenizer(source.tokenizer)
    source = with_end_of_chat(source, separator)

    def tokenize(text: str, special: bool) -> tuple[list[int], list[Span]]:
        encoding = tokenizer.encode(text, add_special_tokens=special)
        return list(encoding.ids), list(encoding.offsets)

    return ChatEncoder(template, tokenize, find_end_of_document(source, tokenizer, separator), digest)


def with_end_of_chat(source: SourceConfig, separator: int | None) -> SourceConfig:
    """The source with the token that ends a completion, if it is not given: the tokenizer's eos_token. A template ends
    chats by itself, so there may be none.
    """
    if source.kind != "chat" or not source.tokenizer or source.end_of_document != "auto" or separator is not None:
        return source
    settings = read_tokenizer_config(Path(source.tokenizer).parent / SETTINGS_FILE)
    return replace(source, end_of_document=special_token(settings.get("eos_token")) or "none")


def tokenize_bytes(text: str, _special: bool) -> tuple[list[int], list[Span]]:
    encoded = [(byte, (index, index + 1)) for index, letter in enumerate(text) for byte in letter.encode()]
    return [byte for byte, _ in encoded], [span for _, span in encoded]


def open_template(source: SourceConfig) -> ChatTemplate:
    """The template of `data.chat_template`, else the one beside the tokenizer (chat_template.jinja, or chat_template of
    tokenizer_config.json), else the built-in one.
    """
    file = find_template(source)
    settings = read_tokenizer_config(Path(source.tokenizer).parent / SETTINGS_FILE) if source.tokenizer else {}
    special = {name: text for name in SPECIAL_TOKENS if (text := special_token(settings.get(name)))}
    try:
        text = read_template(source)
        return ChatTemplate(text, special) if file is None else ChatTemplate(text, special, str(file))
    except (ValueError, ConfigError) as error:
        reason = error.message if isinstance(error, ConfigError) else error
        raise ConfigError(f"chat template {file} cannot be used: {reason}", OTHER_TEMPLATE) from None


def read_template(source: SourceConfig) -> str:
    """The text of the template that `find_template` finds, which may be no template."""
    file, beside = find_template(source), Path(source.tokenizer).parent / SETTINGS_FILE
    if file is None:
        return DEFAULT_TEMPLATE
    if source.tokenizer and file == beside:
        return named_template(read_tokenizer_config(beside).get("chat_template"))
    return read_regular_file(file, MAX_TEMPLATE_BYTES, f"chat template {file}", "a template in Jinja").decode()


def find_template(source: SourceConfig) -> Path | None:
    """The file that the template of a chat source is in; None for the built-in one."""
    if source.chat_template or not source.tokenizer:
        return Path(source.chat_template) if source.chat_template else None
    folder = Path(source.tokenizer).parent
    if (folder / "chat_template.jinja").exists():
        file_inside(folder.resolve(), "chat_template.jinja")
        return folder / "chat_template.jinja"
    beside = folder / SETTINGS_FILE
    return beside if named_template(read_tokenizer_config(beside).get("chat_template")) else None


def read_tokenizer_config(file: Path) -> dict[str, Any]:
    """The untrusted tokenizer_config.json beside a tokenizer; empty if there is none."""
    settings = read_json(file_inside(file.parent.resolve(), file.name), follow=True) if file.exists() else {}
    if not isinstance(settings, dict):
        raise DataError(f"{file} is not a JSON object", "expected the tokenizer_config.json of a tokenizer")
    return settings


def named_template(value: Any) -> str:
    """The chat_template of a tokenizer_config.json: a text, or a list of named texts, of which `default` is taken."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""


def special_token(value: Any) -> str:
    """A special token of a tokenizer_config.json: a text, or an object with its content."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def encoding_notes(config: RunConfig) -> list[str]:
    """What encodes the text of a run, and whether the folder of its initial weights comes with something else."""
    folder = Path(config.init_from) if config.init_from else None
    given, notes = f"init_from = {config.init_from}", []
    for source in config.data.sources:
        if source.kind not in TOKENIZED_KINDS:
            continue
        same = folder is None or has_tokenizer(folder, source.tokenizer or None)
        used = f"tokenizer {source.tokenizer}" if source.tokenizer else "bytes are tokens"
        if folder is not None and not os.path.isfile(folder / TOKENIZER_FILE):
            notes.append(f"{used}: {given} has no {TOKENIZER_FILE}")
        elif source.tokenizer or not same:
            notes.append(used + ("" if same else f", and {given} has another tokenizer"))
        if source.kind == "chat":
            with suppress(*UNREADABLE):  # an error of this template is raised where it is opened
                template = f"chat template {find_template(source) or 'ChatML, which is built in'}"
                differs = folder is not None and has_another_template(folder, source)
                notes.append(template + (f", and {given} has another one" if differs else ""))
    return list(dict.fromkeys(notes))


def has_another_template(folder: Path, source: SourceConfig) -> bool:
    """Whether a folder has a template other than that of a source, be it one that cannot be used."""
    own = replace(source, tokenizer=str(folder / TOKENIZER_FILE), chat_template="")
    try:
        return find_template(own) is not None and read_template(own) != read_template(source)
    except UNREADABLE:
        return True
