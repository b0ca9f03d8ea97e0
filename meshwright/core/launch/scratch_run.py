"""A job in a temporary folder that begins at a checkpoint of a run; the folder of the run is only read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from meshwright.base.checkpoint.listing import CHECKPOINTS_FOLDER, CheckpointEntry
from meshwright.base.config import RunConfig, TrackersConfig
from meshwright.base.io import write_json
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.scratch_folder import ScratchFolder, remove_stale_folders
from meshwright.base.store.posix import PosixStore
from meshwright.base.user_code.user_code import NO_USER_CODE, UserCode
from meshwright.core.launch.job import make_job
from meshwright.core.trainer.identity import read_identity
from meshwright.core.trainer.job import Job


class SingleCheckpointStore(PosixStore):
    """The files of a run folder, of whose checkpoints one or none is listed."""

    def __init__(self, run: RunFolder, checkpoint: CheckpointEntry | None) -> None:
        super().__init__(run.root)
        self.checkpoint = checkpoint.name if checkpoint is not None else ""

    def list_names(self, folder: str) -> list[str]:
        if folder == CHECKPOINTS_FOLDER:
            return [self.checkpoint] if self.checkpoint else []
        return super().list_names(folder) if folder.startswith(f"{CHECKPOINTS_FOLDER}/") else []


@contextmanager
def scratch_job(
    config: RunConfig, run: RunFolder, checkpoint: CheckpointEntry | None, user: UserCode = NO_USER_CODE
) -> Iterator[Job]:
    """The job of a run in a temporary folder that exists until the context ends, also by Ctrl-C. It begins at the
    checkpoint, or without one at its initial state, saves no checkpoints, and calls no callbacks and no trackers.
    """
    checkpoints = replace(config.checkpoint, mode="off")
    job = make_job(replace(config, checkpoint=checkpoints, trackers=TrackersConfig()), run, user, accept_code=True)
    remove_stale_folders()
    scratch = ScratchFolder()
    try:
        folder = RunFolder(scratch.path / "run")
        folder.root.mkdir()
        record = read_identity(run)
        record["identity"]["steps"] = config.steps
        write_json(folder.identity_file, record)
        yield replace(job, folder=folder, store=SingleCheckpointStore(run, checkpoint), callbacks=(), attempt=1)
    finally:
        scratch.remove()
