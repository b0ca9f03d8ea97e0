"""Derives the proof runs from a config: the same settings at sizes that a small machine runs in seconds."""

from meshwright.prover.shrink.coverage import estimate_seconds, not_proven
from meshwright.prover.shrink.runs import ProofRun, proof_runs
from meshwright.prover.shrink.source import open_proof_sources

__all__ = ["ProofRun", "estimate_seconds", "not_proven", "open_proof_sources", "proof_runs"]
