"""Every kind of source gives the samples it should, knows its content, and names what is wrong with it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.config import DataConfig, SourceConfig, load_config
from meshwright.data import file_sources
from meshwright.data.file_sources import TokenSource, open_sources
from meshwright.data.source import IGNORED, ConcatenatedSource, IndexableSource, SyntheticSource
from meshwright.errors import DataError


def opened(vocab: int = 256, **settings):
    [source] = open_sources(DataConfig(sequence=4, **settings), vocab)
    return source


def test_the_default_corpus_is_the_standard_library():
    [source] = open_sources(DataConfig(), 256)
    assert len(source) > 10_000
    assert "import" in bytes(source.ids[:100_000]).decode()
    assert source.fingerprint() == open_sources(DataConfig(), 256)[0].fingerprint()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_token_file_is_cut_into_samples_with_the_next_token_as_label(tmp_path, dtype):
    np.arange(13, dtype=dtype).tofile(tmp_path / "t.bin")
    source = opened(kind="tokens", path=str(tmp_path / "t.bin"), dtype=dtype)
    assert len(source) == 3
    tokens, labels = source[2]
    assert (tokens.tolist(), labels.tolist()) == ([8, 9, 10, 11], [9, 10, 11, 12])
    assert isinstance(source.ids, np.memmap)


def test_a_folder_of_token_files_is_one_source(tmp_path):
    for name, start in (("a.bin", 0), ("b.bin", 100)):
        np.arange(start, start + 9, dtype=np.uint16).tofile(tmp_path / name)
    source = opened(kind="tokens", path=str(tmp_path))
    assert len(source) == 4
    assert [int(source[i][0][0]) for i in range(4)] == [0, 4, 100, 104]
    assert len(opened(kind="tokens", path=str(tmp_path / "a*"))) == 2


def test_a_token_file_of_odd_length_is_named(tmp_path):
    (tmp_path / "t.bin").write_bytes(b"123")
    with pytest.raises(DataError, match=r"t\.bin has an odd length: 3 bytes is no multiple of 2"):
        opened(kind="tokens", path=str(tmp_path / "t.bin"))


@pytest.mark.parametrize("count", [0, 3])
def test_an_empty_source_is_named(tmp_path, count):
    np.arange(count, dtype=np.uint16).tofile(tmp_path / "t.bin")
    with pytest.raises(DataError, match=r"t\.bin is empty"):
        opened(kind="tokens", path=str(tmp_path / "t.bin"))


def test_ids_beyond_the_vocabulary_are_named(tmp_path):
    np.full(100, 300, dtype=np.uint16).tofile(tmp_path / "t.bin")
    with pytest.raises(DataError, match=r"t\.bin holds token id 300, beyond model\.vocab = 256"):
        opened(kind="tokens", path=str(tmp_path / "t.bin"))


def test_in_a_file_too_large_to_check_whole_an_id_beyond_the_vocabulary_is_met_at_its_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(file_sources, "MAX_FULL_SCAN_BYTES", 0)
    ids = np.zeros(10_000_000, dtype=np.uint16)
    ids[1_234_567] = 999
    source = TokenSource(ids, 4, 256, "large")
    with pytest.raises(ValueError, match=r"token id 999 is beyond model\.vocab"):
        source[1_234_567 // 4]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="matches no file"):
        opened(kind="tokens", path=str(tmp_path / "no*"))


def test_plain_text_is_bytes_without_a_tokenizer(tmp_path):
    (tmp_path / "t.txt").write_text("hello world")
    source = opened(kind="text", path=str(tmp_path / "t.txt"))
    assert bytes(source[0][0].astype(np.uint8)) == b"hell"
    assert len(source) == 2


def word_tokenizer(folder):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["[UNK]", "the", "cat", "sat", "on", "mat"]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_text_goes_through_a_tokenizer_once_and_is_kept(tmp_path, kind):
    lines = ["the cat sat", "on the mat"]
    text = "\n".join(json.dumps({"text": line}) if kind == "jsonl" else line for line in lines) + "\n"
    (tmp_path / "t").write_text(text)
    settings = {"kind": kind, "path": str(tmp_path / "t"), "tokenizer": word_tokenizer(tmp_path)}
    source = opened(vocab=6, **settings)
    assert source.ids.tolist() == [1, 2, 3, 4, 1, 5]
    [kept] = (tmp_path / "cache").iterdir()
    made = kept.stat().st_mtime_ns
    assert opened(vocab=6, **settings).fingerprint() == source.fingerprint()
    assert kept.stat().st_mtime_ns == made


def test_a_jsonl_line_that_cannot_be_decoded_is_named_or_quarantined_within_the_budget(tmp_path):
    good = json.dumps({"text": "abcdefgh"})
    (tmp_path / "t.jsonl").write_text("\n".join([good, "{broken", good, '{"other": 1}']) + "\n")
    settings = {"kind": "jsonl", "path": str(tmp_path / "t.jsonl")}
    with pytest.raises(DataError, match=r"t\.jsonl line 2 cannot be decoded"):
        opened(**settings)
    with pytest.raises(DataError, match=r"t\.jsonl line 4 cannot be decoded: no text under 'text'"):
        opened(**settings, on_bad_sample="quarantine", bad_sample_budget=1)
    source = opened(**settings, on_bad_sample="quarantine", bad_sample_budget=2)
    assert bytes(source.ids.astype(np.uint8)) == b"abcdefgh\0abcdefgh\0"
    assert not list((tmp_path / "cache").glob("*.part"))


def test_blank_lines_are_no_documents_and_half_a_character_is_named(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "abcdef"}\n\n  \n')
    assert bytes(opened(kind="jsonl", path=str(tmp_path / "t.jsonl")).ids.astype(np.uint8)) == b"abcdef\0"
    (tmp_path / "bad.jsonl").write_text('{"text": "\\ud800"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl line 1 cannot be decoded"):
        opened(kind="jsonl", path=str(tmp_path / "bad.jsonl"))
    settings = {"on_bad_sample": "quarantine", "bad_sample_budget": 1}
    with pytest.raises(DataError, match=r"bad\.jsonl is empty: no line could be decoded"):
        opened(kind="jsonl", path=str(tmp_path / "bad.jsonl"), **settings)


def test_a_tokenizer_that_is_none_is_named(tmp_path):
    (tmp_path / "t.txt").write_text("hello")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer .*bad\.json cannot be read"):
        opened(kind="text", path=str(tmp_path / "t.txt"), tokenizer=str(tmp_path / "bad.json"))


def test_a_fingerprint_follows_the_content_not_the_path(tmp_path):
    for name, last in (("a", 1), ("b", 1), ("c", 2)):
        np.array([*range(20), last], dtype=np.uint16).tofile(tmp_path / name)
    a, b, c = (opened(kind="tokens", path=str(tmp_path / name)).fingerprint() for name in "abc")
    assert a == b != c


def test_any_indexable_object_is_a_source():
    pairs = IndexableSource([(np.ones(3), 1), (np.zeros(3), 0)])
    assert [int(t) for _, t in (pairs[0], pairs[1])] == [1, 0]
    sequences = IndexableSource([[1, 2, 3], [4, 5, 6]])
    assert [part.tolist() for part in sequences[1]] == [[4, 5], [5, 6]]
    records = IndexableSource([{"x": np.ones(2), "y": 3}])
    assert [part.tolist() for part in records[0]] == [[1, 1], 3]
    with pytest.raises(DataError, match="no length"):
        IndexableSource(iter([]))
    assert IndexableSource([[1, 2, 3]]).fingerprint() != IndexableSource([[1, 2, 4]]).fingerprint()


def test_a_quarantined_sample_counts_for_nothing():
    inputs, targets = IndexableSource([(np.ones(3), np.array([1, 2]))]).masked_sample()
    assert (inputs.tolist(), targets.tolist()) == ([0, 0, 0], [IGNORED, IGNORED])
    with pytest.raises(DataError, match="cannot quarantine"):
        IndexableSource([(np.ones(3), 0.5)]).masked_sample()


def test_a_mixture_opens_every_source(tmp_path):
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "t.bin")
    config = load_config(
        overrides=[
            f'--data.mixture=[{{kind="tokens", path="{tmp_path}/t.bin"}}, {{kind="synthetic", samples=5}}]',
            "--data.sequence=4",
        ]
    )
    sources = open_sources(config.data, 256)
    together = ConcatenatedSource(sources)
    assert [len(s) for s in sources] == [4, 5]
    assert together.locate(4) == (sources[1], 0)
    assert np.array_equal(together[6][0], sources[1][2][0])


def test_synthetic_samples_depend_on_their_index_alone():
    one, two = SyntheticSource(10**12, 8, 100), SyntheticSource(10**12, 8, 100)
    assert np.array_equal(one[10**11][0], two[10**11][0])
    assert not np.array_equal(one[0][0], one[1][0])
    assert SourceConfig().kind == "stdlib"
