"""Relations that every language model satisfies, checked on a model that is given as functions.

They need no reference: causality, documents that do not see each other, a loss that is a sum over tokens of independent
samples, labels that are the next tokens. A mask, a shift or a mean that is wrong in the model and in a reference alike
is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from meshwright.base.config import IGNORE_INDEX, LayoutConfig, RunConfig
from meshwright.base.models.registry import model_spec
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.shard_source import ShardSource
from meshwright.core.data.source import Source, SyntheticSource, spaced_indices
from meshwright.core.data.token_files import TokenSource, file_sources
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.models.init import build_empty
from meshwright.core.models.layers.loss import HeadLoss
from meshwright.core.parallel.world import World
from meshwright.core.trainer.precision import Precision
from meshwright.prover.claims import Claim, cuda_devices
from meshwright.prover.shrink.sizes import shrink

CHECKED_SAMPLES = 64
"""Samples per source whose labels are compared with the next tokens."""
CHECKED_FILES = 16
"""Files whose samples are compared, at most."""


@dataclass(frozen=True)
class RelationModel:
    """The model under test. Functions take (batch, sequence) tensors of token ids and of labels."""

    logits: Callable[[Tensor], Tensor]
    """tokens -> (batch, sequence, vocabulary)"""
    loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """(tokens, labels) -> (sum of token losses, number of valid tokens)"""
    vocab: int
    sequence: int
    separator: int | None = None
    """the token that ends a document; None: attention sees the whole sequence"""
    rounding: float = 1e-10
    """relative differences up to this one are rounding"""
    set_training: Callable[[bool], None] | None = None
    """switches between training and evaluation mode; None: the model has dropout, or no modes"""

    def tokens(self, batch: int, seed: int = 0) -> Tensor:
        """Random tokens without a separator."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.vocab - (self.separator is not None), (batch, self.sequence), generator=generator)
        return tokens if self.separator is None else tokens + (tokens >= self.separator)

    def labels(self, batch: int) -> Tensor:
        """Random labels, of which every sample masks another number."""
        labels = self.tokens(batch, seed=1)
        masked_from = torch.arange(batch)[:, None] * self.sequence // (2 * batch) + self.sequence // 2
        return labels.where(torch.arange(self.sequence) < masked_from, IGNORE_INDEX)


def check_relations(model: RelationModel) -> list[Claim]:
    """Returns every relation that applies to the model."""
    relations = [causality, loss_of_logits, permuted_batch, repeated_sample, halves, masked_labels]
    if model.separator is not None:
        relations.insert(1, documents)
    if model.set_training is not None:
        relations.append(evaluation_mode)
    with torch.no_grad():
        return [relation(model) for relation in relations]


def causality(model: RelationModel) -> Claim:
    """Row p of a batch has another token at position p than the first row."""
    logits, first = changed_one_by_one(model, model.tokens(1))
    changes = (logits - first).abs().amax(dim=-1) / first.abs().max()  # (changed position, position of the logit)
    earlier, later = float(changes.tril(-1).max()), changes.triu(1)[:-1].amax(dim=1)
    return Claim(
        f"a changed token changes no earlier logit and some later one, at each of {model.sequence} positions",
        earlier <= model.rounding < float(later.min()),
        f"earlier logits change by up to {earlier:.1e}, later ones by at least {float(later.min()):.1e}",
    )


def documents(model: RelationModel) -> Claim:
    """The sequence has three documents; a token changes, one after the other, in each."""
    assert model.separator is not None
    tokens, ends = model.tokens(1), (model.sequence // 3, 2 * model.sequence // 3)
    tokens[0, list(ends)] = model.separator
    logits, first = changed_one_by_one(model, tokens)
    position = torch.arange(model.sequence)
    document = (position > ends[0]).long() + (position > ends[1])
    changes = (logits - first).abs().amax(dim=-1) / first.abs().max()
    token_changed = ~torch.isin(position, torch.tensor(ends))  # a changed separator would join two documents
    other_document = (document[:, None] != document) & token_changed[:, None]
    own_document = (document[:, None] == document) & (position[:, None] < position) & token_changed[:, None]
    across = float(changes[other_document].max())
    within = float(changes.where(own_document, 0.0).amax(dim=1)[own_document.any(dim=1)].min())
    return Claim(
        "a changed token changes no logit of another document, and some later one of its own",
        across <= model.rounding < within,
        f"other documents change by up to {across:.1e}, its own by at least {within:.1e}",
    )


def changed_one_by_one(model: RelationModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of copies of one sequence, of which copy p has another token at position p, and those of the original,
    which is the last sequence of the same batch.
    """
    copies = tokens.repeat(model.sequence + 1, 1)
    position = torch.arange(model.sequence)
    changed = (tokens[0] + 1) % model.vocab
    if model.separator is not None:
        changed = torch.where(changed == model.separator, (changed + 1) % model.vocab, changed)
        changed = torch.where(tokens[0] == model.separator, tokens[0], changed)
    copies[position, position] = changed
    logits = model.logits(copies).double().cpu()
    return logits[:-1], logits[-1]


def loss_of_logits(model: RelationModel) -> Claim:
    """The sum of -log softmax(logits)[label] over the labels at the same positions."""
    tokens, labels = model.tokens(4), model.labels(4)
    valid = labels != IGNORE_INDEX
    logs = model.logits(tokens).double().cpu().log_softmax(dim=-1)
    expected = -logs.gather(-1, labels.where(valid, 0)[..., None])[..., 0][valid].sum()
    total, count = evaluate_loss(model, tokens, labels)
    difference = relative(total, float(expected))
    return Claim(
        "the loss is the sum of the cross-entropies of logits and labels at the same position",
        difference <= model.rounding and count == int(valid.sum()),
        f"relative difference {difference:.1e}, {count} of {int(valid.sum())} valid tokens",
    )


def permuted_batch(model: RelationModel) -> Claim:
    """Each sample has a loss of its own: that of the sample in the permuted batch."""
    tokens, labels = model.tokens(4), model.labels(4)
    order = torch.tensor([2, 0, 3, 1])
    logits, permuted = model.logits(tokens).double().cpu(), model.logits(tokens[order]).double().cpu()
    difference = float((logits[order] - permuted).abs().max() / logits.abs().max())
    losses = relative(evaluate_loss(model, tokens[order], labels[order])[0], evaluate_loss(model, tokens, labels)[0])
    return Claim(
        "a permuted batch gives the permuted logits and the same loss",
        max(difference, losses) <= model.rounding,
        f"relative difference {max(difference, losses):.1e}",
    )


def repeated_sample(model: RelationModel) -> Claim:
    tokens, labels = model.tokens(4), model.labels(4)
    repeat = torch.tensor([0, 1, 2, 3, 3])
    (total, count), (part, part_count), (more, more_count) = (
        evaluate_loss(model, tokens[rows], labels[rows]) for rows in (repeat[:4], repeat[3:4], repeat)
    )
    difference = relative(more, total + part)
    return Claim(
        "a sample that is in the batch twice counts twice",
        difference <= model.rounding and more_count == count + part_count,
        f"relative difference {difference:.1e}, {more_count} = {count} + {part_count} valid tokens",
    )


def halves(model: RelationModel) -> Claim:
    tokens, labels = model.tokens(4), model.labels(4)
    (total, count), *parts = (evaluate_loss(model, tokens[r], labels[r]) for r in (slice(4), slice(1), slice(1, 4)))
    difference = relative(sum(part for part, _ in parts), total)
    return Claim(
        "the loss of a batch is the sum of the losses of its parts, and so is the number of valid tokens",
        difference <= model.rounding and count == sum(part for _, part in parts),
        f"relative difference {difference:.1e}, {count} valid tokens in parts of {parts[0][1]} and {parts[1][1]}",
    )


def masked_labels(model: RelationModel) -> Claim:
    """The even and the odd labels alone give the parts of the loss; no label at all gives zero."""
    tokens, labels = model.tokens(4), model.labels(4)
    even = (torch.arange(model.sequence) % 2 == 0).expand_as(labels)
    total, count = evaluate_loss(model, tokens, labels)
    parts = [evaluate_loss(model, tokens, labels.where(keep, IGNORE_INDEX)) for keep in (even, ~even)]
    nothing = evaluate_loss(model, tokens, torch.full_like(labels, IGNORE_INDEX))
    difference = relative(parts[0][0] + parts[1][0], total)
    return Claim(
        "masked labels count neither in the loss nor in the number of valid tokens",
        difference <= model.rounding and count == parts[0][1] + parts[1][1] and nothing == (0.0, 0),
        f"relative difference {difference:.1e}; without labels the loss is {nothing[0]:g} of {nothing[1]} tokens",
    )


def evaluation_mode(model: RelationModel) -> Claim:
    assert model.set_training is not None
    tokens, labels = model.tokens(4), model.labels(4)
    losses = []
    for training in (False, True):
        model.set_training(training)
        losses.append(evaluate_loss(model, tokens, labels)[0])
    difference = relative(*losses)
    return Claim(
        "training mode and evaluation mode give the same loss",
        difference <= model.rounding,
        f"relative difference {difference:.1e}",
    )


def evaluate_loss(model: RelationModel, tokens: Tensor, labels: Tensor) -> tuple[float, int]:
    total, count = model.loss(tokens, labels)
    return float(total), int(count)


def relative(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-300)


def check_labels(sources: Sequence[Source]) -> Iterator[Claim]:
    """Yields whether labels are the next tokens, in samples that are spread over token files and synthetic sources. A
    sample of a file continues the one before.
    """
    files = [source for source in file_sources(sources) if isinstance(source, TokenSource | ShardSource)]
    chosen: list[Source] = [files[index] for index in spaced_indices(len(files), CHECKED_FILES)]
    chosen += [source for source in sources if isinstance(source, SyntheticSource)]
    compared, wrong = 0, []
    for source in chosen:
        for index in spaced_indices(len(source), CHECKED_SAMPLES):
            tokens, labels = source[index]
            following = tokens[1:].tolist()
            if isinstance(source, TokenSource | ShardSource) and index + 1 < len(source):
                following.append(source[index + 1][0][0])
            compared += 1
            if labels.tolist()[: len(following)] != following:
                wrong.append(f"sample {index} of {source.name}")
    if compared:
        claim = "labels are the next tokens; in a file, the last label is the first token of the next sample"
        measured = f"{compared - len(wrong)} of {compared} samples"
        yield Claim(claim, not wrong, measured + (f"; the first wrong one is {wrong[0]}" if wrong else ""))


def check_relations_of_config(config: RunConfig) -> Iterator[Claim]:
    """Yields the relations of the config's decoder at a small size: in float64 on the CPU, and on CUDA in the precision
    of the run if the run uses CUDA. With a capacity, dropped tokens depend on the batch; it is off here. The labels are
    those of the config's data.
    """
    small = shrink(config, LayoutConfig(replicate=1))
    small = replace(small, model=replace(small.model, capacity_factor=0.0))
    float64 = replace(small.precision, compute="fp64", float8=False)
    yield from relations_on(World(), replace(small, precision=float64))
    if cuda_devices(config.launch):  # by a rank: CUDA does not survive the fork of later ranks
        yield from run_ranks(relations_on, 1, small, launch=config.launch)[0]
    if not config.rl.enabled:  # a run on rollouts has no samples
        yield from check_labels(open_sources(config.data, config.model.vocab, config.model.separator))


def relations_on(world: World, config: RunConfig) -> list[Claim]:
    """The relations of the decoder of this config on the device of a rank."""
    model = decoder_under_test(config, Precision(config.precision, world.device))
    place = f"({config.precision.compute} on {world.device.type}, {config.model.layers} blocks)"
    return [Claim(f"{claim.claim} {place}", claim.passed, claim.measured) for claim in check_relations(model)]


def decoder_under_test(config: RunConfig, precision: Precision) -> RelationModel:
    """The decoder with random weights of order one, so that every logit depends on every token that it sees."""
    module, spec = build_empty(config.model, precision.parameters, precision.device), model_spec(config.model)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        std, mean = (tensor.shape[-1] ** -0.5, 0.0) if tensor.ndim > 1 else (0.1, 1.0)
        tensor.detach().copy_(mean + std * torch.randn(tensor.shape, generator=generator))
    embedding = module.get_parameter(spec.parameters[0].name).detach()
    embedding.copy_(torch.randn(embedding.shape, generator=generator))
    return relation_model(module, spec.after[-1], config, precision)


def relation_model(module: nn.Module, head_name: str, config: RunConfig, precision: Precision) -> RelationModel:
    """The decoder as functions. The logits are those that the loss is computed from."""
    device, hidden, head = precision.device, torch.empty(0), module.get_submodule(head_name)
    assert isinstance(head, HeadLoss)

    def keep_hidden(_head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal hidden
        hidden = inputs[0]

    def loss(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with precision.autocast():
            return module(tokens.to(device), labels.to(device))  # type: ignore[no-any-return]

    def logits(tokens: Tensor) -> Tensor:
        loss(tokens, tokens)
        with precision.autocast():
            return head.logits(hidden)

    def set_training(training: bool) -> None:
        module.train(training)

    head.register_forward_pre_hook(keep_hidden)
    model, rounding = config.model, max(4 * torch.finfo(precision.compute).eps, 1e-10)
    return RelationModel(
        logits, loss, model.vocab, config.data.sequence, model.separator, rounding, set_training=set_training
    )
