"""Context parallelism equals one process, and its messages have the bytes of the formulas."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from math import lcm

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from meshwright.base.config import IGNORE_INDEX, ActivationCheckpointConfig, ModelConfig
from meshwright.base.config.model import OptionTable
from meshwright.base.models.registry import model_spec
from meshwright.core.models.init import build_model
from meshwright.core.models.layers.attention import CoreAttention, document_ids
from meshwright.core.parallel.activation_memory.activation_checkpoint import apply_activation_checkpointing
from meshwright.core.parallel.context_parallel.context_attention import ContextAttention
from meshwright.core.parallel.context_parallel.context_parallel import apply_context_parallel
from meshwright.core.parallel.context_parallel.ring_attention import visible_slices
from meshwright.core.parallel.context_parallel.seams import CoreAttentionSeam
from meshwright.core.parallel.context_parallel.sequence_chunks import SequenceChunks, local_chunk
from meshwright.core.parallel.tensor_parallel import (
    apply_tensor_parallel,
    family_parallel_spec,
    reduce_partial_gradients,
)
from meshwright.core.telemetry.comm_counter import CollectiveTotal, CommCounter
from meshwright.core.telemetry.memory_tracker import MemoryTracker
from meshwright.errors import ConfigError
from meshwright.testing import run_ranks

BATCH, HEADS, SEQUENCE, SIZE = 2, 12, 48, 4
"""The sequence divides into 2, 4, 6, 8 and 16 chunks; their borders are multiples of 3."""
METHODS = ("ring", "all-to-all")
MODEL = ModelConfig(vocab=20, width=32, layers=2, heads=4, kv_heads=2, ffn=24, separator=3)
SPEC = family_parallel_spec(model_spec(MODEL))
GEMMA = replace(MODEL, family="gemma2", options=OptionTable({"window": 5}))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}
"""Errors of values near 1: a few roundings. In bf16 most of it is the rounding of the reference itself."""


def documents(case_name: str) -> torch.Tensor | None:
    """Document ids that differ between the two sequences."""
    if case_name == "one":
        return None
    lengths = {
        "at borders": ([12, 12, 24], [3] * 16),
        "about borders": ([11, 2, 10, 1, 24], [13, 34, 1]),  # documents end before, start after, and surround a border
        "long and single": ([1, 46, 1], [1] * 20 + [28]),
    }[case_name]
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])


DOCUMENT_CASES = ("one", "at borders", "about borders", "long and single")


# Chunks, without ranks.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_chunks_partition_the_sequence(method, ranks):
    chunks = [SequenceChunks(method, ranks, rank) for rank in range(ranks)]
    assert torch.cat([chunk.positions(SEQUENCE) for chunk in chunks]).sort()[0].tolist() == list(range(SEQUENCE))
    full = torch.randn(2, SEQUENCE, 3)
    for chunk in chunks:
        positions = chunk.positions(SEQUENCE)
        assert positions.tolist() == sorted(positions.tolist())  # so that the causal order holds within a chunk
        assert torch.equal(chunk.select(full), full[:, positions])
        assert torch.equal(chunk.select(full.movedim(1, 2), 2), full.movedim(1, 2)[:, :, positions])


def test_ring_gives_each_rank_an_early_and_a_late_chunk():
    assert [SequenceChunks("ring", 2, rank).positions(8).tolist() for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [SequenceChunks("all-to-all", 2, rank).positions(8).tolist() for rank in (0, 1)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def test_sequence_that_does_not_divide_into_chunks_raises():
    with pytest.raises(ConfigError, match="12 tokens does not divide into 8 chunks of equal size"):
        SequenceChunks("ring", 4, 0).positions(12)
    assert len(SequenceChunks("all-to-all", 4, 0).positions(12)) == 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_ring_steps_have_equal_causal_work_on_every_rank(ranks):
    """After the local step, each rank computes two of the four pairs of chunks, exactly those of the causal order."""
    tokens = SEQUENCE // ranks
    for rank, step in product(range(ranks), range(ranks)):
        source = (rank - step) % ranks
        rows, columns = visible_slices(rank, source, tokens)
        q, k = (SequenceChunks("ring", ranks, r).positions(SEQUENCE) for r in (rank, source))
        causal = k[None, :] <= q[:, None]
        computed = torch.zeros_like(causal)
        computed[rows, columns] = True
        if step == 0:
            assert computed.all()
            assert torch.equal(causal, torch.ones_like(causal).tril())
        else:
            assert torch.equal(computed, causal)
            assert int(causal.sum()) == 2 * (tokens // 2) ** 2


# Attention, on ranks.


def inputs(kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output of full sequences, equal on every rank."""
    generator = torch.Generator().manual_seed(kv_heads)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    return [torch.randn(BATCH, n, SEQUENCE, SIZE, generator=generator, dtype=torch.float64).to(dtype) for n in heads]


def core_attention(method: str, group) -> CoreAttentionSeam:
    return CoreAttentionSeam(CoreAttention(), ContextAttention(group, method))


def differences(group, method: str, kv_heads: int, case_name: str, dtype: torch.dtype) -> dict[str, float]:
    """Errors of output, dq, dk and dv of the local chunks against full attention."""
    chunks = SequenceChunks(method, group.size(), group.rank())
    attention = core_attention(method, group)
    results = []
    for module, local in ((CoreAttention(), lambda t: t), (attention, lambda t: chunks.select(t, 2))):
        *made, grad = (local(t) for t in inputs(kv_heads, dtype))
        q, k, v = (t.clone().requires_grad_() for t in made)
        out = module(q, k, v, documents(case_name))
        results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), grad)])
        assert all(t.dtype == dtype for t in results[-1])
    names = ("out", "dq", "dk", "dv")
    return {n: float((chunks.select(w, 2) - o).abs().max()) for n, w, o in zip(names, *results, strict=True)}


def attention_counts(
    group, kv_heads: int, dtype: torch.dtype
) -> dict[str, tuple[list[CollectiveTotal], list[CollectiveTotal]]]:
    """The communication of forward and backward of one call."""
    results = {}
    for method in METHODS:
        chunks = SequenceChunks(method, group.size(), group.rank())
        attention = core_attention(method, group)
        q, k, v, grad = (chunks.select(t, 2).requires_grad_() for t in inputs(kv_heads, dtype))
        with CommCounter({group.group_name: "context"}) as forward:
            out = attention(q, k, v, None)
        with CommCounter({group.group_name: "context"}) as backward:
            out.backward(grad)
        results[method] = (forward.rows(), backward.rows())
    return results


def on_ranks(world, methods):
    group = dist.group.WORLD
    cases = list(product(methods, (1, 2, 4, 6, 12), DOCUMENT_CASES, (torch.float64,)))
    cases += product(methods, (2,), DOCUMENT_CASES[::2], (torch.float32, torch.bfloat16))
    errors = {case: differences(group, *case) for case in cases}
    counts = {dtype: attention_counts(group, 2, dtype) for dtype in (torch.float64, torch.bfloat16)}
    return errors, counts


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    """The results of every rank."""
    return run_ranks(on_ranks, request.param, METHODS)


def test_ring_and_all_to_all_attention_equal_full_attention(ranks):
    for errors, _ in ranks:
        assert not {
            case: results for case, results in errors.items() if not max(results.values()) < TOLERANCE[case[-1]]
        }


def test_context_parallel_message_bytes_equal_the_formulas(ranks):
    count, kv_heads = len(ranks), 2
    token = BATCH * SEQUENCE // count * SIZE
    for (_, counts), (dtype, wide) in product(ranks, ((torch.float64, 8), (torch.bfloat16, 4))):
        kv = 2 * kv_heads * token * dtype.itemsize
        sends = count - 1
        forward, backward = counts[dtype]["ring"]
        assert forward == [CollectiveTotal("context", "send", sends, sends * kv, sends * kv, count)]
        both = sends * (kv + 2 * kv_heads * token * wide)
        assert backward == [CollectiveTotal("context", "send", 2 * sends, both, both, count)]
        forward, backward = counts[dtype]["all-to-all"]
        message = (2 * HEADS + 2 * lcm(kv_heads, count)) * token * dtype.itemsize
        assert forward == [CollectiveTotal("context", "all_to_all", 2, message, message * (count - 1) // count, count)]
        assert backward == forward


def ring_of_eight(world):
    return {
        case_name: differences(dist.group.WORLD, "ring", 2, case_name, torch.float64) for case_name in DOCUMENT_CASES
    }


def test_ring_attention_on_eight_ranks():
    for results in run_ranks(ring_of_eight, 8):
        assert all(max(errors.values()) < 1e-12 for errors in results.values())


# The decoder, in two context groups at once.


def batch(group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each group has its own batch; some labels are ignored, more in one chunk than in another."""
    generator = torch.Generator().manual_seed(group)
    tokens = torch.randint(0, MODEL.vocab, (2, SEQUENCE), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, -5:] = IGNORE_INDEX
    return tokens, labels


def one_process(
    separator: int | None, dtype: torch.dtype, group: int, config: ModelConfig = MODEL
) -> dict[str, torch.Tensor]:
    model = build_model(replace(config, separator=separator), 0, dtype)
    total, count = model(*batch(group))
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": total.detach(), "count": count, **gradients}


def context_parallel(group, method: str, separator: int | None, dtype: torch.dtype, mode: str, number: int):
    """Loss, count and gradients, summed over the ranks of a context group."""
    model = build_model(replace(MODEL, separator=separator), 0, dtype)
    attention = ContextAttention(group, method)
    apply_context_parallel(model, SPEC, attention)
    apply_activation_checkpointing(model, SPEC, ActivationCheckpointConfig(mode=mode))
    with MemoryTracker(model) as memory, CommCounter({group.group_name: "context"}) as ledger:
        total, count = model(*local_chunk(batch(number), attention.chunks, separator))
        saved = (
            memory.current_bytes["activation"]
            + memory.current_bytes["communication"]
            + memory.current_bytes["temporary"]
        )
        total.backward()
    results = {"loss": total.detach(), "count": count, **{name: p.grad for name, p in model.named_parameters()}}
    for tensor in results.values():
        dist.all_reduce(tensor, group=group)
    return results, ledger.rows(), saved


def two_groups(world):
    groups = [dist.new_group(members) for members in ([3, 1], [0, 2])]  # not consecutive ranks
    number = 1 - world.rank % 2
    local = groups[number]
    errors, sent, saved = {}, {}, {}
    cases = [(m, s, torch.float64, r) for m, s, r in product(METHODS, (None, 3), ("none", "full", "selective"))]
    cases += [(method, 3, torch.float32, "none") for method in METHODS]
    for method, separator, dtype, mode in cases:
        case = method, separator, mode, dtype
        ours, sent[case], saved[case] = context_parallel(local, method, separator, dtype, mode, number)
        theirs = one_process(separator, dtype, number)
        assert ours.keys() == theirs.keys()
        errors[case] = relative(ours, theirs)
    return errors, sent, saved


def relative(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest error, relative to the largest value of its tensor."""
    return max(float((ours[name] - one).abs().max() / one.abs().max()) for name, one in theirs.items())


@pytest.fixture(scope="module")
def decoders():
    return run_ranks(two_groups, 4)


def test_two_context_groups_give_the_gradients_of_one_process_each(decoders):
    for errors, _, _ in decoders:
        assert len(errors) == 14
        assert not {case: error for case, error in errors.items() if not error < TOLERANCE[case[-1]]}


def test_activation_checkpointing_repeats_the_messages_of_forward(decoders):
    forwards = {"none": 1, "full": 2, "selective": 2}
    for (_, sent, _), separator, (mode, times) in product(decoders, (None, 3), forwards.items()):
        token = MODEL.layers * 2 * SEQUENCE // 2 * (MODEL.width // MODEL.heads) * 8
        ring = token * 2 * MODEL.kv_heads
        (row,) = sent["ring", separator, mode, torch.float64]
        assert (row.collective, row.message_bytes) == ("send", (times + 2) * ring)
        (row,) = sent["all-to-all", separator, mode, torch.float64]
        assert (row.collective, row.message_bytes) == ("all_to_all", (times + 1) * token * 2 * (MODEL.heads + 2))


def test_selective_checkpointing_saves_products_and_nothing_of_the_ring(decoders):
    kv_width = MODEL.kv_heads * MODEL.width // MODEL.heads
    products = 2 * kv_width + 2 * MODEL.ffn  # k and v, gate and up; without q, out and down
    for (_, _, saved), separator in product(decoders, (None, 3)):
        selective, full = (saved["ring", separator, mode, torch.float64] for mode in ("selective", "full"))
        assert selective - full == MODEL.layers * 2 * SEQUENCE // 2 * products * 8


def with_tensor(world):
    """Context parallelism over one mesh dimension, tensor parallelism over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
    group, errors = mesh.get_group("context"), []
    for config, method in ((MODEL, "ring"), (MODEL, "all-to-all"), (GEMMA, "all-to-all")):
        model, spec = build_model(config, 0, torch.float64), family_parallel_spec(model_spec(config))
        apply_tensor_parallel(model, spec, mesh["tensor"])
        attention = ContextAttention(group, method)
        apply_context_parallel(model, spec, attention)
        with loss_parallel():
            total, count = model(*local_chunk(batch(0), attention.chunks, 3))
            total.backward()
        reduce_partial_gradients(model.parameters(), mesh["tensor"])
        results = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        results |= {"loss": total.detach().clone(), "count": count}
        for tensor in results.values():
            dist.all_reduce(tensor, group=group)
        errors.append(relative(results, one_process(3, torch.float64, 0, config)))
    return errors


def test_context_and_tensor_parallel_equal_one_process():
    assert max(error for errors in run_ranks(with_tensor, 4) for error in errors) < 1e-12


# Inputs, and errors.


def test_local_chunk_has_the_documents_of_full_sequences():
    tokens, labels = batch(0)
    chunks = SequenceChunks("ring", 4, 1)
    own_tokens, own_labels, of_whole = local_chunk((tokens, labels), chunks, 3)
    assert torch.equal(own_tokens, tokens[:, chunks.positions(SEQUENCE)])
    assert torch.equal(own_labels, labels[:, chunks.positions(SEQUENCE)])
    assert torch.equal(of_whole, document_ids(tokens, 3))
    assert len(local_chunk((tokens, labels), chunks, None)) == 2


def error_messages(world):
    group, (q, k, v, _) = dist.group.WORLD, inputs(3, torch.float64)
    attentions = [core_attention(method, group) for method in METHODS]
    calls = [partial(attention, q, k, v, torch.zeros(2, SEQUENCE)) for attention in attentions]
    calls.append(partial(attentions[1], k, k, v, None))
    spec = family_parallel_spec(model_spec(GEMMA))
    model = build_model(GEMMA, 0, torch.float64)
    calls.append(partial(apply_context_parallel, model, spec, ContextAttention(group, "ring")))
    messages = []
    for call in calls:
        with pytest.raises((ConfigError, ValueError)) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def one_rank_and_errors(world):
    local = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    with CommCounter({}) as ledger:
        errors = [max(differences(local, m, 2, "about borders", torch.float64).values()) for m in METHODS]
    return max(errors), sum(row.wire_bytes for row in ledger.rows()), error_messages(world)


def test_context_parallel_on_one_rank_and_its_errors():
    for error, sent, (ring, exchange, heads, family) in run_ranks(one_rank_and_errors, 2):
        assert error < 1e-13
        assert sent == 0
        assert ring == exchange == "document ids cover 48 tokens; expected the full sequence of 96"
        assert "layout.context = 2 with context.method = all-to-all does not divide 3 local query heads" in heads
        assert (
            "context.method = ring computes plain attention, and the attention of this model has a soft cap" in family
        )
