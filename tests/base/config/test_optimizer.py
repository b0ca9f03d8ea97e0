"""The recorded state of a custom optimizer is read in linear time, and other text is refused."""

from __future__ import annotations

import pytest

from meshwright.base.config import OptimizerConfig
from meshwright.errors import ConfigError


@pytest.mark.parametrize("state", ["", "square_avg", "step:scalar exp_avg", " ".join(["count:number"] * 64)])
def test_recorded_state_is_accepted(state):
    assert OptimizerConfig(state=state).state == state


@pytest.mark.parametrize(
    "state",
    ["a" * 5000 + "!", "a ", "a  b", "a:vector", " ".join(["a"] * 65), "a:scalarb"],
    ids=["long name", "space at the end", "two spaces", "unknown kind", "too many", "no separator"],
)
def test_other_state_is_refused_at_once(state):
    with pytest.raises(ConfigError, match=r"optimizer\.state"):
        OptimizerConfig(state=state)
