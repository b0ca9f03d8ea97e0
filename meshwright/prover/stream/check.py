"""Checks the contract of the sample stream on the user's own config and data, over the whole length of the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshwright.base.config import RunConfig
from meshwright.core.data.source import Source
from meshwright.prover.claims import Claim
from meshwright.prover.stream.checked_stream import CheckedStream, WrongStream
from meshwright.prover.stream.epochs import check_epochs, check_held_out_samples
from meshwright.prover.stream.loading import check_evaluation, check_loader_order, check_loader_tensors
from meshwright.prover.stream.order import check_find_inverts_show, check_mixture, check_order, check_rank_slices
from meshwright.prover.stream.sources import check_sources

CLAIMS: dict[str, Callable[[CheckedStream], str]] = {
    "the sample at a position is the one that the seed defines": check_order,
    "an epoch contains each training sample once, and each epoch has its own order": check_epochs,
    "the sources of a mixture have their configured shares": check_mixture,
    "the slices of the ranks make up the global batch of a step": check_rank_slices,
    "held-out samples are never trained on": check_held_out_samples,
    "an evaluation reads each of its held-out samples once": check_evaluation,
    "`data find` is the inverse of `data show`": check_find_inverts_show,
    "a sample is what its source file contains": check_sources,
    "a resume at any step, with any number of ranks and workers, loads the same samples": check_loader_order,
    "the loader returns the tokens and labels of its samples": check_loader_tensors,
}
"""Claim -> check, which returns what was measured and raises `WrongStream` if the claim does not hold."""


NEEDS_FILES = (check_sources, check_loader_tensors)
"""Checks that read the files of the config independently; a user's dataset has no second reader."""


def check_stream(config: RunConfig, sources: list[Source] | None = None) -> Iterator[Claim]:
    """Every sample's position is a pure function of the seed: no rank count, worker or restart changes it. `sources`
    are a user's own datasets, in place of the files of the config.
    """
    checked = CheckedStream.open(config, sources)
    claims = {claim: check for claim, check in CLAIMS.items() if sources is None or check not in NEEDS_FILES}
    for claim, check in claims.items():
        unread = checked.unread if check in NEEDS_FILES else ()
        try:
            yield Claim(claim, True, check(checked), not_proven=unread)
        except WrongStream as difference:
            yield Claim(claim, False, str(difference))
        except Exception as error:  # noqa: BLE001  an error of the stream, of a source or of a worker
            yield Claim(claim, False, f"{type(error).__name__}: {error}")
