"""Tests of meshwright.core.data.prepare.readers and inputs: every format, tokenizers, masks, and hostile files."""

from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from meshwright.core.data.prepare import readers
from meshwright.core.data.shards import TokenShards
from meshwright.errors import ConfigError, DataError
from tests.core.data.prepare.corpus import TEXTS, documents, jsonl, prepare, save_tokenizer


def write_zstd(path, content):
    half = len(content) // 2
    path.write_bytes(b"".join(zstandard.compress(part) for part in (content[:half], content[half:])))  # two frames


def write_dataset(path, schema=None):
    """A dataset as `Dataset.save_to_disk` of the datasets library writes it."""
    path.mkdir()
    for number, texts in enumerate((TEXTS[:100], TEXTS[100:])):
        table = pa.table({"text": texts, "other": list(range(len(texts)))})
        with pa.ipc.new_stream(str(path / f"data-{number:05d}-of-00002.arrow"), table.schema) as stream:
            stream.write_table(table, max_chunksize=50)
    names = [{"filename": f"data-{number:05d}-of-00002.arrow"} for number in range(2)]
    (path / "state.json").write_text(json.dumps({"_data_files": names, "_fingerprint": "0"}))
    (path / "dataset_info.json").write_text("{}")


WRITERS = {
    "c.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl())),
    "c.jsonl.zst": lambda path: write_zstd(path, jsonl()),
    "c.parquet": lambda path: pa.parquet.write_table(
        pa.table({"id": range(300), "text": TEXTS}), path, row_group_size=90
    ),
    "dataset": write_dataset,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_tokens(corpus, tmp_path, name):
    WRITERS[name](tmp_path / name)
    expected = prepare(corpus, tmp_path / "expected")
    found = prepare(tmp_path / name, tmp_path / "out", workers=2)
    assert found["digest"] == expected["digest"]


def test_dataset_of_the_datasets_library_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "one")
    prepare(tmp_path / "one", tmp_path / "out")
    assert documents(tmp_path / "out") == [text + "\0" for text in TEXTS]


def test_dataset_with_several_splits_asks_for_one(tmp_path):
    (tmp_path / "d").mkdir()
    write_dataset(tmp_path / "d" / "train")
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ConfigError, match="several splits; expected one of them: train"):
        prepare(tmp_path / "d", tmp_path / "out")


@pytest.mark.parametrize("name", ["../c.jsonl", "/etc/passwd", "x.pkl", 3])
def test_dataset_that_names_other_files_is_rejected(tmp_path, name):
    write_dataset(tmp_path / "d")
    (tmp_path / "d" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DataError, match="does not list the files"):
        prepare(tmp_path / "d", tmp_path / "out")


def test_links_that_lead_out_of_an_input_folder_are_refused(corpus, tmp_path):
    folder, private = tmp_path / "data", tmp_path / "private"
    for each in (folder / "below", private):
        each.mkdir(parents=True)
    (private / "secret.txt").write_text("secret\n")
    (folder / "below" / "own.txt").write_text("own\n")
    (folder / "inside.txt").symlink_to("below/own.txt")
    prepare(folder, tmp_path / "out")
    assert documents(tmp_path / "out") == ["own\n\0"]
    (folder / "a.txt").symlink_to("../private/secret.txt")
    (folder / "linked").symlink_to(private)
    message = r"1 of {} files of .*/data are links that lead out of it, such as .*{} to .*/private/secret.txt; try to "
    for pattern, count, name in (("", 2, "a.txt"), ("*.txt", 2, "a.txt"), ("*/*.txt", 2, "linked/secret.txt")):
        with pytest.raises(ConfigError, match=message.format(count, name)):
            prepare(folder / pattern, tmp_path / "other")
    prepare(folder / "a.txt", tmp_path / "named")
    assert documents(tmp_path / "named") == ["secret\n\0"]
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (folder / "data.arrow").symlink_to("../private/secret.txt")
    with pytest.raises(ConfigError, match=message.format(2, "data.arrow")):
        prepare(folder, tmp_path / "other")


def test_snapshot_of_the_hugging_face_cache_has_links_to_its_blobs(tmp_path):
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "1" / "train", tmp_path / "cache" / "blobs"
    for each in (snapshot, blobs):
        each.mkdir(parents=True)
    (blobs / "0").write_text("text\n")
    (snapshot / "a.txt").symlink_to("../../../blobs/0")
    prepare(snapshot, tmp_path / "out")
    assert documents(tmp_path / "out") == ["text\n\0"]


def test_text_files_are_documents_with_one_end_each(tmp_path):
    (tmp_path / "in").mkdir()
    texts = {"a.txt": "x\n" * 900, "b.txt": "", "c.txt": "last line without an end", "d.txt.gz": "compressed\n"}
    for name, text in texts.items():
        content = text.encode()
        (tmp_path / "in" / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    prepare(tmp_path / "in", tmp_path / "out", workers=2)
    assert documents(tmp_path / "out") == [text + "\0" for text in texts.values() if text]


def test_parts_of_a_text_file_do_not_change_its_tokens(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some words in a line\n" * 200 + "\n" * 2000)
    digests = set()
    for size in (64, 1000, 1 << 20):
        monkeypatch.setattr(readers, "PART_BYTES", size)
        digests.add(prepare(tmp_path / "a.txt", tmp_path / str(size), end_of_document="none")["digest"])
    assert len(digests) == 1


@pytest.mark.parametrize(("size", "dtype"), [(10, "uint16"), (1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_type_of_the_ids_follows_from_the_vocabulary(tmp_path, size, dtype):
    (tmp_path / "t.jsonl").write_bytes(jsonl(["w2 w3 w4 w5", "w6 unknown"]))
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", size)
    assert prepare(tmp_path / "t.jsonl", tmp_path / "out", tokenizer=tokenizer)["dtype"] == dtype
    shards = TokenShards(tmp_path / "out")
    assert shards.gather("tokens", 0, 8).tolist() == [2, 3, 4, 5, 1, 6, 0, 1]  # neither cut nor padded
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == Path(tokenizer).read_bytes()


def test_folder_of_a_tokenizer_without_a_fast_file_is_rejected_with_what_to_do(corpus, tmp_path):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "tokenizer.model").write_bytes(b"\n\x0e")
    for path in (tmp_path / "slow", tmp_path / "slow" / "tokenizer.model"):
        with pytest.raises(DataError, match=r"no tokenizer\.json.*save_pretrained"):
            prepare(corpus, tmp_path / "out", tokenizer=str(path))
    save_tokenizer(tmp_path / "slow" / "tokenizer.json")
    prepare(corpus, tmp_path / "out", tokenizer=str(tmp_path / "slow"))


def test_chat_records_have_a_mask(tmp_path):
    chats = [[{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a" * n}] for n in range(1, 40)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    pa.parquet.write_table(pa.table({"messages": chats}), tmp_path / "c.parquet")
    results = [
        prepare(tmp_path / name, tmp_path / f"{name}.out", format="chat", workers=2)
        for name in ("c.jsonl", "c.parquet")
    ]
    assert results[0]["digest"] == results[1]["digest"]
    shards = TokenShards(tmp_path / "c.jsonl.out")
    for number, chat in enumerate(chats):
        ids, mask = shards.document(number)
        assert bytes(ids[mask == 1].astype(np.uint8)).startswith(chat[1]["content"].encode())


def test_row_without_text_is_named(tmp_path):
    pa.parquet.write_table(pa.table({"text": [*TEXTS, None]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet row 301 cannot be decoded: the record has no text"):
        prepare(tmp_path / "c.parquet", tmp_path / "out")
    with pytest.raises(DataError, match=r"has no column 'body'; expected --field, one of text"):
        prepare(tmp_path / "c.parquet", tmp_path / "out", field="body")


def test_line_over_the_limit_is_one_bad_line_and_is_not_held_in_memory(tmp_path, monkeypatch):
    for module in (readers, __import__("meshwright.core.data.prepare.documents", fromlist=["x"])):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 2000)
    good = jsonl(["good"])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(good + b'{"text": "' + b"0" * 10**7 + b'"}\n' + good))
    result = prepare(tmp_path / "c.jsonl.gz", tmp_path / "out", bad_sample_budget=1)
    assert (result["documents"], result["skipped"]) == (2, 1)
    with pytest.raises(DataError, match="line 2 cannot be decoded: the line is longer than 2,000 bytes"):
        prepare(tmp_path / "c.jsonl.gz", tmp_path / "stop")
    monkeypatch.setattr(readers, "MAX_SKIPPED_BYTES", 10**6)
    with pytest.raises(DataError, match="line 2 is longer than 1,000,000 bytes"):
        prepare(tmp_path / "c.jsonl.gz", tmp_path / "bomb", bad_sample_budget=1)


def truncated(content):
    return content[: len(content) * 2 // 3]


def parquet_bytes():
    sink = io.BytesIO()
    pa.parquet.write_table(pa.table({"text": TEXTS}), sink, compression="none", use_dictionary=False)
    return sink.getvalue()


HOSTILE = {
    "truncated.jsonl.gz": truncated(gzip.compress(jsonl())),
    "crc.jsonl.gz": gzip.compress(jsonl())[:-8] + bytes(8),
    "plain.jsonl.gz": jsonl(),
    "truncated.jsonl.zst": truncated(zstandard.compress(jsonl())),
    "plain.jsonl.zst": jsonl(),
    "truncated.parquet": truncated(parquet_bytes()),
    "plain.parquet": jsonl(),
    "flipped.parquet": parquet_bytes().replace(b"document 17", b"document \xff7"),
    "plain.arrow": jsonl(),
    "empty.arrow": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(HOSTILE[name])
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        prepare(tmp_path / name, tmp_path / "out", workers=2)
    assert not (tmp_path / "out" / "index.json").exists()


def test_unreadable_missing_and_unknown_inputs_are_named(tmp_path):
    (tmp_path / "a.xyz").write_text("text")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    os.mkfifo(tmp_path / "pipe.jsonl")
    cases = {
        "a.xyz": (ConfigError, "format of .*a.xyz is not known"),
        "no.jsonl": (DataError, "'.*no.jsonl' matches no file"),
        "empty.jsonl": (DataError, "the input is empty.*; try another INPUT or --field"),
        "pipe.jsonl": (DataError, "is not a regular file"),
    }
    for name, (kind, message) in cases.items():
        with pytest.raises(kind, match=message):
            prepare(tmp_path / name, tmp_path / "out")
    with pytest.raises(DataError, match="the end of a document is 'zzz', and the source has no tokenizer"):
        prepare(tmp_path / "empty.jsonl", tmp_path / "out", end_of_document="zzz")
    with pytest.raises(ConfigError, match=r"--workers 0 is out of range; expected 1 to"):
        prepare(tmp_path / "a.xyz", tmp_path / "out", workers=0)
