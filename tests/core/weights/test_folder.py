"""A folder of weights is checked before it is used: every damage is named with its file, and nothing is half-loaded."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file

from meshwright.core.weights.folder import INDEX_FILE, SINGLE_FILE
from meshwright.core.weights.reader import WeightFolder
from meshwright.errors import ConfigError
from tests.core.weights.weight_folders import (
    DOWN,
    EMBEDDING,
    HEAD,
    MODEL,
    SHARDS,
    TIED,
    duplicate_tensor,
    edit_bytes,
    edit_header,
    edit_index,
    edit_tensors,
    make_folder,
    make_tensors,
    replace_by_link,
    replace_by_pickle,
    replace_by_pipe,
)

FLOATS = "expected float64, float32, bfloat16, float16"

DAMAGES = {
    "truncated": (edit_bytes(lambda b: b[:-5]), SINGLE_FILE, "describes"),
    "bytes appended": (edit_bytes(lambda b: b + b"x"), SINGLE_FILE, "describes"),
    "empty": (edit_bytes(lambda b: b""), SINGLE_FILE, "it has 0 bytes"),
    "key twice": (
        edit_header(lambda h: h.update({"first": h[HEAD]}), lambda text: text.replace('"first"', f'"{HEAD}"')),
        SINGLE_FILE,
        "has the key 'lm_head.weight' twice",
    ),
    "foreign": (edit_bytes(lambda b: b"\x7fELF" + bytes(4096)), SINGLE_FILE, "its header would have"),
    "huge header": (edit_bytes(lambda b: (1 << 62).to_bytes(8, "little") + b[8:]), SINGLE_FILE, "header would have"),
    "header of text": (edit_bytes(lambda b: b[:8] + b"[" * int.from_bytes(b[:8], "little")), SINGLE_FILE, "header of"),
    "overlap": (edit_header(lambda h: h[HEAD].update(h[EMBEDDING])), SINGLE_FILE, "overlap or leave a hole"),
    "byte range": (
        edit_header(lambda h: h[HEAD].update(data_offsets=[0, 4])),
        SINGLE_FILE,
        "has the byte range [0, 4]",
    ),
    "negative size": (edit_header(lambda h: h[HEAD].update(shape=[-12, -8])), SINGLE_FILE, "the entry of lm_head"),
    "unknown dtype": (edit_header(lambda h: h[HEAD].update(dtype="F4")), SINGLE_FILE, 'has dtype "F4"'),
    "entry": (edit_header(lambda h: h.update({HEAD: 7})), SINGLE_FILE, "the entry of lm_head.weight is 7"),
    "integers": (edit_tensors(lambda t: t.update({HEAD: t[HEAD].long()})), SINGLE_FILE, FLOATS),
    "8-bit floats": (edit_tensors(lambda t: t.update({HEAD: t[HEAD].to(torch.float8_e4m3fn)})), SINGLE_FILE, FLOATS),
    "wrong shape": (edit_tensors(lambda t: t.update({DOWN: t[DOWN].T.contiguous()})), SINGLE_FILE, "the shape [8, 6]"),
    "missing": (edit_tensors(lambda t: t.pop(HEAD)), "lacks tensor lm_head.weight of the model", ""),
    "unknown": (edit_tensors(lambda t: t.update(extra=t[HEAD].clone())), SINGLE_FILE, "has tensor extra, for which"),
    "NaN": (edit_tensors(lambda t: t[DOWN][3].fill_(torch.nan)), f"{SINGLE_FILE}: tensor {DOWN}", "NaN or an infinity"),
    "infinity": (edit_tensors(lambda t: t[DOWN][3, 2].fill_(-torch.inf)), SINGLE_FILE, "NaN or an infinity"),
    "pickle": (replace_by_pickle, "pytorch_model.bin is a pickle", "try to convert it to safetensors"),
    "no weights": (lambda folder: (folder / SINGLE_FILE).unlink(), "has no safetensors", "expected model.safetensors"),
    "both": (
        lambda folder: (folder / INDEX_FILE).write_text("{}"),
        f"has both {INDEX_FILE}",
        "expected one of the two",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json", "expected the folder of"),
}
SHARDED_DAMAGES = {
    "duplicate": (duplicate_tensor, SHARDS[1], f"is in {SHARDS[0]} and in"),
    "parent": (edit_index(lambda m: m.update({HEAD: "../x.safetensors"})), INDEX_FILE, "expected a file of the same"),
    "absolute": (
        edit_index(lambda m: m.update({HEAD: "/etc/x.safetensors"})),
        INDEX_FILE,
        "expected a file of the same",
    ),
    "hidden": (edit_index(lambda m: m.update({HEAD: ".x.safetensors"})), INDEX_FILE, "expected a file of the same"),
    "no text": (edit_index(lambda m: m.update({HEAD: 3})), INDEX_FILE, "lm_head.weight is in 3"),
    "not listed": (edit_index(lambda m: m.pop(HEAD)), SHARDS[0], "which the index places in null"),
    "listed twice": (edit_index(lambda m: m.update(extra=SHARDS[1])), SHARDS[1], "lacks tensor extra"),
    "no map": (edit_bytes(lambda b: b"{}", INDEX_FILE), INDEX_FILE, "has no weight_map"),
    "link": (replace_by_link, SHARDS[0], "a symbolic link out of its folder"),
    "pipe": (replace_by_pipe, SHARDS[0], "not a regular file"),
    "shard missing": (lambda folder: (folder / SHARDS[1]).unlink(), SHARDS[1], "No such file"),
}


@pytest.mark.parametrize(("damage", "named", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named(damage, named, message, tmp_path):
    folder = make_folder(tmp_path / "weights")
    damage(folder)
    with pytest.raises(ConfigError) as error:
        _ = WeightFolder(folder).digest
    assert named in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(("damage", "named", "message"), SHARDED_DAMAGES.values(), ids=SHARDED_DAMAGES)
def test_a_damaged_sharded_folder_is_named(damage, named, message, tmp_path):
    folder = make_folder(tmp_path / "weights", sharded=True)
    damage(folder)
    with pytest.raises(ConfigError) as error:
        _ = WeightFolder(folder).digest
    assert named in str(error.value)
    assert message in str(error.value)


def test_a_pickled_file_is_refused_by_its_own_path(tmp_path):
    (tmp_path / "model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(ConfigError, match="can run any code when it is loaded; try to convert it"):
        WeightFolder(tmp_path / "model.bin")


def test_digest_does_not_depend_on_the_division_into_files(tmp_path):
    single, sharded = make_folder(tmp_path / "a"), make_folder(tmp_path / "b", sharded=True)
    assert WeightFolder(single).digest == WeightFolder(sharded).digest
    edit_tensors(lambda t: t[HEAD][0, 0].add_(1e-3))(single)
    assert WeightFolder(single).digest != WeightFolder(sharded).digest


def test_a_snapshot_of_the_hugging_face_cache_is_read_through_its_links(tmp_path):
    plain = make_folder(tmp_path / "plain")
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in plain.iterdir():
        (blobs / f"blob-{file.name}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    assert WeightFolder(snapshot).digest == WeightFolder(plain).digest


def test_slices_are_those_of_the_full_tensor(tmp_path):
    folder = WeightFolder(make_folder(tmp_path / "a", sharded=True))
    expected = make_tensors()[DOWN][2:5, 1:4]
    assert torch.equal(folder.read("decoder.blocks.0.ffn.down.weight", (2, 1), (3, 3)), expected)


def test_a_file_that_changes_after_the_check_is_refused(tmp_path):
    folder = WeightFolder(make_folder(tmp_path / "a"))
    edit_tensors(lambda t: t[HEAD].add_(1))(tmp_path / "a")
    with pytest.raises(ConfigError, match="changed after it was checked"):
        folder.read("head.weight", (0, 0), (1, 1))


def test_a_tied_head_may_be_stored_if_it_is_equal(tmp_path):
    without = WeightFolder(make_folder(tmp_path / "a", TIED))
    assert "head.weight" not in without
    embedding = make_tensors(TIED)[EMBEDDING]
    equal = WeightFolder(make_folder(tmp_path / "b", TIED, **{HEAD: embedding.clone()}))
    assert equal.digest
    other = WeightFolder(make_folder(tmp_path / "c", TIED, **{HEAD: embedding + 1}))
    with pytest.raises(ConfigError, match=r"tensor lm_head\.weight differs from model\.embed"):
        _ = other.digest


def test_rotary_buffers_of_older_versions_are_ignored(tmp_path):
    inert = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert WeightFolder(make_folder(tmp_path / "a", **inert)).digest


def test_a_folder_without_the_prefix_of_the_model_is_read(tmp_path):
    """As AutoModel.save_pretrained writes it, without a head."""
    folder = make_folder(tmp_path / "a", TIED)
    edit_tensors(lambda t: [t.update({name.removeprefix("model."): t.pop(name)}) for name in list(t)])(folder)
    weights = WeightFolder(folder)
    tensors = load_file(folder / SINGLE_FILE)
    assert torch.equal(weights.read("decoder.norm.weight", (0,), (8,)), tensors["norm.weight"])


def test_own_names_are_read_with_the_model_of_the_config(tmp_path):
    folder = make_folder(tmp_path / "a")
    (folder / "config.json").unlink()
    names = {"lm_head.weight": "head.weight"}
    edit_tensors(lambda t: [t.update({names.get(name, name): t.pop(name)}) for name in list(t)])(folder)
    with pytest.raises(ConfigError, match=r"lacks tensor decoder\.embedding\.weight and 10 more"):
        WeightFolder(folder, MODEL)


def test_a_record_with_other_digests_shows_damage(tmp_path):
    folder = make_folder(tmp_path / "a")
    (folder / "meshwright.json").write_text(json.dumps({"tensors": {HEAD: "0" * 32}}))
    with pytest.raises(ConfigError, match=rf"{SINGLE_FILE}: tensor lm_head\.weight is .* was exported"):
        _ = WeightFolder(folder).digest
