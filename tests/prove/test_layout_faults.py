"""Every seeded fault of a layout is caught, and named by what is off, by what factor and from what cause."""

from __future__ import annotations

import pytest
from layout_faults import FAULTS

from meshwright.config import load
from meshwright.prove import layouts

SMALL = [
    "--model.layers=1",
    "--model.width=16",
    "--model.heads=2",
    "--model.kv_heads=2",
    "--model.ffn=18",
    "--model.vocab=26",
]


def found(layout, proofs, monkeypatch):
    """Only the proofs that a test needs: in one precision a layout takes a third of the time."""
    right = layouts.variants

    def fewer(config):
        every, note = right(config)
        return [every[index] for index in proofs], note

    monkeypatch.setattr(layouts, "variants", fewer)
    return list(layouts.check_layouts(load(overrides=[*layout, *SMALL])))


@pytest.mark.parametrize("layout", sorted({fault.layout for fault in FAULTS.values()}))
def test_without_a_fault_the_same_layouts_keep_their_promises(layout, monkeypatch):
    proofs = sorted({index for fault in FAULTS.values() if fault.layout == layout for index in fault.proofs})
    assert [(promise, measured) for promise, kept, measured in found(layout, proofs, monkeypatch) if not kept] == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_caught_and_named(name, monkeypatch):
    fault = FAULTS[name]
    fault.sow(monkeypatch)
    for promise, kept, measured in found(fault.layout, fault.proofs, monkeypatch):
        print(f"VERDICT {name} | {promise} | {measured}")
        assert not kept, f"{name} is not caught: {promise}"
        assert all(words in measured for words in fault.says), measured


def test_there_are_many():
    assert len(FAULTS) >= 40
