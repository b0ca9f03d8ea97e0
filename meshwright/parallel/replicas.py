"""Whether ranks that should hold the same parameters do: digests compared, the odd one named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import xxhash
from torch import Tensor, nn

from meshwright.errors import MeshwrightError, PeerError
from meshwright.parallel.world import World


class ReplicaError(MeshwrightError):
    """A replica holds other parameters than the rest: a silent fault of memory, of a kernel or of a link."""


def compare_replicas(model: nn.Module, world: World, step: int) -> None:
    """Raises on every rank if replicas differ, naming the odd rank and the first parameter."""
    words = words_of(parameter for _, parameter in model.named_parameters()).cpu()
    odd = odd_ones([row[0] for row in world.gather_numbers(digest_of_words(words), name="replica digests")])
    if odd:
        rows = world.gather_numbers(*words.tolist(), name="replica words")
        columns = zip(*rows, strict=True)
        differing = next(i for i, column in enumerate(columns) if len(set(column)) > 1)
        raise replica_error(world.rank, step, odd, world.size, list(dict(model.named_parameters()))[differing])


def words_of(parameters: Iterable[Tensor]) -> Tensor:
    """A word of each parameter; on a device the work is only queued."""
    return torch.stack([word_of(parameter) for parameter in parameters])


def digest_of_words(words: Tensor) -> int:
    return int(xxhash.xxh3_64_intdigest(words.numpy().tobytes())) - 2**63


def word_of(parameter: Tensor) -> Tensor:
    """One integer of a parameter's bits, computed where it lies. One flipped bit always changes it; on a device it is a
    plain sum, which two errors may balance.
    """
    flat = parameter.detach().reshape(-1)
    if flat.device.type == "cpu":
        bits = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        return torch.tensor(xxhash.xxh3_64_intdigest(bits) - 2**63)
    return flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[flat.element_size()]).sum(
        dtype=torch.int64
    )


def odd_ones(digests: Sequence[int]) -> list[int]:
    """The ranks outside the majority; all of them where there is none; nobody where all agree."""
    counts = Counter(digests).most_common()
    if len(counts) == 1:
        return []
    if counts[0][1] * 2 <= len(digests):
        return list(range(len(digests)))
    return [rank for rank, digest in enumerate(digests) if digest != counts[0][0]]


def replica_error(rank: int, step: int, odd: list[int], size: int, parameter: str) -> MeshwrightError:
    """The odd rank is to blame; the others are witnesses. Two replicas cannot tell which of them is right."""
    who = f"rank {odd[0]} differs from" if len(odd) < size else "all differ among"
    where = f", first in {parameter}" if parameter else ""
    what = f"step {step}: replicas hold different parameters: {who} the {size} replicas{where}"
    if rank in odd:
        return ReplicaError(what, "look for faulty memory or a faulty device on that rank")
    return PeerError(what)
