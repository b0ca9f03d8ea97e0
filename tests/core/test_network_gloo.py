"""A test of Gloo between hosts that are made of network namespaces."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

from tests.kit.network_hosts import NetworkHosts, require_network_hosts

RANK = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist

rank, address = int(sys.argv[1]), sys.argv[2]
store = dist.TCPStore(address, 29500, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
step = 0
while True:
    step += 1
    values = torch.full((1000,), rank + 1.0)
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=60 if step == 1 else 2)
    try:
        dist.group.WORLD.allreduce([values], options).wait()
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(7)  # the store's end would wait for its peers
    assert values.eq(3).all()
    if step == 1:
        print("reduced", flush=True)
        sys.stdin.readline()
"""


def test_gloo_reduces_between_hosts_and_every_rank_times_out_in_a_partition():
    require_network_hosts()
    with NetworkHosts(2, resolves_names=False) as network, ExitStack() as ranks:
        processes = [
            ranks.enter_context(
                host.run(
                    [sys.executable, "-c", RANK, str(host.index), network[0].address],
                    env={"GLOO_SOCKET_IFNAME": host.interface},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for host in network
        ]
        ranks.callback(network.close)  # ends ranks that a failure has left, before they are waited for
        assert [process.stdout.readline() for process in processes] == ["reduced\n"] * 2
        network.partition(*network)
        outputs = [process.communicate("\n", timeout=60)[0] for process in processes]
        assert [process.returncode for process in processes] == [7, 7], outputs
        assert all("Timed out waiting 2000ms" in output for output in outputs), outputs
