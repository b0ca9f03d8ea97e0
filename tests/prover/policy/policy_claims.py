"""The claims of the proof of a small run of reinforcement learning."""

from __future__ import annotations

from pathlib import Path

from tests.kit.small_run import load_cpu_config

EXAMPLE = Path(__file__).parents[3] / "examples" / "rl.toml"


def policy_config(*overrides, ranks=1):
    return load_cpu_config(EXAMPLE, overrides=["--launch.device=cpu", "--launch.threads=1", *overrides], ranks=ranks)


def failed_claims(claims):
    """Claim -> what was measured, of the claims that do not hold."""
    return {claim.claim: claim.measured for claim in claims if not claim.passed}
