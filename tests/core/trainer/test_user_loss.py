"""A custom loss must return a sum with a gradient; anything else is refused on the first batch."""

from __future__ import annotations

import pytest
from torch import nn

from meshwright.errors import ConfigError
from tests.kit.custom_model import custom_config, run_custom, summed_cross_entropy


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss(), "reduction = 'mean'"),
        (lambda out, y: nn.functional.cross_entropy(out, y, reduction="none"), "shape"),
        (lambda out, y: (summed_cross_entropy(out, y), 1), "the loss counted 1 valid targets, but the batch has 5"),
    ],
)
def test_loss_with_another_reduction_than_sum_is_refused(tmp_path, loss, message):
    with pytest.raises(ConfigError) as failed:
        run_custom(tmp_path / "r", custom_config(), loss=loss)
    assert message in str(failed.value)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda o, y: 1.0, "the loss returned a float"),
        (lambda o, y: None, "the loss returned a NoneType"),
        (lambda o, y: summed_cross_entropy(o, y).detach(), "a tensor without a gradient graph"),
    ],
)
def test_loss_without_a_gradient_is_refused(tmp_path, loss, message):
    with pytest.raises(ConfigError) as failed:
        run_custom(tmp_path / "r", custom_config(), loss=loss)
    assert message in str(failed.value)


def test_model_without_trainable_parameters_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no parameter to train"):
        run_custom(tmp_path / "r", custom_config(), model=nn.Flatten())
