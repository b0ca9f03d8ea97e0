"""The catalogue of incidents: every class, and every fix that an answer can name. Torch-free.

A new class is one row in a table of classes and the function that draws it.
"""

from __future__ import annotations

from meshwright_practice.incidents.classes.broken import BROKEN_CLASSES
from meshwright_practice.incidents.classes.slow import SLOW_CLASSES
from meshwright_practice.incidents.classes.wrong import WRONG_CLASSES
from meshwright_practice.incidents.incident import IncidentClass

CLASSES: dict[str, IncidentClass] = {kind.name: kind for kind in (*SLOW_CLASSES, *BROKEN_CLASSES, *WRONG_CLASSES)}
"""Name -> class."""

FIXES = {
    "replace-host": "take the host of the rank out of service, or give the job another one",
    "faster-input": "make the input faster: more loader workers, decoding ahead of time, faster storage",
    "more-micro-batches": "use more and smaller micro-batches, an interleaved schedule, or fewer stages",
    "asynchronous-saves": "save asynchronously, less often, or to a faster disk",
    "find-the-stack": "read the stack of the rank, and make all ranks call the same collectives",
    "replay-the-step": "run the step again in detail, and look at its samples and module outputs",
    "release-references": "find what keeps tensors alive on that rank, and release it",
    "check-the-host": "look at the log of the kernel and the scheduler on the host of the rank",
    "keep-checkpoints": "let the job alone delete checkpoints, and keep more of them",
    "check-the-storage": "check the storage that returned other bytes, and verify the other checkpoints",
    "restore-settings": "restore the setting, or continue on a new timeline on purpose",
    "token-normalisation": "return the sum over valid tokens, and divide once by their global count",
    "smaller-learning-rate": "lower the learning rate, or warm up for longer",
    "larger-buckets": "use larger gradient buckets, or overlap communication with the backward pass",
}
"""Fix -> what it does. The last ones are right for none of the classes."""
