"""The software of a run as the planner sees it: what it keeps, fuses, overlaps, and how well its kernels do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stack:
    """One generation of one trainer. Constants that were fitted to published runs are listed in docs/planner.md."""

    name: str
    flash: bool = True
    """attention without its matrix of scores"""
    fused: bool = False
    """norms, activations and residual sums in compiled or hand-written kernels: fewer passes over memory, less kept"""
    cut_sequence: bool = True
    """the sequence is divided between the matrices that the tensor axis divides"""
    weights: float = 4
    """bytes a parameter is held in"""
    computed: float = 0
    """bytes of a second copy in the precision of compute, kept through the step; 0: made when it is used"""
    gradients: float = 4
    """bytes a gradient is held in"""
    state: float = 8
    """bytes of the optimizer a parameter, master weights included where they are not the weights"""


OWN = Stack("meshwright")
OWN_COMPILED = Stack("meshwright compiled", fused=True)
