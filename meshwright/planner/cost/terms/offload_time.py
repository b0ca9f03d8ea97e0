"""Memory and time of an optimizer whose state is in host memory; torch-free.

The device keeps parameters and gradients. After backward, the gradients of the rank's shard cross to the host, the host
updates its float32 copy of the parameters with the optimizer state, and the updated parameters cross back:

    seconds = parameters (gradient bytes + parameter bytes) / host link + parameters x host traffic / host memory

| bytes per parameter | device | host |
|---|---|---|
| parameters, gradients | as without offloading | a copy of the parameters |
| optimizer state | none | all of it |

The host link is PCIe or NVLink-C2C. The host's memory bandwidth is shared by the devices of its node; AdamW reads and
writes parameter, gradient and two moments in float32 (28 bytes).
"""

from __future__ import annotations

HOST_TRAFFIC_BYTES = 28.0
"""Bytes per parameter that an AdamW update on the host reads and writes."""
HOST_MEMORY_BANDWIDTH = 50e9
"""Bytes/s of host memory per device: about 400 GB/s of a two-socket host that eight devices share."""


def offload_seconds(parameters: float, gradient_bytes: float, parameter_bytes: float, host_link: float) -> float:
    """Seconds of the update of this many local parameters on the host, with both transfers."""
    transfer = parameters * (gradient_bytes + parameter_bytes) / host_link
    return transfer + parameters * HOST_TRAFFIC_BYTES / HOST_MEMORY_BANDWIDTH
