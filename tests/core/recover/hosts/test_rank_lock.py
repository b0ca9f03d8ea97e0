"""The lock that the ranks of a host hold: it is free only when the last process that inherited it has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from meshwright.core.recover.hosts.rank_lock import is_free, lock_path

HOLD = """
import os, sys, time
from pathlib import Path
from meshwright.core.recover.hosts.rank_lock import hold_lock
hold_lock(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


def test_lock_is_held_by_forked_ranks_after_their_fork_server_was_killed(tmp_path):
    path = tmp_path / "lock"
    assert is_free(path)
    server = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    rank = int(server.stdout.readline())
    try:
        assert not is_free(path)
        server.kill()
        server.wait()
        assert not is_free(path)
    finally:
        os.kill(rank, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not is_free(path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert is_free(path)


def test_hosts_and_runs_have_locks_of_their_own(tmp_path):
    paths = {lock_path(tmp_path / run, host) for run in ("one", "two") for host in "ab"}
    assert len(paths) == 4
