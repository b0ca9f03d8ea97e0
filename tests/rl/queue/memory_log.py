"""A rollout log in memory, which can damage a record, fail an append, and lose the answer to one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.errors import DataError
from meshwright.rl.log.interface import DamagedRecord, LogPosition, LogRecord


class MemoryLog:
    """Every segment has three records, so that positions change their segment often."""

    def __init__(self) -> None:
        self.payloads: list[bytes | None] = []
        self.fail_next = False
        self.lose_next_answer = False
        self.cut: tuple[DamagedRecord, ...] = ()

    def append(self, payloads: Sequence[bytes]) -> list[LogPosition]:
        if self.fail_next:
            self.fail_next = False
            raise OSError(28, "No space left on device")
        first = len(self.payloads)
        self.payloads += payloads
        if self.lose_next_answer:
            self.lose_next_answer = False
            raise TimeoutError("no answer")
        return [self.position(index) for index in range(first, len(self.payloads))]

    def position(self, index: int) -> LogPosition:
        return LogPosition(index // 3 + 1, index % 3 * 100)

    def damage(self, position: LogPosition) -> None:
        self.payloads[self.index(position)] = None

    def index(self, position: LogPosition) -> int:
        return (position.segment - 1) * 3 + position.offset // 100

    def read(self, position: LogPosition) -> bytes:
        index = self.index(position)
        payload = self.payloads[index] if index < len(self.payloads) else None
        if payload is None:
            raise DataError(f"rollout log, {position}: damaged")
        return payload

    def scan(self, start: LogPosition | None = None) -> Iterator[LogRecord | DamagedRecord]:
        first = self.index(start) if start else 0
        if first > len(self.payloads):
            raise DataError("the rollout log ends before the cursor")
        for index, payload in list(enumerate(self.payloads))[first:]:
            position = self.position(index)
            yield DamagedRecord(position, 100, "damaged") if payload is None else LogRecord(position, payload)

    @property
    def end(self) -> LogPosition:
        return self.position(len(self.payloads))

    def close(self) -> None: ...
