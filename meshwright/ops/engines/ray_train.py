"""Ray Train: a trainer whose workers are the ranks of a run, as torchrun's processes are. Needs the extra `engines`.

    from meshwright.ops.engines.ray_train import make_trainer

    result = make_trainer("run.toml", "/shared/runs/one", num_workers=8, max_failures=3).fit()

Ray Train starts the workers, and starts all of them again if one fails; the run then resumes from its newest
checkpoint. Every worker runs its rank in a child process, because a rank handles signals in its main thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer

from meshwright.base.environment import start_python
from meshwright.base.parent_death import exit_with_parent
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.ops.engines.engine_job import absolute_path
from meshwright.ops.engines.exit_codes import MEANINGS


class RankBackend(Backend):  # type: ignore[misc]
    """Tells the workers where rank 0 serves the store; the ranks form the process group themselves."""

    def on_start(self, worker_group: Any, _backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, address_and_port)
        worker_group.execute(set_master, address, port)


class RankConfig(TorchConfig):  # type: ignore[misc]
    """Configures Ray Train for workers that form the process group themselves."""

    @property
    def backend_cls(self) -> type[RankBackend]:
        return RankBackend


def address_and_port() -> tuple[str, int]:
    """The address of this worker's node, and a port that is free there at the moment."""
    import socket

    address = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((address, 0))
        return address, int(probe.getsockname()[1])


def set_master(address: str, port: int) -> None:
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))


def train_worker(settings: dict[str, Any]) -> None:
    """Trains as one rank; the function that Ray Train runs on every worker."""
    context = ray.train.get_context()
    environment = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
    }
    parent = os.getpid()
    arguments = "train", settings["run_file"], "--run", settings["run"], *settings["options"]
    variables = os.environ | {name: str(value) for name, value in environment.items()}
    process = start_python("meshwright", *arguments, env=variables, preexec_fn=lambda: exit_with_parent(parent))
    try:
        code = process.wait()
    except BaseException:  # Ray ends the worker's task, and the process may go on
        process.kill()
        raise
    if code:
        code = code if code > 0 else 128 - code
        raise RuntimeError(
            f"rank {context.get_world_rank()} ended with exit code {code} ({MEANINGS.get(code, 'killed')})"
        )
    ends = [event for event in read_events(RunFolder(Path(settings["run"])).events(0)) if event["kind"] == "end"]
    ray.train.report({"digest": ends[-1]["parameters_digest"]} if ends else {})


def make_trainer(
    run_file: str | Path,
    run: str | Path,
    num_workers: int,
    *,
    use_gpu: bool = False,
    max_failures: int = 3,
    options: Sequence[str] = (),
    storage: str | Path | None = None,
) -> Any:
    """Makes a TorchTrainer for a run.

    Args:
        run_file: the run file, on a file system that all nodes share.
        run: the run folder, also shared. Checkpoints are in it: Ray Train stores none.
        num_workers: the ranks of the layout.
        use_gpu: one GPU per worker.
        max_failures: how often Ray Train starts the workers again.
        options: options of `meshwright train`, such as ``"--optimizer.lr=3e-4"``.
        storage: the folder of Ray Train's own records. Default: Ray's.
    """
    settings = {"run_file": str(absolute_path(run_file)), "run": str(absolute_path(run)), "options": list(options)}
    return TorchTrainer(
        train_worker,
        train_loop_config=settings,
        torch_config=RankConfig(),
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers, use_gpu=use_gpu),
        run_config=ray.train.RunConfig(
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
            storage_path=str(storage) if storage is not None else None,
        ),
    )
