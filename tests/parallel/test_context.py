"""Sequences divided among ranks give what one process gives, and send what the formulas say."""

from __future__ import annotations

from functools import partial
from itertools import product
from math import lcm

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from meshwright.config import IGNORE_INDEX, ActivationCheckpointConfig, ModelConfig
from meshwright.errors import ConfigError
from meshwright.models.decoder import CoreAttention, document_ids
from meshwright.models.init import build_model
from meshwright.parallel.activation_checkpoint import apply_activation_checkpointing
from meshwright.parallel.context_parallel.all_to_all_attention import AllToAllAttention
from meshwright.parallel.context_parallel.context_parallel import apply_context_parallel
from meshwright.parallel.context_parallel.ring_attention import RingAttention, visible_slices
from meshwright.parallel.context_parallel.sequence_chunks import SequenceChunks, local_chunk
from meshwright.parallel.tensor_parallel import apply_tensor_parallel, decoder_parallel_spec, reduce_partial_gradients
from meshwright.telemetry.comm_counter import CollectiveTotal, CommCounter
from meshwright.telemetry.memory_tracker import MemoryTracker
from meshwright.testing import run_ranks

BATCH, HEADS, SEQUENCE, SIZE = 2, 12, 48, 4
"""The sequence divides into 2, 4, 6, 8 and 16 chunks; their borders are multiples of 3."""
METHODS = ("ring", "all-to-all")
MODEL = ModelConfig(vocab=20, width=32, layers=2, heads=4, kv_heads=2, ffn=24, separator=3)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}
"""Of numbers about 1: a few roundings. In bf16 the oracle's own rounding is the larger part."""


def documents(kind: str) -> torch.Tensor | None:
    """The second sequence's documents differ from the first's."""
    if kind == "one":
        return None
    lengths = {
        "at borders": ([12, 12, 24], [3] * 16),
        "about borders": ([11, 2, 10, 1, 24], [13, 34, 1]),  # end before, begin after, and on both sides of one
        "long and single": ([1, 46, 1], [1] * 20 + [28]),
    }[kind]
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])


KINDS = ("one", "at borders", "about borders", "long and single")


# Pieces, without ranks.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_pieces_are_all_of_the_sequence_once(method, ranks):
    pieces = [SequenceChunks(method, ranks, rank) for rank in range(ranks)]
    assert torch.cat([piece.positions(SEQUENCE) for piece in pieces]).sort()[0].tolist() == list(range(SEQUENCE))
    whole = torch.randn(2, SEQUENCE, 3)
    for piece in pieces:
        positions = piece.positions(SEQUENCE)
        assert positions.tolist() == sorted(positions.tolist())  # so that causal order in a piece is its own order
        assert torch.equal(piece.select(whole), whole[:, positions])
        assert torch.equal(piece.select(whole.movedim(1, 2), 2), whole.movedim(1, 2)[:, :, positions])


def test_a_ring_pairs_an_early_chunk_with_a_late_one():
    assert [SequenceChunks("ring", 2, rank).positions(8).tolist() for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [SequenceChunks("all-to-all", 2, rank).positions(8).tolist() for rank in (0, 1)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def test_a_sequence_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="12 tokens does not divide into 8 chunks of equal size"):
        SequenceChunks("ring", 4, 0).positions(12)
    assert len(SequenceChunks("all-to-all", 4, 0).positions(12)) == 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_step_of_the_ring_is_the_same_work_on_every_rank(ranks):
    """Pairs of a query and a key, and pairs of chunks: after its own piece each rank has two of four at every step,
    and they are just those that the causal order leaves.
    """
    tokens = SEQUENCE // ranks
    for rank, step in product(range(ranks), range(ranks)):
        source = (rank - step) % ranks
        rows, columns = visible_slices(rank, source, tokens)
        q, k = (SequenceChunks("ring", ranks, r).positions(SEQUENCE) for r in (rank, source))
        before = k[None, :] <= q[:, None]
        computed = torch.zeros_like(before)
        computed[rows, columns] = True
        if step == 0:
            assert computed.all()
            assert torch.equal(before, torch.ones_like(before).tril())
        else:
            assert torch.equal(computed, before)
            assert int(before.sum()) == 2 * (tokens // 2) ** 2


# Attention, on ranks.


def inputs(kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, of whole sequences: the same on every rank."""
    generator = torch.Generator().manual_seed(kv_heads)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    return [torch.randn(BATCH, n, SEQUENCE, SIZE, generator=generator, dtype=torch.float64).to(dtype) for n in heads]


def differences(group, method: str, kv_heads: int, kind: str, dtype: torch.dtype) -> dict[str, float]:
    """Out, dq, dk and dv of this rank's piece against the same piece of full attention."""
    pieces = SequenceChunks(method, group.size(), group.rank())
    attend = RingAttention(group) if method == "ring" else AllToAllAttention(group, CoreAttention())
    found = []
    for module, own in ((CoreAttention(), lambda t: t), (attend, lambda t: pieces.select(t, 2))):
        *made, grad = (own(t) for t in inputs(kv_heads, dtype))
        q, k, v = (t.clone().requires_grad_() for t in made)
        out = module(q, k, v, documents(kind))
        found.append([out.detach(), *torch.autograd.grad(out, (q, k, v), grad)])
        assert all(t.dtype == dtype for t in found[-1])
    names = ("out", "dq", "dk", "dv")
    return {n: float((pieces.select(w, 2) - o).abs().max()) for n, w, o in zip(names, *found, strict=True)}


def attention_counts(
    group, kv_heads: int, dtype: torch.dtype
) -> dict[str, tuple[list[CollectiveTotal], list[CollectiveTotal]]]:
    """What forward and backward of one call send."""
    found = {}
    for method in METHODS:
        pieces = SequenceChunks(method, group.size(), group.rank())
        attend = RingAttention(group) if method == "ring" else AllToAllAttention(group, CoreAttention())
        q, k, v, grad = (pieces.select(t, 2).requires_grad_() for t in inputs(kv_heads, dtype))
        with CommCounter({group.group_name: "context"}) as forward:
            out = attend(q, k, v, None)
        with CommCounter({group.group_name: "context"}) as backward:
            out.backward(grad)
        found[method] = (forward.rows(), backward.rows())
    return found


def on_ranks(world, methods):
    group = dist.group.WORLD
    cases = list(product(methods, (1, 2, 4, 6, 12), KINDS, (torch.float64,)))
    cases += product(methods, (2,), KINDS[::2], (torch.float32, torch.bfloat16))
    errors = {case: differences(group, *case) for case in cases}
    counts = {dtype: attention_counts(group, 2, dtype) for dtype in (torch.float64, torch.bfloat16)}
    return errors, counts


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    """What each of so many ranks found."""
    return run_ranks(on_ranks, request.param, METHODS)


def test_divided_attention_is_full_attention(ranks):
    for errors, _ in ranks:
        assert not {case: found for case, found in errors.items() if not max(found.values()) < TOLERANCE[case[-1]]}


def test_attention_sends_what_the_formulas_say(ranks):
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


def eight(world):
    return {kind: differences(dist.group.WORLD, "ring", 2, kind, torch.float64) for kind in KINDS}


def test_a_ring_of_eight_comes_round():
    for found in run_ranks(eight, 8):
        assert all(max(errors.values()) < 1e-12 for errors in found.values())


# The decoder, in two context groups at once.


def batch(group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each group has its own; some labels are ignored, more in one piece than in another."""
    generator = torch.Generator().manual_seed(group)
    tokens = torch.randint(0, MODEL.vocab, (2, SEQUENCE), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, -5:] = IGNORE_INDEX
    return tokens, labels


def one_process(separator: int | None, dtype: torch.dtype, group: int) -> dict[str, torch.Tensor]:
    model = build_model(ModelConfig(**{**MODEL.__dict__, "separator": separator}), 0, dtype)
    total, count = model(*batch(group))
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": total.detach(), "count": count, **gradients}


def divided(group, method: str, separator: int | None, dtype: torch.dtype, again: str, number: int):
    """The same, summed over a context group's ranks."""
    model = build_model(ModelConfig(**{**MODEL.__dict__, "separator": separator}), 0, dtype)
    pieces = apply_context_parallel(model, group, method)
    apply_activation_checkpointing(model, decoder_parallel_spec(MODEL), ActivationCheckpointConfig(recompute=again))
    with MemoryTracker(model) as memory, CommCounter({group.group_name: "context"}) as ledger:
        total, count = model(*local_chunk(batch(number), pieces, separator))
        kept = (
            memory.current_bytes["activation"]
            + memory.current_bytes["communication"]
            + memory.current_bytes["temporary"]
        )
        total.backward()
    found = {"loss": total.detach(), "count": count, **{name: p.grad for name, p in model.named_parameters()}}
    for tensor in found.values():
        dist.all_reduce(tensor, group=group)
    return found, ledger.rows(), kept


def two_groups(world):
    groups = [dist.new_group(members) for members in ([3, 1], [0, 2])]  # neighbours in a group are not neighbours
    number = 1 - world.rank % 2
    own = groups[number]
    errors, sent, kept = {}, {}, {}
    ways = [(m, s, torch.float64, r) for m, s, r in product(METHODS, (None, 3), ("none", "full", "selective"))]
    ways += [(method, 3, torch.float32, "none") for method in METHODS]
    for method, separator, dtype, again in ways:
        way = method, separator, again, dtype
        ours, sent[way], kept[way] = divided(own, method, separator, dtype, again, number)
        theirs = one_process(separator, dtype, number)
        assert ours.keys() == theirs.keys()
        errors[way] = relative(ours, theirs)
    return errors, sent, kept


def relative(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference, to the largest number of its tensor."""
    return max(float((ours[name] - one).abs().max() / one.abs().max()) for name, one in theirs.items())


@pytest.fixture(scope="module")
def decoders():
    return run_ranks(two_groups, 4)


def test_two_groups_of_ranks_train_the_decoder_as_one_process_each(decoders):
    for errors, _, _ in decoders:
        assert len(errors) == 14
        assert not {way: error for way, error in errors.items() if not error < TOLERANCE[way[-1]]}


def test_recomputation_sends_a_forward_s_messages_again(decoders):
    forwards = {"none": 1, "full": 2, "selective": 2}
    for (_, sent, _), separator, (again, times) in product(decoders, (None, 3), forwards.items()):
        token = MODEL.layers * 2 * SEQUENCE // 2 * (MODEL.width // MODEL.heads) * 8
        ring = token * 2 * MODEL.kv_heads
        (row,) = sent["ring", separator, again, torch.float64]
        assert (row.collective, row.message_bytes) == ("send", (times + 2) * ring)
        (row,) = sent["all-to-all", separator, again, torch.float64]
        assert (row.collective, row.message_bytes) == ("all_to_all", (times + 1) * token * 2 * (MODEL.heads + 2))


def test_selective_recomputation_keeps_the_products_and_nothing_of_the_ring(decoders):
    kv_width = MODEL.kv_heads * MODEL.width // MODEL.heads
    products = 3 * MODEL.width + 2 * kv_width + 2 * MODEL.ffn  # q, out and down; k and v; gate and up
    for (_, _, kept), separator in product(decoders, (None, 3)):
        selective, full = (kept["ring", separator, again, torch.float64] for again in ("selective", "full"))
        assert selective - full == MODEL.layers * 2 * SEQUENCE // 2 * products * 8


def with_tensor(world):
    """Sequences divided over one axis of a mesh, matrices over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
    group, errors = mesh.get_group("context"), []
    for method in METHODS:
        model = build_model(MODEL, 0, torch.float64)
        apply_tensor_parallel(model, decoder_parallel_spec(MODEL), mesh["tensor"])
        pieces = apply_context_parallel(model, group, method)
        with loss_parallel():
            total, count = model(*local_chunk(batch(0), pieces, 3))
            total.backward()
        reduce_partial_gradients(model.parameters(), mesh["tensor"])
        found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        found |= {"loss": total.detach().clone(), "count": count}
        for tensor in found.values():
            dist.all_reduce(tensor, group=group)
        errors.append(relative(found, one_process(3, torch.float64, 0)))
    return errors


def test_heads_may_be_divided_among_other_ranks_too():
    assert max(error for errors in run_ranks(with_tensor, 4) for error in errors) < 1e-12


# What is given, and what is refused.


def test_a_piece_comes_with_the_documents_of_the_whole():
    tokens, labels = batch(0)
    pieces = SequenceChunks("ring", 4, 1)
    own_tokens, own_labels, of_whole = local_chunk((tokens, labels), pieces, 3)
    assert torch.equal(own_tokens, tokens[:, pieces.positions(SEQUENCE)])
    assert torch.equal(own_labels, labels[:, pieces.positions(SEQUENCE)])
    assert torch.equal(of_whole, document_ids(tokens, 3))
    assert len(local_chunk((tokens, labels), pieces, None)) == 2


def refusals(world):
    group, (q, k, v, _) = dist.group.WORLD, inputs(3, torch.float64)
    attends = RingAttention(group), AllToAllAttention(group, CoreAttention())
    calls = [partial(attend, q, k, v, torch.zeros(2, SEQUENCE)) for attend in attends]
    calls.append(partial(attends[1], k, k, v, None))
    calls.append(partial(apply_context_parallel, torch.nn.Linear(2, 2), group, "ring"))
    said = []
    for call in calls:
        with pytest.raises((ConfigError, ValueError)) as caught:
            call()
        said.append(str(caught.value))
    return said


def alone_and_refused(world):
    own = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    with CommCounter({}) as ledger:
        errors = [max(differences(own, m, 2, "about borders", torch.float64).values()) for m in METHODS]
    return max(errors), sum(row.wire_bytes for row in ledger.rows()), refusals(world)


def test_a_rank_alone_has_the_whole_and_what_does_not_fit_is_refused():
    for error, sent, (ring, exchange, heads, model) in run_ranks(alone_and_refused, 2):
        assert error < 1e-13
        assert sent == 0
        assert ring == exchange == "documents of 48 tokens; a piece needs those of the whole 96"
        assert "3 query heads of a rank do not divide over context = 2 by all-to-all" in heads
        assert "no Attend" in model
