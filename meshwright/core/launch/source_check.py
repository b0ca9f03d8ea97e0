"""Reads the first facts about a user's dataset in a process of its own, so that a dataset that blocks can be ended."""

from __future__ import annotations

from typing import Any

from meshwright.base.config import LaunchConfig
from meshwright.base.records.failures import RanksFailed
from meshwright.core.data.source import Collate, FingerprintedSource, Source, raise_if_not_repeatable
from meshwright.core.launch.ranks import run_ranks
from meshwright.errors import DataError, describe_exception


def check_source(source: Source, launch: LaunchConfig, collate: Collate | None = None) -> Source:
    """Checks that samples and batches are repeatable, and returns the source with its fingerprint.

    A dataset may take long to read, but not longer than `launch.hang_timeout`.
    """
    try:
        [fingerprint] = run_ranks(read_fingerprint, 1, source, collate, timeout=launch.hang_timeout)
    except RanksFailed as failed:
        if failed.first.error_type == "Hang":
            raise DataError(
                f"source {source.name} did not return its length, its first samples and its fingerprint within "
                f"launch.hang_timeout = {launch.hang_timeout:g} s",
                "try to read the dataset outside of Meshwright, or a longer launch.hang_timeout",
            ) from None
        error = failed.cause()
        if isinstance(error, DataError):
            raise error from None
        raise DataError(
            f"source {source.name} cannot be read: {failed.first.message}",
            "try to read the dataset outside of Meshwright",
        ) from None
    return FingerprintedSource(source, fingerprint)


def read_fingerprint(_world: Any, source: Source, collate: Collate | None) -> str:
    try:
        raise_if_not_repeatable(source, collate)
        return source.fingerprint()
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"source {source.name} cannot be read: {type(error).__name__}: {describe_exception(error)}",
            "try to read the dataset outside of Meshwright",
        ) from error
