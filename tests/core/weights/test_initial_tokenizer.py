"""The tokenizer and the chat template of the folder of `init_from`: the defaults of data, sample and export."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from meshwright import train
from meshwright.base.cli import main
from meshwright.base.config import DataConfig, RunConfig, SourceConfig, config_to_toml, placement
from meshwright.base.models.initial_model import load_run_config, require_tokenized, with_initial_tokenizer
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.api.evaluation import evaluate, with_run_tokenizer
from meshwright.core.checkpoint.inspect import run_config
from meshwright.core.data.chat.template import encoding_notes, open_chat_encoder
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.prepare.command import prepare_folder
from meshwright.core.generate.text import open_codec
from meshwright.core.launch.job import make_job
from meshwright.core.trainer.identity import check_run_folder, relative_to_run
from meshwright.core.weights.huggingface_files import write_huggingface_files
from meshwright.errors import ConfigError, DataError, IdentityError
from tests.core.weights.weight_folders import MODEL, make_folder
from tests.kit.small_run import small_config

WORDS = ["<eos>", "a", "b", "c", "d"]
TEXT = "a b c d d c b a " * 40
TEMPLATE = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))


def save_tokenizer(folder: Path, words: list[str] = WORDS, **settings: object) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"


@pytest.fixture
def weights(tmp_path) -> Path:
    """A folder with weights, a tokenizer, a chat template and the token that ends a text."""
    folder = make_folder(tmp_path / "weights")
    save_tokenizer(folder, chat_template=TEMPLATE, eos_token="<eos>")
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    return folder


@pytest.fixture
def text(tmp_path) -> DataConfig:
    (tmp_path / "text.txt").write_text(TEXT)
    return DataConfig(kind="text", path=str(tmp_path / "text.txt"), sequence=8)


def notes_of(run: Path) -> list[str]:
    [start] = [e for e in read_events(run / "events" / "rank-00000.jsonl") if e["kind"] == "start"]
    return start["notes"]


def test_a_run_trains_samples_evaluates_and_exports_by_the_tokenizer_of_its_initial_weights(
    weights, text, tmp_path, capsys
):
    run, config = tmp_path / "run", replace(small_config(ranks=1, steps=1), data=text, model=MODEL)
    train(config, init_from=weights, run=run, quiet=True)
    assert f"tokenizer {weights / 'tokenizer.json'}" in notes_of(run)
    assert 'tokenizer = "init_from"' in (run / "run.toml").read_text()
    [source] = open_sources(run_config(run).data, MODEL.vocab, None)
    assert source.ids.tolist()[:5] == [1, 2, 3, 4, 4]
    assert open_codec(run_config(run)).encode("d a") == [4, 1]
    (tmp_path / "other.txt").write_text("d c b a " * 20)
    other = evaluate(run, overrides=[f"data.path={tmp_path / 'other.txt'}"])
    assert (other.samples, other.held_out) == (80 // 8, False)
    main(["checkpoint", "export", str(run), "--to", str(tmp_path / "out"), "--json"])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (weights / name).read_bytes()

    moved = weights.rename(tmp_path / "moved")
    with pytest.raises(DataError, match=r"tokenizer .*weights/tokenizer.json cannot be read"):
        make_job(load_run_config(run), RunFolder(run))
    job = make_job(load_run_config(run, [f"--init_from={moved}"]), RunFolder(run))
    assert job.sources[0].fingerprint() == source.fingerprint()
    other = save_tokenizer(tmp_path / "named", WORDS[::-1])
    with pytest.raises(IdentityError, match=r"its files or its tokenizer"):
        train(load_run_config(run, [f"--data.tokenizer={other}", "--steps=2"]), run=run, quiet=True)


def test_a_run_folder_with_its_initial_weights_can_move(weights, text, tmp_path):
    run = tmp_path / "run"
    main(["checkpoint", "import", str(weights), "--run", str(run), "--json"])
    shutil.rmtree(weights)
    overrides = ["--data.kind=text", f"--data.path={text.path}", "--data.sequence=8", "--launch.device=cpu"]
    train(load_run_config(run, overrides, steps=0), run=run, quiet=True)
    moved = run.rename(tmp_path / "moved")
    assert (
        run_config(moved).data.tokenizer
        == load_run_config(moved).data.tokenizer
        == str(moved / "initial/tokenizer.json")
    )


def test_another_tokenizer_is_used_named_and_exported(weights, text, tmp_path):
    named = save_tokenizer(tmp_path / "named", WORDS[::-1])
    config = with_initial_tokenizer(RunConfig(data=replace(text, tokenizer=str(named)), init_from=str(weights)))
    assert encoding_notes(config) == [f"tokenizer {named}, and init_from = {weights} has another tokenizer"]
    (tmp_path / "out").mkdir()
    write_huggingface_files(tmp_path / "out", MODEL, config, "float32")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == named.read_bytes()
    assert "chat_template" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert "eos_token_id" not in json.loads((tmp_path / "out" / "generation_config.json").read_text())


@pytest.mark.parametrize("settings", [{"tokenizer": "bytes"}, {"kind": "stdlib", "path": "", "tokenizer": "bytes"}])
def test_bytes_are_named_and_no_tokenizer_is_exported(settings, weights, text, tmp_path):
    config = with_initial_tokenizer(RunConfig(data=replace(text, **settings), init_from=str(weights)))
    assert config.data.tokenizer == "bytes"
    expected = (
        [f"bytes are tokens, and init_from = {weights} has another tokenizer"] if not settings.get("kind") else []
    )
    assert encoding_notes(config) == expected
    (tmp_path / "out").mkdir()
    write_huggingface_files(tmp_path / "out", MODEL, config, "float32")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "generation_config.json"]
    assert open_codec(config).encode("a") == [97]


def test_a_folder_without_a_tokenizer_is_named(text, tmp_path):
    folder = make_folder(tmp_path / "plain")
    config = with_initial_tokenizer(RunConfig(data=text, init_from=str(folder)))
    assert encoding_notes(config) == [f"bytes are tokens: init_from = {folder} has no tokenizer.json"]
    assert encoding_notes(RunConfig(data=text)) == []


def test_chats_are_rendered_by_the_template_of_the_folder_and_the_export_has_that_of_the_run(weights, tmp_path):
    chats = DataConfig(kind="chat", path=str(tmp_path / "chats.jsonl"), sequence=8)
    config = with_initial_tokenizer(RunConfig(data=chats, init_from=str(weights)))
    record = {"messages": [{"role": "assistant", "content": "d c"}]}
    assert open_chat_encoder(config.data.sources[0], None).encode(record) == ([4, 3], [1, 1])
    used = [f"tokenizer {weights / 'tokenizer.json'}", f"chat template {weights / 'tokenizer_config.json'}"]
    assert encoding_notes(config) == used

    (weights / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "named.jinja").write_text("named " + TEMPLATE)
    named = replace(config, data=replace(config.data, chat_template=str(tmp_path / "named.jinja")))
    template = f"chat template {tmp_path / 'named.jinja'}, and init_from = {weights} has another one"
    assert encoding_notes(named) == [used[0], template]
    for settings, expected in ((config, TEMPLATE), (named, "named " + TEMPLATE)):
        out = tmp_path / f"out-{len(expected)}"
        out.mkdir()
        write_huggingface_files(out, MODEL, settings, "float32")
        assert (out / "chat_template.jinja").read_text() == expected
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())


def test_the_default_data_does_not_train_weights_with_a_tokenizer_on_bytes(weights, tmp_path):
    config = replace(small_config(ranks=1), model=MODEL, data=DataConfig(sequence=8), init_from=str(weights))
    with pytest.raises(ConfigError, match=r"trains on bytes, and init_from = .* has a tokenizer; try --data.kind=text"):
        make_job(config, RunFolder(tmp_path / "run"))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(weights, text):
    save_tokenizer(weights, [*WORDS, *map(str, range(20))])
    config = with_initial_tokenizer(RunConfig(data=text, init_from=str(weights)))
    with pytest.raises(
        DataError, match=r"tokenizer .* has token ids up to 24, but model.vocab = 12; try the tokenizer"
    ):
        open_sources(config.data, MODEL.vocab, None)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_link_out_of_the_folder_is_refused(name, weights, tmp_path):
    (weights / name).unlink(missing_ok=True)
    (tmp_path / "secret").write_text("{}")
    (weights / name).symlink_to(tmp_path / "secret")
    data = DataConfig(kind="chat", path=str(tmp_path), sequence=8)
    with pytest.raises(ConfigError, match=f"{name} is a symbolic link out of its folder"):
        open_chat_encoder(with_initial_tokenizer(RunConfig(data=data, init_from=str(weights))).data, None)


def test_sources_of_a_mixture_get_the_tokenizer_unless_they_name_one(weights, text, tmp_path):
    own = SourceConfig(kind="text", path=text.path, tokenizer="bytes")
    data = DataConfig(mixture=(SourceConfig(kind="text", path=text.path), own), sequence=8)
    config = with_initial_tokenizer(RunConfig(data=data, init_from=str(weights)))
    assert [source.tokenizer for source in config.data.sources] == [str(weights / "tokenizer.json"), ""]
    with pytest.raises(DataError, match=r"the sources of data.mixture have several tokenizers"):
        open_codec(config)
    assert config_to_toml(config).count('tokenizer = "bytes"') == 1


def test_other_text_is_evaluated_by_the_tokenizer_of_a_run_whose_data_names_none(weights, text):
    recorded = RunConfig(data=DataConfig(kind="tokens", path="ids.bin"), init_from=str(weights))
    assert with_run_tokenizer(RunConfig(data=text), recorded).data.tokenizer == str(weights / "tokenizer.json")
    assert with_run_tokenizer(RunConfig(data=text), RunConfig(data=text)).data.tokenizer == ""


def test_a_snapshot_of_the_hugging_face_cache_has_links_to_its_blobs(weights, tmp_path):
    model = tmp_path / "models--name"
    model.mkdir()
    weights.rename(model / "blobs")
    snapshot = model / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).symlink_to(model / "blobs" / name)
    data = DataConfig(kind="chat", path=str(tmp_path), sequence=8)
    config = with_initial_tokenizer(RunConfig(data=data, init_from=str(snapshot)))
    assert open_chat_encoder(config.data, None).template.source == TEMPLATE


def shards_of(tmp_path, tokenizer: Path, name: str) -> SourceConfig:
    (tmp_path / "words.txt").write_text(TEXT)
    prepare_folder(
        [str(tmp_path / "words.txt")], tmp_path / name, str(tokenizer), "text", "text", "", "auto", 1, 1 << 20, 0
    )
    return SourceConfig(kind="shards", path=str(tmp_path / name))


def test_shards_made_by_one_tokenizer_have_one_tokenizer(weights, text, tmp_path):
    tokenizer = save_tokenizer(tmp_path / "named", WORDS[::-1])
    sources = tuple(shards_of(tmp_path, tokenizer, name) for name in ("one", "two"))
    config = RunConfig(data=DataConfig(mixture=sources), init_from=str(weights))
    assert open_codec(config).encode("d a") == [0, 3]
    assert with_run_tokenizer(RunConfig(data=text), config).data.tokenizer == str(tmp_path / "one" / "tokenizer.json")
    (tmp_path / "out").mkdir()
    write_huggingface_files(tmp_path / "out", MODEL, config, "float32")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()

    other = shards_of(tmp_path, weights / "tokenizer.json", "three")
    with pytest.raises(DataError, match=r"several tokenizers; try --data.tokenizer=FILE"):
        open_codec(RunConfig(data=DataConfig(mixture=(*sources, other))))


@pytest.mark.parametrize("template", ["{% if %}", "a" * (129 << 10), None])
def test_a_template_of_the_folder_that_cannot_be_used_does_not_stop_a_run_with_its_own(template, weights, tmp_path):
    (weights / "chat_template.jinja").unlink(missing_ok=True)
    if template is None:
        (weights / "chat_template.jinja").symlink_to(save_tokenizer(tmp_path / "secret"))
    else:
        (weights / "chat_template.jinja").write_text(template)
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    data = DataConfig(
        kind="chat", path=str(tmp_path), chat_template=str(tmp_path / "own.jinja"), tokenizer="bytes", sequence=8
    )
    notes = encoding_notes(with_initial_tokenizer(RunConfig(data=data, init_from=str(weights))))
    assert notes[-1] == f"chat template {tmp_path / 'own.jinja'}, and init_from = {weights} has another one"


def test_a_linked_tokenizer_of_the_folder_is_no_obstacle_to_another_one(weights, text, tmp_path):
    named = save_tokenizer(tmp_path / "named")
    (weights / "tokenizer.json").unlink()
    (weights / "tokenizer.json").symlink_to(named)
    for tokenizer in (str(named), "bytes"):
        config = with_initial_tokenizer(RunConfig(data=replace(text, tokenizer=tokenizer), init_from=str(weights)))
        used = f"tokenizer {named}" if tokenizer != "bytes" else "bytes are tokens"
        assert encoding_notes(config) == [f"{used}, and init_from = {weights} has another tokenizer"]
        write_huggingface_files(tmp_path, MODEL, config, "float32")
    for data in (text, replace(text, tokenizer="init_from")):
        with pytest.raises(ConfigError, match=r"link out of its folder; try --data.tokenizer=FILE"):
            with_initial_tokenizer(RunConfig(data=data, init_from=str(weights)))


def test_added_tokens_that_the_data_does_not_have_may_be_beyond_the_model(weights, text):
    file = weights / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.save(str(file))
    config = with_initial_tokenizer(RunConfig(data=text, init_from=str(weights)))
    assert open_sources(config.data, len(WORDS), None)[0].ids.max() == len(WORDS) - 1
    ended = replace(config.data, end_of_document="<pad>")
    with pytest.raises(DataError, match=r"contains token id 5, but model.vocab = 5"):
        open_sources(ended, len(WORDS), None)


@pytest.mark.parametrize("section", ["data", "data.mixture[0]"])
def test_init_from_names_the_tokenizer_of_every_source(section, weights, text, tmp_path):
    source = SourceConfig(kind="text", path=text.path, tokenizer="init_from")
    data = replace(text, tokenizer="init_from") if section == "data" else DataConfig(mixture=(source,), sequence=8)
    run, path = RunFolder(tmp_path / "run"), weights / "tokenizer.json"
    config = with_initial_tokenizer(RunConfig(model=MODEL, data=data, init_from=str(weights)))
    assert [source.tokenizer for source in config.data.sources] == [str(path)]
    run.root.mkdir()
    run.run_file.write_text(config_to_toml(relative_to_run(run, config)))
    assert run.run_file.read_text().count('tokenizer = "init_from"') == 1
    assert load_run_config(run.root) == run_config(run.root)
    assert [source.tokenizer for source in run_config(run.root).data.sources] == [str(path)]
    with pytest.raises(ConfigError, match=rf"{re.escape(section)}.tokenizer = init_from, and init_from is empty"):
        load_run_config(run.root, ["--init_from="])

    path.rename(tmp_path / "secret")
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"tokenizer.json is a symbolic link out of its folder"):
        run_config(run.root)


def test_a_source_of_bytes_in_a_mixture_is_refused_unless_it_says_so(weights, text, tmp_path):
    words = SourceConfig(kind="text", path=text.path)
    config = replace(small_config(ranks=1), model=MODEL, init_from=str(weights))
    mixed = DataConfig(mixture=(words, SourceConfig()), sequence=8)
    with pytest.raises(ConfigError, match=r"data.mixture\[1\].kind = stdlib trains on bytes"):
        make_job(replace(config, data=mixed), RunFolder(tmp_path / "run"))
    meant = replace(mixed, mixture=(words, SourceConfig(tokenizer="bytes")))
    require_tokenized(with_initial_tokenizer(replace(config, data=meant)))
    only = DataConfig(mixture=(replace(words, tokenizer="bytes"),), sequence=8)
    assert with_initial_tokenizer(replace(config, data=only)).data == only
    assert with_run_tokenizer(replace(config, data=only), RunConfig(data=text, init_from=str(weights))).data == only


def test_a_run_that_began_on_bytes_goes_on_or_says_how(weights, text, tmp_path):
    config = replace(small_config(ranks=1), model=MODEL, init_from=str(weights))
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    fingerprint = "source[0].fingerprint"
    before = {"identity": {fingerprint: "a", "steps": 1}}
    run.identity_file.write_text(json.dumps(before))
    with pytest.raises(DataError, match=r"model.vocab = 12"):  # bytes are read
        make_job(replace(config, data=DataConfig(sequence=8)), run)
    config = with_initial_tokenizer(replace(config, data=text))
    record = {"identity": {fingerprint: "b", "steps": 1}, "placement": placement(config), "code": None}
    with pytest.raises(IdentityError, match=r"try --data.tokenizer=bytes if the run was trained on bytes, another"):
        check_run_folder(run, record, fork=0, attempt=1, newest=0)
