"""The rollout log of a run in an object store: a local S3 server, with faults."""

from __future__ import annotations

import pytest

from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store.mirror import make_mirror
from meshwright.errors import BusyError, DataError
from meshwright.rl.log.interface import LogRecord
from meshwright.rl.log.open_log import open_rollout_log, open_rollout_reader
from tests.base.store.fault_proxy import Fault


def test_rollout_log_in_an_object_store(proxy, url):
    folder = RunFolder(make_mirror(url))
    log = open_rollout_log(folder, "run-a", 1 << 20)
    payloads = [b"%d" % number * 100 for number in range(4)] + [b"long" * (1 << 19)]
    positions = log.append(payloads[:2])
    proxy.faults = [Fault("error", "PUT", times=2, status=503)]
    positions += log.append(payloads[2:])
    assert [position.segment for position in positions] == [1, 1, 2, 2, 2]
    reader = open_rollout_reader(folder, "run-a")
    assert list(reader.scan()) == [LogRecord(*pair) for pair in zip(positions, payloads, strict=True)]
    assert [reader.read(position) for position in positions] == payloads
    assert reader.end == log.end
    assert list(reader.scan(log.end)) == []
    assert not (folder.root / "rollouts").exists()

    second = open_rollout_log(folder, "run-a", 1 << 20)
    assert second.end == log.end
    second.append([b"of the second writer"])
    with pytest.raises(BusyError, match=rf"{url}/rollouts/00000003.log cannot be appended"):
        log.append([b"of the first writer"])
    with pytest.raises(DataError, match="another run"):
        open_rollout_log(folder, "run-b", 1 << 20)
