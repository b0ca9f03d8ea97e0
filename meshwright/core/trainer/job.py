"""A job: what every rank of a run receives from the launcher, and the observer of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from signal import Signals
from typing import TYPE_CHECKING, Any

from meshwright.base.block_sizes import BLOCK_SIZES, BlockSizes
from meshwright.base.config import Batch, RunConfig
from meshwright.base.config.device_defaults import is_resolved
from meshwright.base.environment import stop_signals
from meshwright.base.records.events import Event
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store.interface import Store
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.placement import HostPlacement
from meshwright.core.channel import read_secret
from meshwright.core.data.loader import MicroBatch
from meshwright.core.data.source import Source
from meshwright.core.optim.user_update import NO_USER_UPDATE, UserUpdate
from meshwright.core.store.memory.client import KeeperAddress
from meshwright.core.store.memory.peer_store import PeerMemoryStore
from meshwright.core.trainer.callbacks.callback import Callback
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.weights.initial import InitialWeights
from meshwright.rl.service.service import RolloutService

if TYPE_CHECKING:
    from meshwright.core.trainer.records.plan_recorder import Predictor
    from meshwright.core.trainer.step import StepOutcome


class TrainingObserver:
    """Is called by the loop of every rank and may not change anything. This one ignores every call."""

    def on_start(self, training: Any) -> None:
        """The state is initialized or restored; no step of this attempt has run."""

    def on_gradient(self, step: int, batches: list[MicroBatch]) -> None:
        """The parameters have the gradients of a step, summed over ranks and times the loss scale."""

    def on_step(self, outcome: StepOutcome) -> None:
        """A step is complete."""

    def on_evaluation(self, step: int, loss: float, tokens: int) -> None:
        """An evaluation after a step is complete."""


@dataclass(frozen=True)
class Job:
    """What every rank of a run receives from the launcher."""

    config: RunConfig
    """the settings, with a value for each that depends on the device"""
    batch: Batch
    layout: Layout
    sources: list[Source]
    folder: RunFolder
    attempt: int = 0
    restart: int = 0
    """how many times this job was restarted; injected faults use it to strike once"""
    fork: int = 0
    """0, or for a job that starts a new timeline its first attempt, so that its restarts stay on that timeline"""
    fallback: bool = True
    """whether an older checkpoint is used where the newest is damaged"""
    supervised: bool = True
    """whether Meshwright's supervisor watches the ranks; under torchrun it does not"""
    custom: CustomModel | None = None
    """a custom model; None is the model of the config"""
    weights: InitialWeights | None = None
    """the initial weights of a run with `init_from`; None: they are initialized from the seed"""
    accept_code: bool = False
    """whether the run continues although the code of its custom model changed"""
    cluster: str | None = None
    """the cluster that the step time is predicted for; by default this machine, if it was measured"""
    predictor: Predictor | None = None
    """predicts the run; None: nothing is predicted"""
    listener: Callable[[Event], None] | None = None
    block_sizes: BlockSizes = BLOCK_SIZES
    first_step: int = 0
    """the step at which a run without a checkpoint starts; `prove` starts late in a run to see its last steps"""
    observer: TrainingObserver = field(default_factory=TrainingObserver)
    """sees every step on every rank"""
    store: Store | None = None
    """where its checkpoints are; None: in its folder. A replay reads those of another folder"""
    callbacks: tuple[Callback, ...] = ()
    update: UserUpdate = NO_USER_UPDATE
    rollouts: RolloutService | None = None
    """the rollout service of a run with rl.objective"""
    placement: HostPlacement | None = None
    """which ranks run on which host, in a job on several hosts"""
    given: RunConfig | None = None
    """the settings as the user gave them, which run.toml keeps; None: those of `config`"""
    stop_signals: tuple[Signals, ...] = field(default_factory=stop_signals)
    """those of the process that makes the job: a rank ignores all signals before it trains"""

    def __post_init__(self) -> None:
        assert is_resolved(self.config), "the config of a job has the defaults of its device (with_device_defaults)"

    def as_attempt(self, attempt: int, restart: int, fork: bool) -> Job:
        """Returns this job as its next attempt. A fork is identified by the job's first attempt, so it happens once."""
        return replace(self, attempt=attempt, restart=restart, fork=attempt - restart if fork else 0)


def open_peer_memory(job: Job) -> PeerMemoryStore | None:
    """The memory of the hosts of a job that makes snapshots; None if it makes none."""
    placement, checkpoint = job.placement, job.config.checkpoint
    if placement is None or not checkpoint.memory_every or checkpoint.mode == "off":
        return None
    addresses = zip(placement.hosts, placement.addresses, placement.control_ports, strict=True)
    keepers = [KeeperAddress(*address) for address in addresses]
    return PeerMemoryStore(keepers, placement.index, job.attempt, read_secret())
