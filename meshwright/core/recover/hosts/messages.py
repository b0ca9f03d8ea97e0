"""The messages between the supervisors of a job: JSON objects with known fields of known types. Torch-free."""

from __future__ import annotations

import json
from typing import Any

from meshwright.base.topology.placement import HostPlacement
from meshwright.core.channel import ChannelError

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 4 << 20

FIELDS: dict[str, dict[str, type]] = {
    # From a member to the leader.
    "join": {"host": str, "token": str, "address": str, "control_port": int, "port": int, "attempt": int},
    "beat": {"number": int, "attempt": int, "ranks": dict, "port": int},
    "ended": {"attempt": int, "outcome": dict},
    "signal": {"signal": int},
    # From the leader to a member.
    "welcome": {"attempt": int},
    "refuse": {"reason": str},
    "acknowledge": {"number": int},
    "start": {"attempt": int, "restart": int, "placement": dict},
    "stop": {"attempt": int, "signal": int},
    "kill": {"attempt": int},
    "kill_rank": {"attempt": int, "rank": int},
    "exit": {"exit_code": int, "reason": str, "summary": dict},
}
"""The fields of each kind of message."""


def acknowledgement(beat: Message) -> Message:
    """What the leader answers to a beat as soon as it arrives, however busy it is."""
    return {"kind": "acknowledge", "number": beat["number"]}


def encode_message(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def decode_message(raw: bytes) -> Message:
    """The message of a frame. Raises ChannelError unless it is one of FIELDS, with exactly its fields."""
    try:
        message = json.loads(raw)
        fields = FIELDS[message["kind"]]
        valid = message.keys() == {"kind", *fields} and all(
            type(message[name]) is kind for name, kind in fields.items()
        )
        if message["kind"] == "start":
            HostPlacement.from_json(message["placement"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise ChannelError("a message is not valid")
    return dict(message)
