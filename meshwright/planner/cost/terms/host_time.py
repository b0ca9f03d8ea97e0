"""The time in which the host launches the kernels of a layer; torch-free.

A device is host-bound if the host needs longer to launch the kernels of a layer than the device needs to run them:

    host seconds = kernels x seconds per kernel x (1 - graphed fraction) / relative speed of the host

The number of kernels follows from the layer (`forward_kernels`); the seconds per kernel are a property of a generation
of a trainer, of which a profile states the sum over a dense layer (`layer_launch_seconds`). A machine that was measured
has its own seconds per kernel. While the device waits for the host, collectives that were launched before still run.

| kernels of a forward pass | eager | fused or compiled |
|---|---|---|
| norm | 4 each | 1 each |
| projections, attention, rotary embedding | 5, 1, 6 | 2, 1, 1 |
| feed-forward | 3 matmuls, 2 pointwise | 2 matmuls, 1 pointwise |
| residual additions | 2 | in the norms |
| cast of an 8-bit matmul | 2 per matmul | 1 per matmul |
| routing, permutation, all-to-all, combine | 30 | 18 |
| state-space or linear-attention scan | 14 | 8 |
"""

from __future__ import annotations

HOST_SPEEDS = {"x86": 1.0, "grace": 0.85}
"""Launches per second relative to the x86 hosts that the profiles were fitted to. Grace has 72 cores of 3.1 GHz with a
lower single-thread rate than a Xeon or EPYC host of an HGX board, and launching is single-threaded. Stated, not fitted.
"""
GRAPHED_KERNEL = 0.05
"""Launch time of a kernel inside a CUDA graph, relative to one that the host launches."""


def forward_kernels(
    fused: bool,
    gated: bool = True,
    qk_norm: bool = False,
    quantized: bool = False,
    moe: bool = False,
    scan: bool = False,
    casts_ffn: bool = True,
) -> int:
    """The kernels of one layer's forward pass. `casts_ffn`: the feed-forward is quantized if other matmuls are."""
    norms = (2 + 2 * qk_norm) * (1 if fused else 4)
    mixer = (8 if fused else 14) + 2 if scan else (4 if fused else 12)
    matmuls = (1 + gated + 1) if not fused else 2
    feed_forward = matmuls + (1 if fused else 1 + gated)
    casts = (2 + casts_ffn * matmuls) * (1 if fused else 2) if quantized else 0
    routing = (18 if fused else 30) if moe else 0
    return norms + mixer + feed_forward + (0 if fused else 2) + casts + routing


def host_seconds(
    reference_seconds: float, kernels: int, reference_kernels: int, graphed: float = 0.0, host_speed: float = 1.0
) -> float:
    """Seconds in which the host launches `kernels`, of which the trainer's reference layer has `reference_kernels` and
    takes `reference_seconds`. CUDA graphs launch the fraction `graphed`.
    """
    launched = 1 - graphed * (1 - GRAPHED_KERNEL)
    return reference_seconds * kernels / reference_kernels * launched / host_speed
