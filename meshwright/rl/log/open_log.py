"""Opens the rollout log of a run, in its folder or in its object store. Torch-free."""

from __future__ import annotations

from meshwright.base.checkpoint.listing import open_run_store
from meshwright.base.records.run_folder import RunFolder
from meshwright.rl.log.interface import RolloutLog, RolloutReader
from meshwright.rl.log.object_log import ObjectRolloutLog, ObjectRolloutReader
from meshwright.rl.log.posix_log import PosixRolloutLog, PosixRolloutReader

ROLLOUTS_FOLDER = "rollouts"


def open_rollout_log(folder: RunFolder, run_id: str, segment_bytes: int) -> RolloutLog:
    """Open the log for appending. A torn tail is cut to the last whole record, and `cut` reports it.

    Args:
        folder: the run folder, which exists.
        run_id: id of the run. A log of another run is refused.
        segment_bytes: size of a file after which the next one begins. In an object store every append is an object.

    Raises:
        BusyError: another process appends to the log.
        DataError: a file of the log belongs to another run, has a newer format, or is no rollout log.
        ConfigError: the folder cannot be written.
    """
    if folder.url:
        return ObjectRolloutLog(open_run_store(folder), ROLLOUTS_FOLDER, run_id)
    return PosixRolloutLog(folder.root / ROLLOUTS_FOLDER, run_id, segment_bytes)


def open_rollout_reader(folder: RunFolder, run_id: str) -> RolloutReader:
    """Open the log for reading, also while another process appends to it, and also before it exists."""
    if folder.url:
        return ObjectRolloutReader(open_run_store(folder), ROLLOUTS_FOLDER, run_id)
    return PosixRolloutReader(folder.root / ROLLOUTS_FOLDER, run_id)
