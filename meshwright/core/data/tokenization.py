"""Encodes text as token ids by a tokenizer.json or as bytes, and finds the token that ends a document. Torch-free."""

from __future__ import annotations

import filecmp
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from meshwright.base.config import RunConfig, SourceConfig
from meshwright.base.config.data import BYTES, TOKENIZED_KINDS, TOKENIZER_FILE
from meshwright.base.io import file_inside, is_inside, read_regular_file
from meshwright.base.store.object_url import is_url
from meshwright.core.data.shards import TokenShards
from meshwright.core.data.source import content_digest
from meshwright.core.data.token_files import SEPARATOR_BYTE
from meshwright.errors import ConfigError, DataError

MAX_TOKENIZER_BYTES = 256 << 20
"""Size limit of a tokenizer.json."""

END_OF_TEXT_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>", "[SEP]")
"""Names by which a tokenizer.json usually declares its end-of-text token, in order of preference."""
NAME_TOKENIZER = "try --data.tokenizer=FILE, or --tokenizer FILE with sample"


@dataclass(frozen=True)
class Encoder:
    """Text -> token ids, and the token that ends a document."""

    encode: Callable[[list[str], bool], Iterable[Sequence[int]]]
    """(texts, whether to add the special tokens of the tokenizer's post-processor) -> token ids of each"""
    end_of_document: int | None
    """The token id that ends every document; None to add none."""
    digest: str
    """A digest of the tokenizer's content."""
    vocab: int
    """The largest token id plus one."""
    unadded_vocab: int
    """The same without added tokens, which the data may not have."""

    def end(self, ids: Sequence[int]) -> list[int]:
        """The token that is missing at the end of a document: a post-processor may have added it already."""
        if self.end_of_document is None or (len(ids) and ids[-1] == self.end_of_document):
            return []
        return [self.end_of_document]


def open_encoder(source: SourceConfig, separator: int | None) -> Encoder:
    """The byte-level encoder, or the one of a tokenizer.json."""
    if not source.tokenizer:
        return Encoder(lambda texts, _: [text.encode() for text in texts], end_of_bytes(source), "bytes", 256, 256)
    tokenizer, digest = load_tokenizer(source.tokenizer)

    def encode(texts: list[str], special: bool) -> Iterable[Sequence[int]]:
        return (encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=special))

    vocab, unadded = (max(tokenizer.get_vocab(added).values(), default=0) + 1 for added in (True, False))
    return Encoder(encode, find_end_of_document(source, tokenizer, separator), digest, vocab, unadded)


@cache
def tokenizing_code() -> str:
    """A digest of all that decides which token ids a text gets, beside the settings: the code that reads, renders and
    encodes it, Python, and the libraries that do the same.
    """
    folder = Path(__file__).parent
    files = [Path(__file__), *(folder / "chat").glob("*.py"), *(folder / "prepare").glob("*.py")]
    return content_digest(
        *(file.read_bytes() for file in sorted(files)),
        *(f"{name} {package_version(name)}" for name in ("tokenizers", "jinja2", "pyarrow")),
        platform.python_version(),
    )


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def end_of_bytes(source: SourceConfig) -> int | None:
    """The byte that ends a document of a source without a tokenizer."""
    if source.end_of_document not in ("auto", "none"):
        raise DataError(
            f"the end of a document is {source.end_of_document!r}, and the source has no tokenizer",
            'expected "auto" or "none" for bytes, or a tokenizer that has this token',
        )
    return None if source.end_of_document == "none" else SEPARATOR_BYTE


def find_tokenizer(path: str) -> Path:
    """The tokenizer.json that a path names: the file itself, or the one in the folder."""
    file = Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)
    others = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tokenizer_config.json", "spiece.model")
    if file.name in others or (not file.exists() and any((file.parent / name).exists() for name in others)):
        raise DataError(
            f"{file.parent} has no tokenizer.json, the file of a fast tokenizer",
            "try transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), which writes one",
        )
    return file


def find_run_tokenizer(config: RunConfig, folder: Path | None = None, tokenizer: str = "") -> str | None:
    """The tokenizer.json of a run: `tokenizer`, that of its data, of the folder of an export or of its initial weights.
    None: bytes are tokens.
    """
    if tokenizer:
        return str(find_tokenizer(tokenizer))
    paths = dict.fromkeys(map(tokenizer_of, config.data.sources)) if folder is None else {}
    # shards have a copy of their tokenizer; of those that are equal, the first one counts
    found = {tokenizer_content(path): path for path in reversed(paths) if path is not None}
    if len(found) > 1:
        raise DataError("the sources of data.mixture have several tokenizers", NAME_TOKENIZER)
    if found or config.data.tokenizer == BYTES:
        return next((path for path in found.values() if path != BYTES), None)
    weights = folder or (Path(config.init_from) if config.init_from else None)
    file = file_inside(weights.resolve(), TOKENIZER_FILE, NAME_TOKENIZER) if weights is not None else None
    return str(file) if file is not None and file.is_file() else None


def tokenizer_of(source: SourceConfig) -> str | None:
    """The tokenizer.json of a source, "bytes", or None if the source does not tell, as files of token ids."""
    if source.tokenizer:
        return str(find_tokenizer(source.tokenizer))
    if source.kind in TOKENIZED_KINDS:
        return BYTES
    if source.kind != "shards":
        return None
    shards = TokenShards(source.path)
    if shards.index.tokenizer == BYTES:
        return BYTES
    if is_url(source.path):
        raise ConfigError(f"{source.path} is in an object store, and its tokenizer with it", NAME_TOKENIZER)
    return str(shards.folder / TOKENIZER_FILE)


def tokenizer_content(path: str) -> str:
    """What tells a tokenizer.json from others: a digest of its content, or its path if it is gone."""
    if not Path(path).is_file():
        return path
    return content_digest(read_regular_file(Path(path), MAX_TOKENIZER_BYTES, path, "a tokenizer.json file"))


def has_tokenizer(folder: Path, tokenizer: str | None) -> bool:
    """Whether the tokenizer.json of a folder of weights has the content of `tokenizer` (None: bytes). A folder without
    one has token ids that nothing contradicts; one whose file is a link out of it has another tokenizer.
    """
    own = folder / TOKENIZER_FILE
    if not os.path.lexists(own):
        return True
    try:
        return tokenizer is not None and is_inside(folder, own) and filecmp.cmp(own, tokenizer, shallow=False)
    except (OSError, RuntimeError):  # one of them is gone, or cannot be read, or is a link to itself
        return False


def load_tokenizer(path: str) -> tuple[Any, str]:
    """The tokenizer of a tokenizer.json, and the digest of its content."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError(
            f"data.tokenizer = {path!r} needs the tokenizers package", "try pip install 'meshwright[text]'"
        ) from None
    try:
        raw = read_regular_file(Path(path), MAX_TOKENIZER_BYTES, "it", "a tokenizer.json file")
        tokenizer = Tokenizer.from_buffer(raw)
        tokenizer.no_padding()  # a document is neither padded nor cut, whatever the file was saved with
        tokenizer.no_truncation()
    except Exception as error:  # noqa: BLE001  the library raises bare Exceptions
        reason = error.message if isinstance(error, ConfigError) else error
        raise DataError(f"tokenizer {path} cannot be read: {reason}", "expected a tokenizer.json file") from None
    return tokenizer, content_digest(raw)


def find_end_of_document(source: SourceConfig, tokenizer: Any, separator: int | None) -> int | None:
    """The token id that ends a document: `data.end_of_document` if it names a token, else `model.separator`, else the
    tokenizer's end-of-text token.
    """
    if source.end_of_document == "none":
        return None
    if source.end_of_document != "auto":
        named: int | None = tokenizer.token_to_id(source.end_of_document)
        if named is None:
            raise DataError(
                f"data.end_of_document = {source.end_of_document!r} is not a token of {source.tokenizer}",
                'expected a token of the tokenizer, "auto" or "none"',
            )
        return named
    if separator is not None:
        return separator
    for name in END_OF_TEXT_TOKENS:
        if (found := tokenizer.token_to_id(name)) is not None:
            return int(found)
    raise DataError(
        f"tokenizer {source.tokenizer} has no known end-of-text token, so documents would run into each other",
        'try data.end_of_document = "TOKEN" (a token of the tokenizer) or "none"',
    )
