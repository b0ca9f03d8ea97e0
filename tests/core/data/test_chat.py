"""Chat data: the template, the loss on answers alone, and packing with boundaries."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from meshwright.base.config import IGNORE_INDEX, DataConfig, ModelConfig, SourceConfig, load_config
from meshwright.base.models.registry import validate_family
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.data.chat import sandbox
from meshwright.core.data.chat.packing import count_answers, pack
from meshwright.core.data.chat.rendering import DEFAULT_TEMPLATE, ChatTemplate, RefusedTemplate
from meshwright.core.data.chat.template import encode_chat, mask_tokens, open_chat_encoder, tokenize_bytes
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.loader import MicroBatchDataset
from meshwright.core.data.prepare.command import prepare_folder
from meshwright.core.data.shards import TokenShards
from meshwright.core.data.source import ConcatenatedSource
from meshwright.core.launch.user_code.make_custom_model import open_user_code
from meshwright.core.models.init import build_model
from meshwright.errors import ConfigError, DataError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "3\u00e9"},
]
PLAIN_TEMPLATE = DEFAULT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def answers(record, template):
    """The text of a record, and the parts of it that the loss counts."""
    ids, mask = encode_chat(record, template, tokenize_bytes, 0)
    parts = np.split(np.array(ids, np.uint8), np.flatnonzero(np.diff(mask)) + 1)
    return bytes(ids).decode(), [bytes(part).decode() for part in parts[mask[0] == 0 :: 2]]


def write_chats(path, chats):
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return path


def chat_config(path, sequence, **settings):
    return DataConfig(kind="chat", path=str(path), sequence=sequence, **settings)


def turn(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))


def test_loss_is_on_every_answer_of_a_chat_alone():
    text, found = answers({"messages": CHAT}, ChatTemplate())
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nThree?<|im_end|>\n<|im_start|>assistant\n3\u00e9<|im_end|>\n"
    )
    assert found == ["2<|im_end|>", "3\u00e9<|im_end|>"]


def test_template_without_generation_blocks_is_rendered_by_prefixes():
    text, found = answers({"messages": CHAT}, ChatTemplate(PLAIN_TEMPLATE))
    assert text == answers({"messages": CHAT}, ChatTemplate())[0]
    assert found == ["2<|im_end|>\n", "3\u00e9<|im_end|>\n"]


def test_template_that_changes_earlier_turns_needs_generation_blocks():
    last_only = "{% for m in messages %}{{ m.role if loop.last else m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="generation"):
        ChatTemplate(last_only).render_chat(CHAT)


def test_mask_counts_tokens_that_touch_a_span():
    offsets = [(0, 2), (2, 4), (4, 5), (5, 9), (0, 0), (9, 12)]
    for spans in ([], [(3, 5)], [(6, 7), (1, 2)], [(0, 8), (2, 3)], [(4, 4), (3, 3), (10, 12)]):
        expected = [int(any(first < stop and start < last for start, stop in spans)) for first, last in offsets]
        assert mask_tokens(offsets, spans) == expected


def test_completion_is_followed_by_the_end_of_document():
    record = {"prompt": "2+2=", "completion": "4"}
    assert encode_chat(record, ChatTemplate(), tokenize_bytes, 0) == ([*b"2+2=4", 0], [0, 0, 0, 0, 1, 1])
    assert encode_chat(record, ChatTemplate(), tokenize_bytes, None) == ([*b"2+2=4"], [0, 0, 0, 0, 1])


GROW = "{% set ns = namespace(x='ab,') %}{% for i in range(22) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
WIDE = "{% set d = {" + ",".join(f"'{i}':1" for i in range(9999)) + "} %}"
HOSTILE = [
    "{{ 'a'.encode().zfill(6000000000)|length }}",
    "{{ ('a'|attr('encode'))().hex() }}",
    "{{ (['a']|map(attribute='encode')|first)() }}",
    "{{ (1).to_bytes(6000000000, 'big')|length }}",
    "{{ (1.5).hex() }}",
    "{{ 'a'.maketrans({97: 'b'}) }}",
    "{{ dict.fromkeys(range(100000), 1) }}",
    "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set ns.x = ns.x - (0 - ns.x) %}{% endfor %}",
    "{% for i in range(9) %}" * 25 + "{% endfor %}" * 25,
    "{{ a" + "|trim" * 300 + " }}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{{ " + "not " * 20000 + "a }}",
    "{{ " + "9" * 5000 + " }}",
    "{% if a %}" * 101 + "{% endif %}" * 101,
    "{{ a }}" * 50000,
    GROW + "{% set y = ns.x.split(',') %}{{ y|length }}",
    GROW + "{% set y = ns.x|list %}{{ y|length }}",
    GROW + "{% for c in ns.x %}{% endfor %}",
    GROW + "{{ ns.x.rfind('x' + ns.x[1:9000000]) }}",
    GROW + "{{ ns.x.strip(ns.x[:9000000].replace(',', 'x')) }}",
    GROW + "{% set z = namespace(x=[]) %}{% for i in range(40) %}{% set z.x = [z.x, ns.x[i:]] %}{% endfor %}",
    "{% set x %}{% for i in range(4000) %}" + "\U0001f600" * 20000 + "{% endfor %}{% endset %}",
    "{% macro m() %}{% for k in range(9999) %}{{ m(**kwargs) }}{% endfor %}{% endmacro %}" + WIDE + "{{ m(**d) }}",
    "{% macro m() %}{{ kwargs|length }}{% endmacro %}" + WIDE + "{% for k in range(9999) %}{{ m(**d) }}{% endfor %}",
    "{% for i in range(999) recursive %}{{ loop(range(99999)) if loop.depth < 5 }}{% endfor %}",
]
RENDER = """
import json, resource, sys
from meshwright.core.data.chat import sandbox
from meshwright.core.data.chat.rendering import ChatTemplate
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
sandbox.MAX_STEPS = 1 << 20
for template in json.load(sys.stdin):
    try:
        ChatTemplate(template).render([{"role": "user", "content": "a"}])
        print("rendered", template[-100:])
    except ValueError as error:
        if "Memory" in str(error):
            print(error, template[-100:])
"""


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 'a'.ljust(50000000) }}",
        "{{ '{:>50000000}'.format('a') }}",
        "{{ 'a'['zfill'](50000000) }}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x|replace('a', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x.join(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% set x %}{% for i in range(90000) %}" + "a" * 90000 + "{% endfor %}{% endset %}",
        "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
        "{{ [1] | batch(1000000000, 1) | list }}",
        "{{ range(9) | random }}",
        "{{ lipsum() }}",
        "{% set n = namespace(x='a') %}{%for i in range(9)%}{% set n.x = (n.x|e).replace('a', n.x+n.x,-1) %}{%endfor%}",
        "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x }}",
        "{{ strftime_now('%Y') }}",
        "{{ 'a'.upper }}",
        "{{ messages.append(1) }}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{{ messages }}{% endfor %}{% endfor %}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ raise_exception('no') }}",
        "{% for %}",
        "{% for i in range(99999) %}" + "{% if messages.y %}{% endif %}" * 400 + "{% endfor %}",
        "{% macro m() %}" + "{% set x=1 %}" * 900 + "{% endmacro %}{% for i in range(99999) %}{{ m() }}{% endfor %}",
        "{% set " + ", ".join(f"a{i}" for i in range(90)) + " = messages %}" + "{% include a0 %}" * 90,
        "{% import 'x' as y %}",
        "{% extends 'x' %}",
    ],
)
def test_hostile_template_is_refused(template, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_STEPS", 1 << 20)
    with pytest.raises(ValueError, match="template"):
        ChatTemplate(template).render(CHAT)


def test_no_template_takes_more_than_two_gigabytes():
    command = [sys.executable, "-c", RENDER]
    done = subprocess.run(command, input=json.dumps(HOSTILE), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("template", ["{{ 'a'.encode() }}", "{{ 3.to_bytes(9) }}", "{{ range(9).start + messages }}"])
def test_refused_template_is_one_line_with_template_and_next_move_and_exit_code_2(template, tmp_path):
    (tmp_path / "own.jinja").write_text(template)
    path = write_chats(tmp_path / "chats.jsonl", [turn("a", "b"), turn("c", "d")])
    with pytest.raises(ConfigError, match=r"own\.jinja.*; try ") as raised:
        open_sources(chat_config(path, 64, chat_template=str(tmp_path / "own.jinja")), 256, None)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2
    if ".encode" in template:
        assert "line 1 cannot be decoded: access to attribute 'encode' of 'str' object is unsafe" in str(raised.value)


def test_long_chat_that_is_rendered_by_prefixes_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_STEPS", 1 << 18)
    chat = CHAT[1:] * 100
    with pytest.raises(ValueError, match="steps for one record"):
        ChatTemplate(PLAIN_TEMPLATE).render_chat(chat)
    assert len(ChatTemplate().render_chat(chat)[1]) == 200


LLAMA3 = """{{- bos_token }}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system_message + '<|eot_id|>' }}
{%- for message in messages %}{%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endif %}{%- endfor %}"""
GEMMA = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}
{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"""
MISTRAL = """{%- set ns = namespace(n=0) %}{%- set loop_messages = messages[1:] %}{{- bos_token }}
{%- for m in loop_messages | selectattr('role', 'in', ['user', 'assistant']) | list %}
{%- if (m['role'] == 'user') != (ns.n % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.n = ns.n + 1 %}{%- if m.role == 'user' and loop.last %}{{- 'x' }}{%- endif %}
{{- '[INST] ' ~ m.content ~ '[/INST]' if m.role == 'user' else ' ' ~ m.content.strip().split('</think>')[-1] }}
{%- endfor %}{{- {'a': [1, messages | length]} | tojson }}{{- ', '.join(['a', 'b']) }}
{%- for m in messages %}{{ m.content.replace('T', 't').upper().split(sep='W')[0] ~ '-'.join([m.role, m.get('x', '')]) }}
{%- if loop.previtem is defined and m.content.endswith('?') %}{{ loop.cycle('a', 'b') }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("template", [LLAMA3, GEMMA, MISTRAL])
def test_common_templates_render_as_without_bounds(template):
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = sandbox.to_json
    expected = plain.from_string(template).render(messages=CHAT, bos_token="<s>")
    assert ChatTemplate(template, {"bos_token": "<s>"}).render(CHAT)[0] == expected


@pytest.mark.parametrize(
    "record",
    [
        [],
        {},
        {"messages": []},
        {"messages": [{"role": "user", "content": "no answer"}]},
        {"messages": [{"role": "assistant", "content": 3}]},
        {"messages": [{"role": "assistant", "content": "\ud800"}]},
        {"prompt": 1, "completion": "x"},
    ],
)
def test_record_that_is_no_chat_is_refused_with_its_line(record, tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", [turn("a", "b"), record])
    with pytest.raises(DataError, match="line 2"):
        open_sources(chat_config(path, 64), 256, None)


def small_tokenizer(tmp_path, template):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<|im_start|>", "<|im_end|>", *map(chr, range(32, 127)), "\n", "\u00e9"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>")
    fast.chat_template = template
    fast.save_pretrained(tmp_path)
    return fast


def test_ids_and_mask_are_those_of_transformers(tmp_path):
    fast = small_tokenizer(tmp_path, DEFAULT_TEMPLATE)
    expected = fast.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    encoder = open_chat_encoder(SourceConfig(kind="chat", path="-", tokenizer=str(tmp_path / "tokenizer.json")), None)
    ids, mask = encoder.encode({"messages": CHAT})
    assert ids == expected["input_ids"]
    assert mask == expected["assistant_masks"]
    assert sum(mask) == 5


def test_template_comes_from_the_setting_or_from_beside_the_tokenizer(tmp_path):
    small_tokenizer(tmp_path, "{{ eos_token }}{% generation %}x{% endgeneration %}")
    source = SourceConfig(kind="chat", path="-", tokenizer=str(tmp_path / "tokenizer.json"))
    assert open_chat_encoder(source, None).template.render(CHAT)[0] == "<|im_end|>x"
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    own = SourceConfig(kind="chat", path="-", tokenizer=source.tokenizer, chat_template=str(tmp_path / "own.jinja"))
    assert open_chat_encoder(own, None).template.render(CHAT)[0] == "Be brief."
    missing = SourceConfig(kind="chat", path="-", chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigError, match=r"none\.jinja"):
        open_chat_encoder(missing, None)


def test_packing_fills_samples_by_best_fit():
    assert pack(np.arange(6), np.array([5, 3, 8, 2, 1, 5]), 8) == [[0, 1], [2], [3, 4, 5]]
    lengths = np.random.default_rng(0).integers(1, 33, 500)
    samples = pack(np.arange(500), lengths, 64)
    assert sorted(chat for sample in samples for chat in sample) == list(range(500))
    assert max(lengths[sample].sum() for sample in samples) <= 64
    assert len(samples) <= 1.02 * lengths.sum() / 64


def test_packed_sample_has_chats_with_boundaries(tmp_path):
    path = write_chats(
        tmp_path / "chats.jsonl", [{"prompt": "ab", "completion": "c"}, {"prompt": "d", "completion": "e"}]
    )
    [source] = open_sources(chat_config(path, 8), 256, None)
    tokens, labels, documents = source[0]
    ignored = IGNORE_INDEX
    assert len(source) == 1
    assert tokens.tolist() == [*b"abc", *b"de", 0, 0, 0]
    assert labels.tolist() == [ignored, *b"c", 0, *b"e", 0, ignored, ignored, ignored]
    assert documents.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    batch = MicroBatchDataset(ConcatenatedSource([source]), False)[[0]]
    assert batch.valid_targets == 4
    [single] = open_sources(chat_config(path, 8, packing=False), 256, None)
    assert [tuple(part.tolist() for part in sample) for sample in (single[0], single[1])] == [
        ([*b"abc", 0, 0, 0, 0, 0], [ignored, *b"c", 0, *[ignored] * 5]),
        ([*b"de", 0, 0, 0, 0, 0, 0], [*b"e", 0, *[ignored] * 6]),
    ]
    assert source.fingerprint() != single.fingerprint()


@pytest.mark.parametrize("shard_tokens", [5, 12, 1000])
def test_answers_are_counted_across_shards(shard_tokens, tmp_path):
    lengths = np.random.default_rng(0).integers(0, 9, (30, 2))
    chats = [{"prompt": "a" * first, "completion": "b" * second} for first, second in lengths.tolist()]
    path = write_chats(tmp_path / "c.jsonl", chats)
    prepare_folder([str(path)], tmp_path / "out", "", "chat", "text", "", "auto", 1, shard_tokens, 0)
    shards = TokenShards(tmp_path / "out")
    positions = np.minimum(shards.lengths - 1, 10)
    expected = [shards.document(number)[1][1 : positions[number] + 1].sum() for number in range(30)]
    assert count_answers(shards, positions).tolist() == expected
    assert max(expected) > 1


def test_long_chats_are_truncated_and_counted(tmp_path):
    chats = [{"prompt": "a" * 9, "completion": "b" * 9}, {"prompt": "a" * 20, "completion": "b"}]
    [source] = open_sources(chat_config(write_chats(tmp_path / "c.jsonl", chats), 12), 256, None)
    assert [part.tolist() for part in source[0]][:2] == [[*b"aaaaaaaaabbb"], [*[IGNORE_INDEX] * 8, *b"bbbb"]]
    assert [note.partition(": ")[2] for note in source.notes] == [
        "1 of 2 chats are left out, because they have no answer in their first 12 tokens (data.sequence); "
        "the longest chat has 21",
        "1 of 2 chats are truncated to 12 tokens (data.sequence); the longest chat has 21",
    ]
    with pytest.raises(DataError, match="no chat has an answer"):
        open_sources(chat_config(write_chats(tmp_path / "d.jsonl", chats[1:]), 12), 256, None)


def test_loss_of_a_packed_sample_is_the_sum_of_the_losses_of_its_chats(tmp_path):
    chats = [turn("a" * n, "b" * (n + 1)) for n in range(3)]
    path = write_chats(tmp_path / "chats.jsonl", chats)
    model = build_model(ModelConfig(vocab=256, width=32, layers=2, ffn=48), 0, torch.float64)
    [packed], [single] = (open_sources(chat_config(path, 300, packing=packing), 256, None) for packing in (True, False))
    assert (len(packed), len(single)) == (1, 3)

    def loss(sample):
        return model(*(torch.from_numpy(part)[None] for part in sample))[0]

    torch.testing.assert_close(loss(packed[0]), sum(loss(single[i]) for i in range(3)), rtol=1e-12, atol=0)


def test_mixture_of_chats_and_text_has_documents_everywhere(tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", [turn("a", "b")])
    (tmp_path / "text.txt").write_bytes(b"ab\0cd" * 40)
    mixture = (SourceConfig(kind="chat", path=str(path)), SourceConfig(kind="text", path=str(tmp_path / "text.txt")))
    chats, text = open_sources(DataConfig(mixture=mixture, sequence=64), 256, 0)
    tokens, labels, documents = text[0]
    assert documents[:9].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 2]
    batch = MicroBatchDataset(ConcatenatedSource([chats, text]), True)[[0, 1]]
    assert [tuple(tensor.shape) for tensor in batch.tensors] == [(2, 64)] * 3


def test_learned_positions_refuse_packing():
    options = ["--model.family=gpt2", "--model.kv_heads=4", "--data.kind=chat", "--data.path=x"]
    with pytest.raises(ConfigError, match="learned positions"):
        validate_family(load_config(overrides=options))
    validate_family(load_config(overrides=[*options, "--data.packing=false"]))


def test_learned_positions_refuse_shards_that_are_packed(tmp_path):
    path = write_chats(tmp_path / "c.jsonl", [turn("a", "b")])
    prepare_folder([str(path)], tmp_path / "out", "", "chat", "text", "", "auto", 1, 1000, 0)
    options = ["--model.family=gpt2", "--model.kv_heads=4", "--data.kind=shards", f"--data.path={tmp_path / 'out'}"]
    with pytest.raises(ConfigError, match="learned positions"):
        open_user_code(load_config(overrides=options), UserCode())
    open_user_code(load_config(overrides=[*options, "--data.packing=false"]), UserCode())


@pytest.mark.parametrize("template", ["{{ 'a' * 3 }}", "{{ range }}"])
def test_what_a_template_must_not_use_is_no_matter_of_the_chat(template):
    with pytest.raises(RefusedTemplate, match=r"not available|is no value") as refused:
        answers({"messages": CHAT}, ChatTemplate(template))
    assert refused.value.hint == "try another data.chat_template"
