"""An update is explained by the gradients that the run recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.prover.compare.discrepancy import Quantity
from meshwright.prover.compare.updates import RecordedUpdate, updates_by_definition
from meshwright.prover.oracle.update_rules import ReferenceOptimizer
from meshwright.prover.trace import StepTrace, Trace
from meshwright.prover.tracer import AssembledTrace
from tests.kit.small_run import load_cpu_config

CONFIG = load_cpu_config(overrides=["--optimizer.clip=0.1", "--optimizer.eps=1e-4", "--optimizer.weight_decay=0.1"])
BEFORE = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
GRADIENT = torch.linspace(2, -1, 12, dtype=torch.float64).view(3, 4)
LR = 0.01
OPTIMIZER = ReferenceOptimizer(CONFIG.optimizer)


def recorded(after: Tensor) -> StepTrace:
    return StepTrace(0, 1.0, float(GRADIENT.norm()), LR, 1, {}, {"w": GRADIENT}, {"w": after})


def updated(factor: float) -> Tensor:
    return OPTIMIZER.update("w", BEFORE, GRADIENT * factor, {}, LR)[0]


def test_clipped_update_follows_the_definition_and_others_do_not():
    clip = 0.1 / float(GRADIENT.norm())
    for factor, expected in ((clip, {Quantity("update", 0, "w")}), (1.0, set()), (clip / 2, set())):
        trace = Trace({"w": BEFORE}, [recorded(updated(factor))])
        assert updates_by_definition(CONFIG, OPTIMIZER, AssembledTrace(trace, [{}, {}], [], [], {})) == expected


def test_wrong_update_is_named():
    clip = 0.1 / float(GRADIENT.norm())
    wrong = {
        "the gradients are not clipped": updated(1.0),
        "the gradients are clipped twice": updated(clip**2),
        "the parameter is not updated": BEFORE,
        "the update has the wrong sign": updated(-clip),
    }
    for text, after in wrong.items():
        regions = {"w": [((slice(0, 3), slice(0, 4)), 0)]}
        update = RecordedUpdate(CONFIG, recorded(after), {"w": BEFORE}, {}, regions, OPTIMIZER)
        assert update.explain_update(["w"]) == text
