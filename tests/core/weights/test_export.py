"""An export has the tensors of the checkpoint, in bounded memory, and is written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from meshwright.base.cli import main
from meshwright.base.config import DataConfig, ModelConfig, RunConfig, identity
from meshwright.core.weights.export import TensorWriter, export_checkpoint, parse_size
from meshwright.core.weights.huggingface_files import write_huggingface_files
from meshwright.core.weights.reader import WeightFolder
from meshwright.errors import CheckpointError, ConfigError
from tests.core.weights.weight_folders import DOWN, EMBEDDING, MODEL, TIED, make_folder
from tests.core.weights.written_checkpoints import SHARD, STEP, write_checkpoint, write_family_checkpoint


def export(run, to, **options):
    return export_checkpoint(run, to, RunConfig(), **options)


def run_cli(args, code=0):
    if not code:
        return main(args)
    with pytest.raises(SystemExit) as exit_:
        main(args)
    assert exit_.value.code == code
    return None


def test_export_has_the_tensors_of_the_checkpoint_and_its_identity(tmp_path):
    ours = write_family_checkpoint(tmp_path / "run", MODEL)
    done = export(tmp_path / "run", tmp_path / "out")
    theirs = load_file(tmp_path / "out" / "model.safetensors")
    assert np.array_equal(theirs[DOWN].numpy(), ours["decoder.blocks.0.ffn.down.weight"])
    assert np.array_equal(theirs[EMBEDDING].numpy(), ours["decoder.embedding.weight"])
    assert len(theirs) == len(ours) == done.tensors
    record = json.loads((tmp_path / "out" / "meshwright.json").read_text())
    assert (record["run"], record["step"], record["identity"]) == ("0123abcd", STEP, identity(RunConfig(model=MODEL)))
    assert record["digest"] == done.digest == WeightFolder(tmp_path / "out").digest
    assert len(record["checkpoint_digest"]) == 64


def test_shards_are_at_most_as_large_as_asked_and_have_an_index(tmp_path):
    write_family_checkpoint(tmp_path / "run", MODEL)
    single, sharded = (export(tmp_path / "run", tmp_path / str(size), max_shard_bytes=size) for size in (10**9, 600))
    assert single.files == ["model.safetensors"]
    assert len(sharded.files) > 2
    assert sharded.digest == single.digest == WeightFolder(tmp_path / "600").digest
    headers = [int.from_bytes((tmp_path / "600" / name).read_bytes()[:8], "little") for name in sharded.files]
    sizes = [(tmp_path / "600" / name).stat().st_size - 8 for name in sharded.files]
    assert all(size - header <= 600 for size, header in zip(sizes, headers, strict=True))
    index = json.loads((tmp_path / "600" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == single.bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes_are_rounded_as_torch_rounds_them(dtype, tmp_path):
    ours = write_family_checkpoint(tmp_path / "run", MODEL)
    export(tmp_path / "run", tmp_path / "out", dtype=dtype)
    theirs = load_file(tmp_path / "out" / "model.safetensors")[DOWN]
    assert torch.equal(theirs, torch.from_numpy(ours["decoder.blocks.0.ffn.down.weight"]).to(getattr(torch, dtype)))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_numbers_above_the_range_of_a_dtype_are_refused(tmp_path):
    tensors = {"model/model.weight": np.array([[1e6, 2.0]], np.float32)}
    write_checkpoint(tmp_path / "run", tensors, {"model": "hash"})
    with pytest.raises(ConfigError, match="tensor weight has numbers above the range of float16"):
        export(tmp_path / "run", tmp_path / "out", dtype="float16")
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_custom_model_is_exported_by_its_own_names_with_buffers(form, tmp_path):
    tensors = {
        "model/model.fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "buffer/model.norm.seen": np.array(7, np.int64),
        "model/loss.scale": np.ones(1, np.float32),
        "optimizer/model.fc.weight/exp_avg": np.ones((2, 3), np.float32),
    }
    write_checkpoint(tmp_path / "run", tensors, {"model": "hash"})
    done = export(tmp_path / "run", tmp_path / "out", format=form, dtype="bfloat16")
    file = tmp_path / "out" / done.files[0]
    state = load_file(file) if form == "safetensors" else torch.load(file, weights_only=True)
    assert set(state) == {"fc.weight", "norm.seen"}
    assert torch.equal(state["fc.weight"], torch.arange(6).reshape(2, 3).to(torch.bfloat16))
    assert state["norm.seen"].dtype == torch.int64
    assert state["norm.seen"] == 7
    with pytest.raises(ConfigError, match="a custom model has no Hugging Face form; try --format safetensors"):
        export(tmp_path / "run", tmp_path / "other", format="huggingface")


def test_what_hugging_face_does_not_have_is_refused(tmp_path):
    model = replace(MODEL, experts=2, experts_active=1)
    write_family_checkpoint(tmp_path / "run", model)
    with pytest.raises(ConfigError, match="Hugging Face models of the family llama have no experts"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_refused_and_stays(tmp_path, capsys):
    write_family_checkpoint(tmp_path / "run", TIED)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    run_cli(["checkpoint", "export", str(tmp_path / "run"), "--to", str(tmp_path / "out")], code=2)
    assert "exists and is not an empty folder; expected a new folder" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == ["mine"]
    run_cli(["checkpoint", "export", str(tmp_path / "run"), "--to", str(tmp_path / "a" / "b")], code=2)
    run_cli(["checkpoint", "export", str(tmp_path / "run"), "--to", str(tmp_path / "new"), "--json"])
    assert json.loads(capsys.readouterr().out)["tensors"] == 11


def test_a_full_disk_leaves_no_part_of_an_export(tmp_path, monkeypatch):
    write_family_checkpoint(tmp_path / "run", MODEL)

    def fail(self, file, outputs, header):
        (self.folder / file).write_bytes(header)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TensorWriter, "write", fail)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        export(tmp_path / "run", tmp_path / "out")
    assert os.listdir(tmp_path) == ["run"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    write_family_checkpoint(tmp_path / "run", MODEL)
    shard = tmp_path / "run" / "checkpoints" / f"step-{STEP:08d}.a0001" / SHARD
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"is damaged: {SHARD} chunk 0"):
        export(tmp_path / "run", tmp_path / "out")
    assert os.listdir(tmp_path) == ["run"]


def test_a_bit_flip_after_the_export_is_named_on_import(tmp_path, capsys):
    write_family_checkpoint(tmp_path / "run", MODEL)
    export(tmp_path / "run", tmp_path / "out")
    content = bytearray((tmp_path / "out" / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "out" / "model.safetensors").write_bytes(content)
    run_cli(["checkpoint", "import", str(tmp_path / "out"), "--run", str(tmp_path / "new")], code=2)
    assert "model.safetensors: tensor lm_head.weight is " in capsys.readouterr().err
    assert not (tmp_path / "new" / "initial").exists()


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("500 MB", 5 * 10**8), ("1GiB", 1 << 30), ("7", 7)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "5 parsecs", "1.5GB"])
def test_wrong_sizes_are_refused(text):
    with pytest.raises(ConfigError, match="is not a size; expected a number with KB, MB or GB"):
        parse_size(text)


BOUND = 16 << 20
EXPORT_IN_BOUNDED_MEMORY = """
import resource, sys
from pathlib import Path
from meshwright.base.config import RunConfig
from meshwright.core.weights.export import export_checkpoint

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[3]), -1))
for dtype in ("float32", "bfloat16"):
    export_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]) / dtype, RunConfig(), dtype=dtype)
assert "torch" not in sys.modules
"""


def test_a_model_four_times_larger_than_the_memory_of_the_process_is_exported(tmp_path):
    model = ModelConfig(vocab=8192, width=1024, layers=1, heads=8, kv_heads=8, ffn=512)
    write_family_checkpoint(tmp_path / "run", model)
    args = [sys.executable, "-c", EXPORT_IN_BOUNDED_MEMORY, str(tmp_path / "run"), str(tmp_path), str(BOUND)]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    size = (tmp_path / "float32" / "model.safetensors").stat().st_size
    assert size > 4 * BOUND
    assert (tmp_path / "bfloat16" / "model.safetensors").stat().st_size == pytest.approx(size / 2, rel=0.01)


def test_tokenizer_and_special_tokens_of_the_first_folder_are_in_the_export(tmp_path):
    first = make_folder(tmp_path / "first")
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps(config | {"eos_token_id": 7, "max_position_embeddings": 99}))
    (first / "tokenizer.json").write_text('{"model": {}}')
    (first / "chat_template.jinja").write_text("template")
    (tmp_path / "out").mkdir()
    write_huggingface_files(tmp_path / "out", MODEL, RunConfig(init_from=str(first)), "float32")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["eos_token_id"], written["max_position_embeddings"], written["hidden_size"]) == (7, 99, 8)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "template"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 7
    tokenizer = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert tokenizer == {"tokenizer_class": "PreTrainedTokenizerFast"}


def write_files(folder, data, **settings):
    folder.mkdir()
    write_huggingface_files(folder, MODEL, RunConfig(data=DataConfig(**data), **settings), "float32")
    return folder


def test_the_export_of_a_run_on_shards_has_their_tokenizer(tmp_path):
    shards, first = tmp_path / "shards", make_folder(tmp_path / "first")
    documents = [json.dumps({"text": "a b c"}) for _ in range(9)]
    (tmp_path / "documents.jsonl").write_text("\n".join(documents))
    Tokenizer(WordLevel({"a": 0, "b": 1, "<eos>": 2}, "a")).save(str(tmp_path / "tokenizer.json"))
    options = ["--out", str(shards), "--tokenizer", str(tmp_path / "tokenizer.json")]
    run_cli(["data", "prepare", str(tmp_path / "documents.jsonl"), *options])
    content = (shards / "tokenizer.json").read_text()
    data = {"kind": "shards", "path": str(shards)}
    out = write_files(tmp_path / "out", data)
    assert (out / "tokenizer.json").read_text() == content
    assert (out / "tokenizer_config.json").exists()
    (first / "chat_template.jinja").write_text("template")
    (first / "tokenizer.json").write_text(content)
    assert (write_files(tmp_path / "same", data, init_from=str(first)) / "chat_template.jinja").exists()
    (first / "tokenizer.json").write_text('{"model": {}}')
    out = write_files(tmp_path / "other", data, init_from=str(first))
    assert (out / "tokenizer.json").read_text() == content
    assert not (out / "chat_template.jinja").exists()


@pytest.mark.parametrize("content", ["-----BEGIN KEY-----", "{}", '{"model": 1}', "[" * 100_000])
def test_a_file_that_is_no_tokenizer_is_not_copied(content, tmp_path):
    (tmp_path / "key").write_text(content)
    with pytest.raises(ConfigError, match=r"key is not a tokenizer; expected a tokenizer.json"):
        write_files(tmp_path / "out", {"tokenizer": str(tmp_path / "key"), "chat_template": str(tmp_path / "key")})
    assert not (tmp_path / "out" / "tokenizer.json").exists()
