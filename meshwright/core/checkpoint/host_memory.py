"""The host memory into which a checkpoint is staged, and the CUDA stream that copies beside the training step."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from meshwright.errors import CheckpointError

TOUCH_BYTES = 1 << 28
"""Bytes whose pages one thread allocates at a time."""
TOUCH_THREADS = 8
PORTABLE = 1
"""cudaHostRegisterPortable: the pages are locked for every CUDA context of the process."""


class HostMemory:
    """One allocation of host memory. For a CUDA device a thread allocates and locks its pages; `wait` returns when that
    is done. torch's own pinned allocator would round up to a power of two, and take half a second per GiB.
    """

    def __init__(self, size: int, device: torch.device | None) -> None:
        pages = -(-max(1, size) // mmap.PAGESIZE)
        mapping = mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self.locked: Future[None] | None = None
        if device is not None:
            with suppress(AttributeError, OSError):  # not every system has huge pages, which take a tenth of the time
                mapping.madvise(mmap.MADV_HUGEPAGE)
            with suppress(AttributeError, OSError):  # a fork would copy locked pages at once
                mapping.madvise(mmap.MADV_DONTFORK)
            thread = ThreadPoolExecutor(1, thread_name_prefix="host-memory")
            self.locked = thread.submit(lock_pages, self.bytes, device)
            thread.shutdown(wait=False)
            weakref.finalize(self, unlock_pages, self.bytes, self.locked).atexit = False

    def ready(self) -> bool:
        """Whether `wait` returns at once."""
        return self.locked is None or self.locked.done()

    def wait(self) -> None:
        if self.locked is not None:
            self.locked.result()


def lock_pages(memory: Tensor, device: torch.device) -> None:
    """Allocate the pages on several threads, then lock them."""
    with ThreadPoolExecutor(TOUCH_THREADS) as threads:
        list(threads.map(lambda part: part[:: mmap.PAGESIZE].zero_(), memory.split(TOUCH_BYTES)))
    torch.cuda.set_device(device)
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE))
    if error:
        raise CheckpointError(
            f"{memory.nbytes:,} bytes of host memory, into which checkpoints are staged, cannot be locked: CUDA error "
            f"{error}",
            'try a host with more memory, or checkpoint.mode = "off"',
        )


def unlock_pages(memory: Tensor, locked: Future[None]) -> None:
    """Unlock pages before their memory is returned to the system, or the driver would keep them."""
    if locked.exception() is None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class CopyStream:
    """A CUDA stream whose copies run beside the next forward and backward pass of the current stream.

    All streams of a process queue copies to the host in one hardware queue, and CUDA queues an event of a stream behind
    the last operation of the stream. A step ends with a small copy to the host, so that the first event of the next
    step would wait for all copies of this stream, and the step with it, unless a kernel precedes the event.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.kernels = torch.zeros((), device=device)
        """Incremented by a kernel of the current stream."""
        self.copied, self.blocked, self.released = (torch.cuda.Event(enable_timing=True) for _ in range(3))

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Within the context work is queued on this stream, behind the work that the current stream has by now."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield
            self.copied.record()
        self.kernels.add_(1)

    def block_current(self) -> None:
        """Make the current stream wait for the copies; the host does not wait."""
        current = torch.cuda.current_stream(self.device)
        self.blocked.record(current)
        current.wait_event(self.copied)
        self.released.record(current)

    def blocked_seconds(self) -> float:
        """How long the copies have blocked the current stream; 0 while that is not known."""
        return float(self.blocked.elapsed_time(self.released)) / 1e3 if self.released.query() else 0.0

    def synchronize(self) -> None:
        self.copied.synchronize()
