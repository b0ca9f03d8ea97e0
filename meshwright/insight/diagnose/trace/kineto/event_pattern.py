"""Regular expressions that find the events of a trace that the diagnosis uses, in the layouts that Kineto writes.

Kineto writes the keys of a complete event in a fixed order: ph, cat, name, pid, tid, ts, dur, args. One `findall` over
a chunk of text is ten times as fast as parsing it as JSON. All repetitions are possessive: matching takes linear time
whatever the text is. An unescaped `"X"` cannot be inside a JSON string, so that a match is an event.
"""

from __future__ import annotations

import re

COLON = rb":\s*+"
COMMA = rb",\s*+"
BEFORE_ARGS = rb"\s*+,\s*+"
STRING = rb'[^"]*+(?:(?<=\\)"[^"]*+)*+'  # with escaped quotes; a name does not end with a backslash
SCALAR = rb'("[^"]*+"|-?[0-9]++)'
NUMBER = rb"(-?[0-9]{1,20}+(?:\.[0-9]{0,12}+)?+)"
ARGUMENT = rb'(?:"' + STRING + rb'"|\[[^"\[\]{}]*+(?:"' + STRING + rb'"[^"\[\]{}]*+)*+\]|[^\s"\[\]{},]++)'
"""A value of `args` that may precede "correlation": CUPTI writes numbers there, roctracer the name of the kernel."""

DEVICE_CATEGORIES = rb"[Kk]ernel|gpu_mem|Memcpy|Memset"
RUNTIME_CATEGORIES = rb"(?:(?:cuda|hip|xpu)_(?:runtime|driver)|Runtime)"
RUNTIME_CALLS = (
    rb"(?:cuda|cu|hip|ze|sycl|zeCommandListAppend)"
    rb"(?:Launch|Ext|Module|Hcc|Graph|Memcpy|Memset|Malloc|Free|Mem(?:Alloc|Free|Map|Unmap|Create)|Host"
    rb"|(?:Stream|Device|Event|Ctx|Thread)Synchronize)"
)
"""Calls that launch device activities, wait for the device or allocate memory."""
OPERATORS = (
    rb"enumerate\(|ProfilerStep|record_param_comms|c10d::|_c10d_functional|nccl|gloo|mpi:|ucc:"
    rb"|aten::item|aten::_local_scalar_dense|aten::nonzero|Optimizer|DistributedDataParallel|FSDP|Pipeline"
)
"""Operators of the host that matter beside a device."""
COMMUNICATION = rb"(?:nccl|rccl|gloo:|mpi:|ucc:|mscclpp|record_param_comms)"
"""Prefixes of names whose arguments are read."""
NAME_KEY = rb'"' + COMMA + rb'"name"' + COLON + rb'"'
DEVICE_TRACE = (
    rb"(?=" + DEVICE_CATEGORIES + rb"|user_annotation"
    rb"|" + RUNTIME_CATEGORIES + NAME_KEY + RUNTIME_CALLS
    + rb"|(?:cpu_op|Operator)" + NAME_KEY + rb"(?:" + OPERATORS + rb"))"
)  # fmt: skip
"""The events that are used of a trace with device activities: category and name, as a lookahead."""
HOST_TRACE = (
    rb"(?=cpu_op|Operator|user_annotation|" + DEVICE_CATEGORIES
    + rb"|" + RUNTIME_CATEGORIES + NAME_KEY + RUNTIME_CALLS + rb")"
)  # fmt: skip
"""The events that are used of a trace that may have no device: all operators as well."""


def event_pattern(wanted: bytes) -> re.Pattern[bytes]:
    """Returns the pattern of an event whose category and name match the lookahead `wanted`; its groups are a Row."""
    key = {name: rb'"' + name + rb'"' + COLON for name in (b"cat", b"name", b"pid", b"tid", b"ts", b"dur", b"args")}
    args = BEFORE_ARGS + key[b"args"]
    before = rb'(?:\s*+"(?!correlation")[^"]*+"' + COLON + ARGUMENT + rb"\s*+,)*+\s*+"
    correlation = before + rb'"correlation"' + COLON + rb"([0-9]{1,18}+)"
    return re.compile(
        rb'X"' + COMMA + key[b"cat"] + rb'"' + wanted + rb'([^"]*+)"' + COMMA
        + key[b"name"] + rb'"((?P<communication>' + COMMUNICATION + rb")?+" + STRING + rb')"' + COMMA
        + key[b"pid"] + SCALAR + COMMA + key[b"tid"] + SCALAR + COMMA
        + key[b"ts"] + NUMBER + COMMA + key[b"dur"] + NUMBER
        + rb"(?:(?=" + args + rb"\{" + correlation + rb"))?+"
        + rb"(?(communication)(?:" + args + rb"(\{[^{}]*+\}))?+|)",
        re.DOTALL,
    )  # fmt: skip


COMPLETE_EVENT = re.compile(
    rb'"ph"' + COLON + rb'"X"' + COMMA + rb'"cat"' + COLON + rb'"[^"]*+"' + COMMA
    + rb'(?:"name"' + COLON + rb'"' + STRING + rb'"' + COMMA + rb'"pid"' + COLON + SCALAR + COMMA
    + rb'"tid"' + COLON + SCALAR + COMMA + rb')?+"ts"' + COLON + NUMBER + COMMA + rb'"dur"' + COLON + NUMBER,
    re.DOTALL,
)  # fmt: skip
"""An event in Kineto's layout, of any category. The event that spans a trace has its name after its times."""
