"""The samples of chats by their definition in docs/fine-tuning.md: rendered, masked and packed from the raw records."""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray

from meshwright.base.config import IGNORE_INDEX

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
MAX_MESSAGES = 4096
NO_ANSWER = 1 << 62
OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Code points that are no characters: in a rendered text they surround what the assistant wrote."""

Span = tuple[int, int]
Render = Callable[[list[dict[str, Any]]], tuple[str, list[Span]]]
"""messages -> text, and the spans of what the assistant wrote"""
Tokenize = Callable[[str, bool], tuple[list[int], Sequence[Span]]]
"""(text, whether it is plain text, with special tokens) -> token ids, and the characters of each"""
Chat = tuple[NDArray[Any], NDArray[Any]]
"""(token ids, mask)"""


@dataclass(frozen=True)
class ChatReader:
    """Sample i of chats: one chat or, packed, several. A chat predicts each of its tokens but the first."""

    lengths: NDArray[np.int64]
    """the tokens of every chat"""
    answers: NDArray[np.int64]
    """the index in its chat of the first token that is predicted and counts; NO_ANSWER if there is none"""
    read: Callable[[int], Chat]
    sequence: int
    packed: bool
    complete: bool = True
    borders: tuple[int, ...] = ()

    @classmethod
    def of(cls, chats: list[Chat], sequence: int, packed: bool, complete: bool) -> ChatReader:
        """The samples of chats in memory."""
        answers = [next((i for i, counts in enumerate(mask) if i and counts), NO_ANSWER) for _, mask in chats]
        lengths = np.array([len(ids) for ids, _ in chats], np.int64)
        return cls(lengths, np.array(answers, np.int64), chats.__getitem__, sequence, packed, complete)

    @property
    def samples(self) -> int:
        return len(self.packs)

    @cached_property
    def packs(self) -> list[list[int]]:
        """The chats of every sample; those without an answer in the sequence are left out."""
        used = np.flatnonzero(self.answers <= self.sequence).tolist()
        if not self.packed:
            return [[chat] for chat in used]
        return best_fit({chat: min(int(self.lengths[chat]) - 1, self.sequence) for chat in used}, self.sequence)

    def arrays(self, index: int) -> tuple[NDArray[np.int64], ...]:
        """(tokens, labels), and the documents of a packed sample, whose rest is a document of its own."""
        chats = [[part[: self.sequence + 1].astype(np.int64) for part in self.read(chat)] for chat in self.packs[index]]
        tokens = np.concatenate([ids[:-1] for ids, _ in chats])
        labels = np.concatenate([np.where(mask[1:] == 0, IGNORE_INDEX, ids[1:]) for ids, mask in chats])
        documents = np.repeat(np.arange(len(chats)), [len(ids) - 1 for ids, _ in chats])
        rest = (0, self.sequence - len(tokens))
        fillers = (tokens, 0), (labels, IGNORE_INDEX), (documents, len(chats))
        columns = tuple(np.pad(column, rest, constant_values=filler) for column, filler in fillers)
        return columns if self.packed else columns[:2]


def best_fit(sizes: Mapping[int, int], sequence: int) -> list[list[int]]:
    """Each chat, the longest first, goes to the fullest sample that has room for it; of equally full ones the first."""
    samples: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for chat in sorted(sizes, key=lambda chat: -sizes[chat]):
        fullest = bisect_left(rooms, sizes[chat])
        room, number = sequence, len(samples)
        if fullest < len(rooms):
            room = rooms[fullest]
            number = heappop(by_room[room])
            if not by_room[room]:
                del by_room[room], rooms[fullest]
        else:
            samples.append([])
        samples[number].append(chat)
        if left := room - sizes[chat]:
            if left not in by_room:
                insort(rooms, left)
            heappush(by_room.setdefault(left, []), number)
    return sorted(map(sorted, samples))


def read_masked_shards(
    files: Sequence[Sequence[Path]], size: int, width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], Callable[[int], Chat]]:
    """(lengths, answers, a function that reads a chat) of shards of `size` tokens: (token ids, document ends, mask)."""
    ends = np.concatenate(
        [np.fromfile(file, "<u8").astype(np.int64) + n * size for n, (_, file, _) in enumerate(files)]
    )
    starts = np.append(0, ends[:-1])
    answers = np.full(len(ends), NO_ANSWER)
    for number, (_, _, file) in enumerate(files):
        counted = np.flatnonzero(np.fromfile(file, np.uint8)) + number * size
        chats = np.searchsorted(ends, counted, "right")
        inside = counted > starts[chats]
        np.minimum.at(answers, chats[inside], (counted - starts[chats])[inside])

    def read(chat: int) -> Chat:
        found: tuple[list[bytes], list[bytes]] = [], []
        for number in range(starts[chat] // size, -(-ends[chat] // size)):
            start, end = max(starts[chat] - number * size, 0), min(ends[chat] - number * size, size)
            for parts, file, itemsize in zip(found, files[number][::2], (width, 1), strict=True):
                with open(file, "rb") as opened:
                    opened.seek(start * itemsize)
                    parts.append(opened.read((end - start) * itemsize))
        return np.frombuffer(b"".join(found[0]), f"<u{width}"), np.frombuffer(b"".join(found[1]), np.uint8)

    return ends - starts, answers, read


def encode_record(record: Any, render: Render, tokenize: Tokenize, end: int | None) -> Chat:
    """Token ids and mask of a record; raises ValueError, LookupError or TypeError for one that is no chat."""
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
            raise ValueError("no list of messages")
        roles = [text_of(message, "role") for message in messages if text_of(message, "content") is not None]
        if "assistant" not in roles:
            raise ValueError("no answer")
        text, spans = render(messages)
        ids, offsets = tokenize(text, False)
    else:
        prompt, completion = text_of(record, "prompt"), text_of(record, "completion")
        spans = [(len(prompt), len(prompt + completion))]
        ids, offsets = tokenize(prompt + completion, True)
    mask = [any(first < stop and start < last for start, stop in spans) for first, last in offsets]
    if "messages" not in record and end is not None:
        appended = ids[-1:] != [end]
        ids, mask = ids + [end] * appended, (mask if appended else mask[:-1]) + [True]
    return np.array(ids), np.array(mask)


def text_of(record: Any, key: str) -> str:
    if not isinstance(record, dict) or not isinstance(text := record[key], str):
        raise TypeError(f"{key} is no text")
    text.encode()
    return text


def tokenize_bytes(text: str, _special: bool) -> tuple[list[int], list[Span]]:
    """Every byte is a token; it has the character that it is a part of."""
    spans = [(place, place + 1) for place, letter in enumerate(text) for _ in letter.encode()]
    return list(text.encode()), spans


def render_chatml(messages: list[dict[str, Any]]) -> tuple[str, list[Span]]:
    """The template for chats without one."""
    text, spans = "", []
    for message in messages:
        text += f"<|im_start|>{message['role']}\n"
        content = f"{message['content']}<|im_end|>"
        spans += [(len(text), len(text) + len(content))] if message["role"] == "assistant" else []
        text += f"{content}\n"
    return text, spans


class AnswerTags(Extension):
    """Surrounds the contents of `{% generation %}` by OPEN and CLOSE."""

    tags = {"generation"}  # noqa: RUF012  the interface of Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opened, closed = (nodes.Output([nodes.TemplateData(mark)]) for mark in (OPEN, CLOSE))
        return nodes.Scope([opened, *body, closed]).set_lineno(line)


def open_renderer(template: str, tokenizer: str) -> Render:
    """The template of the config, or the one beside the tokenizer, or ChatML."""
    source, special = find_template(template, tokenizer)
    if not source:
        return render_chatml
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[AnswerTags, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **settings: json.dumps(value, **{"ensure_ascii": False, **settings})
    environment.globals["raise_exception"] = raise_value_error
    compiled = environment.from_string(source)

    def render(messages: list[dict[str, Any]], prompt: bool = False) -> str:
        return compiled.render(messages=messages, add_generation_prompt=prompt, **special)

    def render_chat(messages: list[dict[str, Any]]) -> tuple[str, list[Span]]:
        text = render(messages)
        if "endgeneration" in source:
            opened, plain = text.split(OPEN), text.replace(OPEN, "").replace(CLOSE, "")
            return plain, list(marked_spans(opened))
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        return text, [(len(render(messages[:i], True)), len(render(messages[: i + 1]))) for i in answers]

    return render_chat


def find_template(template: str, tokenizer: str) -> tuple[str, dict[str, str]]:
    """(the template, '' for ChatML; the special tokens by name)."""
    settings = tokenizer_settings(tokenizer)
    special = {name: text for name in SPECIAL_TOKENS if (text := token_text(settings.get(name)))}
    beside = Path(tokenizer).parent / "chat_template.jinja"
    if template or (tokenizer and beside.exists()):
        return Path(template or beside).read_text(), special
    declared = settings.get("chat_template")
    if isinstance(declared, list):
        declared = {entry["name"]: entry["template"] for entry in declared}.get("default")
    return declared or "", special


def tokenizer_settings(tokenizer: str) -> dict[str, Any]:
    """The tokenizer_config.json beside a tokenizer; empty if there is none."""
    file = Path(tokenizer).parent / "tokenizer_config.json"
    return json.loads(file.read_text()) if tokenizer and file.exists() else {}


def token_text(value: Any) -> str:
    """A special token is a text, or an object with its content."""
    return (value.get("content") if isinstance(value, dict) else value) or ""


def marked_spans(opened: list[str]) -> Iterator[Span]:
    """The spans of a text that is divided where an answer opens."""
    place = len(opened[0])
    for part in opened[1:]:
        answer, _, rest = part.partition(CLOSE)
        yield place, place + len(answer)
        place += len(answer) + len(rest)


def raise_value_error(message: object) -> None:
    raise ValueError(message)
