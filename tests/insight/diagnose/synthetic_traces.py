"""Writes small Kineto traces with known times, in the layouts of several versions of Kineto."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

DEVICE = [{"id": 0, "name": "Test GPU"}]
COMPUTE_STREAM, COMMUNICATION_STREAM = 7, 20


class TraceBuilder:
    """Collects events; times are in microseconds.

    Args:
        rank: the rank in the header; None leaves it out.
        device: whether the header lists a device.
    """

    def __init__(self, rank: int | None = 0, *, device: bool = True, **header: Any) -> None:
        self.header: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": DEVICE if device else []} | header
        if rank is not None:
            backend = "nccl" if device else "gloo"
            self.header["distributedInfo"] = {"backend": backend, "rank": rank, "world_size": 8}
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def add(self, category: str, name: str, start: float, duration: float, tid: Any = 1, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration, "args": args}
        )

    def kernel(
        self,
        name: str,
        start: float,
        duration: float,
        launch: float | None = None,
        stream: int = COMPUTE_STREAM,
        **args: Any,
    ) -> None:
        """A kernel and the runtime call that launches it, by default just before it starts."""
        self.correlation += 1
        launch = start - 5 if launch is None else launch
        self.add("cuda_runtime", "cudaLaunchKernel", launch, 4, cbid=211, correlation=self.correlation)
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        self.add(category, name, start, duration, stream, stream=stream, correlation=self.correlation, **args)

    def collective(self, name: str, start: float, duration: float, launch: float | None = None, **args: Any) -> None:
        self.kernel(
            f"ncclDevKernel_{name}_RING_LL(ncclDevComm*)", start, duration, launch, COMMUNICATION_STREAM, **args
        )

    def step(self, number: int, start: float, duration: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", start, duration)

    def document(self) -> dict[str, Any]:
        flows = [{"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 0, "cat": "ac2g", "name": "ac2g"}]
        metadata = [{"name": "process_name", "ph": "M", "ts": 0, "pid": 1, "tid": 0, "args": {"name": "python"}}]
        return self.header | {"traceEvents": [*metadata, *self.events, *flows]}

    def write(self, path: Path, layout: str = "2025") -> Path:
        text = LAYOUTS[layout](self.document()).encode()
        path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
        return path


class RocmTraceBuilder(TraceBuilder):
    """Writes what roctracer records: the call that launches a kernel begins with its name, and one that copies ends
    with text.
    """

    def kernel(
        self,
        name: str,
        start: float,
        duration: float,
        launch: float | None = None,
        stream: int = COMPUTE_STREAM,
        **args: Any,
    ) -> None:
        self.correlation += 1
        launch, link = start - 5 if launch is None else launch, {"correlation": self.correlation}
        place = {"device": 2, "stream": stream}
        if name.startswith("Memcpy"):
            ends = {"src": "0x7f12", "dst": "0x7f56", "bytes": "4096", "kind": "1"}
            self.add("cuda_runtime", "hipMemcpyAsync", launch, 4, cid=61, **link, **ends)
            self.add("gpu_memcpy", name, start, duration, stream, **place, **link, kind="HtoD", **args)
            return
        shape = {"grid": [1, 40, 1], "block": [256, 1, 1]}
        call = {"External id": 45, "kernel": f'void at::native::{name}<"{{", 2>(char*, int)', "cid": 107, **link}
        self.add("cuda_runtime", "hipLaunchKernel", launch, 4, **call, **shape, **{"shared memory": 0})
        self.add("kernel", name, start, duration, stream, **place, **link, kind="Dispatch Kernel", **shape, **args)


def kineto(document: dict[str, Any], lines: str) -> str:
    """Text as Kineto writes it: `lines` stands between the keys of an event."""

    def event(fields: dict[str, Any]) -> str:
        body = f",{lines}".join(f'"{key}": {json.dumps(value)}' for key, value in fields.items() if key != "args")
        args = ", ".join(f'"{key}": {json.dumps(value)}' for key, value in fields.get("args", {}).items())
        return f'  {{\n    {body}\n    ,\n    "args": {{\n      {args}\n    }}\n  }}'

    header = "".join(f'  "{key}": {json.dumps(value)},\n' for key, value in document.items() if key != "traceEvents")
    events = ",\n".join(map(event, document["traceEvents"]))
    return f'{{\n{header}  "traceEvents": [\n{events}\n  ],"traceName": "trace.json" }}'


def reordered(document: dict[str, Any]) -> str:
    """The same events with their keys in alphabetical order, as another tool writes them."""
    return json.dumps(document, sort_keys=True)


LAYOUTS = {
    "2021": lambda document: kineto(document, " "),
    "2025": lambda document: kineto(document, "\n    "),
    "compact": lambda document: json.dumps(document, separators=(",", ":")),
    "spaced": lambda document: json.dumps(document, indent=1),
    "reordered": reordered,
    "array": lambda document: json.dumps(document["traceEvents"]),
}
"""Name of a layout -> text of a document."""


def training_trace(
    steps: int = 3, rank: int | None = 0, builder: type[TraceBuilder] = TraceBuilder, **header: Any
) -> TraceBuilder:
    """Steps of 1,000 us: 600 us of compute, an all-reduce of 300 us of which 100 us are overlapped, 100 us to wait."""
    trace = builder(rank, **header)
    for step in range(steps + 1):
        begin = 1000.0 * step
        trace.step(step, begin, 990)
        trace.kernel("gemm", begin + 100, 400, launch=begin + 10)
        trace.kernel("gemm", begin + 500, 200, launch=begin + 20)
        trace.collective("AllReduce", begin + 600, 300, launch=begin + 30)
    return trace
