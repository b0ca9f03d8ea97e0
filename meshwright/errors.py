"""One family of errors: each says what happened, where, and what to do next, and carries its exit code."""

from __future__ import annotations


class MeshwrightError(Exception):
    """The family. A subclass fixes the exit code; the message is one line."""

    exit_code = 1

    def __init__(self, what: str, next_move: str = "") -> None:
        self.what = what
        self.next_move = next_move
        super().__init__(what, next_move)

    def __str__(self) -> str:
        return f"{self.what}; {self.next_move}" if self.next_move else self.what


class ConfigError(MeshwrightError):
    """A key, a value or a size that cannot be."""

    exit_code = 2


class IdentityError(MeshwrightError):
    """The run folder or a peer holds another run than the one asked for."""

    exit_code = 3


class CheckpointError(MeshwrightError):
    """No intact checkpoint to go on from, or none can be written."""

    exit_code = 4


class RestartsExhausted(MeshwrightError):
    """The job failed, was restarted as often as allowed, and got no further."""

    exit_code = 5


class DataError(MeshwrightError):
    """The sample stream cannot keep its contract."""

    exit_code = 6


class NumericsError(MeshwrightError):
    """A loss or gradient is not finite and the policy is to stop."""

    exit_code = 7


class PeerError(MeshwrightError):
    """Another rank failed, never came, or differs; this rank is only the messenger."""

    exit_code = 8


PEER_LOSS_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Connection refused",
    "Socket closed",
    "remote process exited",  # NCCL's words
    "NCCL communicator was aborted",
)


def is_peer_loss(error: BaseException) -> bool:
    """Whether a rank says no more than that another one left, in the words of Gloo or NCCL. It is a witness, never the
    cause.
    """
    text = str(error)
    from_torch = type(error).__name__.startswith("Dist") or any(
        name in text.lower() for name in ("gloo", "nccl", "c10d")
    )
    return not isinstance(error, MeshwrightError) and from_torch and any(sign in text for sign in PEER_LOSS_MESSAGES)


class BusyError(MeshwrightError):
    """Another job holds the run folder."""

    exit_code = 9


class StoppedBySignal(MeshwrightError):
    """A signal asked the run to end, and every rank ended at the same step."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped by signal {signal_number} before step {step}, on every rank")
        self.exit_code = 128 + signal_number
        self.args = (signal_number, step)  # so that it survives the trip from a rank to its launcher


class StoppedBeforeStart(MeshwrightError):
    """A signal came before there were ranks to tell."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(
            f"stopped by signal {signal_number} before step 1 of this launch; checkpoints are as they were"
        )
        self.exit_code = 128 + signal_number


class KilledBySignal(MeshwrightError):
    """A second signal ended the ranks where they stood."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"a second signal {signal_number}: the ranks were killed where they stood")
        self.exit_code = 128 + signal_number
