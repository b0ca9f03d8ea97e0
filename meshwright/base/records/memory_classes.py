"""The classes of tensor memory: the one table that the tracker, the simulator and the report read. Torch-free."""

from __future__ import annotations

TENSOR_CLASSES = ("parameter", "gradient", "optimizer", "buffer", "activation", "communication", "temporary")
"""What a live tensor is for, as `MemoryTracker` counts it. Unsharded parameters count as parameters."""

COMPARED_CLASSES = {
    "parameter": (("parameter",), ("parameters", "unsharded")),
    "gradient": (("gradient",), ("gradients",)),
    "optimizer": (("optimizer",), ("optimizer",)),
    "activation": (("activation", "temporary", "buffer"), ("activations", "logits")),
    "communication": (("communication",), ("communication",)),
}
"""For each row of the memory report: the measured classes and the fields of the planner's estimate that it adds."""
