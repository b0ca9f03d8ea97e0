"""Divides what a rank does into compute, communication and memory copies, on its device or else on its host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.insight.diagnose.trace.intervals import Intervals
from meshwright.insight.diagnose.trace.kineto.event_table import EventTable, Floats, Kind, Mask
from meshwright.insight.diagnose.trace.kineto.kineto_trace import KinetoTrace

COMMUNICATION_NAMES = (
    r"(?i)nccl|rccl|hccl|gloo|mscclpp|msccl|nvshmem|rocshmem|deep_?ep|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|cross_device_reduce|multimem|internode|intranode|symm_mem|ucc_|oneccl|SendRecv"
)
"""Names of kernels that move data between ranks."""
HOST_COMMUNICATION = r"^(?:gloo|nccl|rccl|mpi|ucc):"
"""Annotations of the host that last as long as a collective."""
HOST_BLOCKED = r"^c10d::|^record_param_comms|^_?c10d_functional::|[Ww]ait\b"
"""Operators in which the host starts a collective or waits for one."""
COPIES = r"^(?:Copy(?:Host|Device)To(?:Host|Device)|FillBuffer|__amd_rocclr_(?:copy|fill)Buffer)"
"""Copies and fills that ROCm runs, or records, as kernels."""
LOADER = r"^enumerate\(|DataLoaderIter|(?i:dataloader).*(?:__next__|fetch|next)"
"""Annotations of the host that last as long as it waits for samples."""
COMMUNICATION_STREAM = 0.9
"""Share of a stream's kernel time in named collectives above which its other kernels belong to communication."""


@dataclass
class Activities:
    """The activities of one rank that count: those of its device, or the operators of its host if it has none."""

    rows: np.ndarray[Any, np.dtype[np.int64]]
    """rows of the event table, by start"""
    start: Floats
    end: Floats
    launch: Floats
    """when the host launched the activity; NaN if that is not known"""
    is_communication: Mask
    is_memory: Mask
    on_device: bool

    @property
    def is_compute(self) -> Mask:
        return ~self.is_communication & ~self.is_memory

    @property
    def step_time(self) -> Floats:
        """The time that decides to which step an activity belongs: that of its launch. Where the launches of most of
        the time are not known, a trace does not link them in a way that is read here, and the starts decide.
        """
        seconds, unknown = self.end - self.start, np.isnan(self.launch)
        return self.start if 2 * seconds[unknown].sum() > seconds.sum() else self.launch

    def intervals(self, mask: Mask) -> Intervals:
        return Intervals.union(self.start[mask], self.end[mask])

    def select(self, mask: Mask) -> Activities:
        return Activities(
            self.rows[mask],
            self.start[mask],
            self.end[mask],
            self.launch[mask],
            self.is_communication[mask],
            self.is_memory[mask],
            self.on_device,
        )


def measured_activities(trace: KinetoTrace) -> Activities:
    """The activities of the complete steps of a trace.

    The last step is left out if there are several, as in HolisticTraceAnalysis: the profiler stops in it. The time at
    which the host launched an activity counts. One that was launched before the trace began is left out as well, with
    a note.
    """
    activities = device_activities(trace) if trace.has_device else host_activities(trace)
    _, steps = trace.steps()
    if len(steps) < 2:
        return activities
    if unknown := int(np.isnan(activities.launch).sum()):
        what = "are left out" if np.isnan(activities.step_time).any() else "count in the step in which they start"
        trace.notes.append(f"{unknown:,} of {len(activities.rows):,} kernels and copies have no launch, and {what}")
    selected = activities.select(activities.step_time < steps.start[-1])  # False for NaN
    return selected if len(selected.rows) else activities


def device_activities(trace: KinetoTrace) -> Activities:
    """The kernels, copies and fills of the device, with the times of their launches."""
    events = trace.events
    rows = np.flatnonzero(events.is_device)
    rows = rows[np.argsort(events.start[rows], kind="stable")]
    is_memory = (events.kind[rows] != Kind.KERNEL) | events.named(COPIES)[rows]
    return Activities(
        rows,
        events.start[rows],
        events.end[rows],
        launch_times(events, rows),
        is_communication_kernel(events, rows),
        is_memory,
        True,
    )


def is_communication_kernel(events: EventTable, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Mask:
    """Whether a device activity is communication: by its metadata, its name, or the stream that it runs on."""
    is_kernel = events.kind[rows] == Kind.KERNEL
    found: Mask = events.named(COMMUNICATION_NAMES)[rows] & is_kernel
    with_metadata = [row for row, args in events.collectives.items() if args.collective]
    found |= np.isin(rows, with_metadata) & is_kernel
    seconds = events.duration[rows]
    stream = events.thread[rows]
    length = len(events.threads)
    total = np.bincount(stream, seconds * is_kernel, length)
    named = np.bincount(stream, seconds * found, length)
    serves_communication: Mask = named > COMMUNICATION_STREAM * total
    found |= is_kernel & serves_communication[stream]
    return found


def launch_times(events: EventTable, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Floats:
    """When the runtime call with the same correlation began, for each device activity; NaN if there is none."""
    calls = np.flatnonzero((events.kind == Kind.RUNTIME) & (events.correlation >= 0))
    if not len(calls):
        return np.full(len(rows), np.nan)
    calls = calls[np.argsort(events.correlation[calls], kind="stable")]
    known = events.correlation[calls]
    position = np.minimum(np.searchsorted(known, events.correlation[rows]), len(known) - 1)
    return np.where(known[position] == events.correlation[rows], events.start[calls[position]], np.nan)


def host_activities(trace: KinetoTrace) -> Activities:
    """The operators of the host as compute, and its collectives, for a trace without a device.

    Operators inside a loader make samples, and those that start a collective or wait for one do not compute.
    """
    events = trace.events
    is_collective = events.named(HOST_COMMUNICATION)
    is_compute = (events.kind == Kind.OPERATOR) & ~events.named(f"{LOADER}|{HOST_BLOCKED}|^ProfilerStep|^autograd::")
    is_compute &= ~trace.host(LOADER).contains(events.start)
    rows = np.flatnonzero(is_collective | is_compute)
    rows = rows[np.argsort(events.start[rows], kind="stable")]
    start, end = events.start[rows], events.end[rows]
    return Activities(rows, start, end, start, is_collective[rows], np.zeros(len(rows), bool), False)
