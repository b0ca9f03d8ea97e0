"""Checks the sample stream, the loader and the sources of a config against an independent reference."""

from meshwright.prover.stream.check import check_stream

__all__ = ["check_stream"]
