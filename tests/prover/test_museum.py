"""Public bugs that nobody saw in the loss: each is rebuilt as a user model or plan, and `prove` names it."""

from __future__ import annotations

import pytest

from tests.prover import (
    museum_axes,  # noqa: F401  registers its cases
    museum_tensor,  # noqa: F401
)
from tests.prover.custom_cases import prove_cases
from tests.prover.museum import MUSEUM

AXES = ("replicate", "tensor", "context", "expert", "pipeline")


def axis_of(name: str) -> str:
    layout = MUSEUM[name].layout
    return next((axis for axis in AXES[1:] if getattr(layout, axis) > 1), AXES[0])


@pytest.fixture(scope="module")
def findings():
    """Findings by axis: the cases of an axis share their launches."""
    found: dict[str, dict[str, tuple[bool, str]]] = {}

    def of(axis: str) -> dict[str, tuple[bool, str]]:
        if axis not in found:
            names = [name for name in MUSEUM if axis_of(name) == axis]
            found[axis] = dict(zip(names, prove_cases([MUSEUM[name].build() for name in names]), strict=True))
        return found[axis]

    return of


def test_museum_has_thirty_bugs():
    assert len(MUSEUM) >= 30
    assert len({bug.report for bug in MUSEUM.values()}) == len(MUSEUM)


QUICK = "tensor"
"""The axis whose cases are in the quick tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if axis_of(name) == QUICK else pytest.mark.long) for name in MUSEUM]
)
def test_public_bug_is_named(name, findings):
    passed, measured = findings(axis_of(name))[name]
    assert not passed
    missing = [text for text in MUSEUM[name].expected if text not in measured]
    assert not missing, f"{missing} not in: {measured}"
