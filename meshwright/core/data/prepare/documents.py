"""Encodes the documents of a part as token ids, their ends and, for chats, the mask of the loss. Torch-free."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.core.data.chat.rendering import RefusedTemplate
from meshwright.core.data.chat.template import ChatEncoder
from meshwright.core.data.prepare.inputs import LINE_FORMATS
from meshwright.core.data.prepare.readers import MAX_LINE_BYTES, Part
from meshwright.core.data.tokenization import Encoder
from meshwright.errors import cut_text

BATCH_CHARACTERS = 1 << 18
"""Text that the tokenizer gets in one call: its result takes a hundred bytes per token until the ids are copied."""


@dataclass
class EncodedPart:
    """The documents of a part. A document of a text file has no end here: the file may continue in the next part."""

    pieces: list[NDArray[np.uint32]] = field(default_factory=list)
    masks: list[NDArray[np.uint8]] = field(default_factory=list)
    """empty for data without masks"""
    ends: list[int] = field(default_factory=list)
    tokens: int = 0
    bad: list[tuple[int, str, str]] = field(default_factory=list)
    """(line or row, reason, what to do about the chat template that is the cause) of what could not be decoded"""

    def add(self, ids: Sequence[int], is_document: bool) -> None:
        array = np.frombuffer(ids, np.uint8).astype(np.uint32) if isinstance(ids, bytes) else np.array(ids, np.uint32)
        self.pieces.append(array)
        self.tokens += len(ids)
        if is_document:
            self.ends.append(self.tokens)

    @property
    def ids(self) -> NDArray[np.uint32]:
        return np.concatenate(self.pieces) if self.pieces else np.empty(0, np.uint32)


def encode_part(part: Part, encoder: Encoder | ChatEncoder, text_field: str, skip_budget: int) -> EncodedPart:
    """The documents of a part. It ends early once more than `skip_budget` lines or rows cannot be decoded."""
    result = EncodedPart()
    texts: list[str] = []
    size = 0
    for row, raw in enumerate(read_rows(part), part.first_row):
        if part.file.format == "jsonl" and not raw.strip():
            continue
        try:
            if isinstance(encoder, ChatEncoder):
                ids, mask = encoder.encode(decode_row(raw, part.file.format))
                result.add(ids, True)
                result.masks.append(np.array(mask, np.uint8))
                continue
            text = find_text(decode_row(raw, part.file.format), text_field)
        except (ValueError, RecursionError) as error:
            hint = error.hint if isinstance(error, RefusedTemplate) else ""
            result.bad.append((row, cut_text(str(error), 400), hint))
            if len(result.bad) > skip_budget:
                return result
            continue
        texts.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            encode_texts(texts, encoder, part, result)
            texts, size = [], 0
    if isinstance(encoder, Encoder):
        encode_texts(texts, encoder, part, result)
    return result


def encode_texts(texts: list[str], encoder: Encoder, part: Part, result: EncodedPart) -> None:
    """Special tokens surround a whole document, not a line of one."""
    by_line = part.file.format == "text"
    for ids in encoder.encode(texts, not by_line):
        if not by_line and (end := encoder.end(ids)):
            result.add(ids, False)
            ids = end
        result.add(ids, not by_line)


def read_rows(part: Part) -> Iterator[Any]:
    """The lines of a part as bytes, or its rows as dicts."""
    if part.file.format in LINE_FORMATS:
        yield from io.BytesIO(part.content)
        return
    import pyarrow.ipc

    with pyarrow.ipc.open_stream(part.content) as stream:
        for batch in stream:
            yield from batch.to_pylist()


def decode_row(raw: bytes | dict[str, Any], format: str) -> Any:
    """The text of a line of a text file, the value of a line of JSON, or the dict of a row."""
    if isinstance(raw, dict):
        return raw
    if len(raw) > MAX_LINE_BYTES:
        raise ValueError(f"the line is longer than {MAX_LINE_BYTES:,} bytes")
    return json.loads(raw) if format == "jsonl" else raw.decode()


def find_text(record: Any, text_field: str) -> str:
    """The text of a line, of a JSONL record or of a row of a table."""
    text = record.get(text_field) if isinstance(record, dict) else record
    if not isinstance(text, str):
        raise ValueError(f"the record has no text under {text_field!r}")
    if len(text) > MAX_LINE_BYTES:
        raise ValueError(f"the text is longer than {MAX_LINE_BYTES:,} characters")
    text.encode()  # an unpaired surrogate raises ValueError here, where the line number is known
    return text
