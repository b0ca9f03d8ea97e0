"""Hosts on one machine: network namespaces on a switch, with faults on the links between them."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.kit.host_namespaces import (
    NetworkCommandError,
    continue_processes,
    enter,
    folder_of,
    ip,
    ip_batch,
    is_in_namespace,
    kill_processes,
    processes_in,
    remove_namespace,
    remove_stale,
    replace_drop_rules,
    require_network_hosts,
    run_command,
    socket_in,
    stop_processes,
    token_bucket,
    unique_name,
)

__all__ = ["Host", "NetworkCommandError", "NetworkHosts", "remove_stale", "require_network_hosts"]

RELAY = Path(__file__).with_name("network_relay.py")
INTERFACE = "eth0"
"""The interface of every host, each in its own namespace."""
START_TIMEOUT = 30.0
BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Host:
    """One host: an address, a host name and a boot id of its own, and the processes that run there."""

    def __init__(self, network: NetworkHosts, index: int) -> None:
        self.network = network
        self.index = index
        self.name = f"host{index}"
        self.address = f"10.77.{network.subnet}.{index + 1}"
        self.interface = INTERFACE
        self.namespace = f"{network.name}-{index}"
        self.port = f"port{index}"
        self.mac = f"02:4d:57:00:00:{index + 1:02x}"
        self.mbit: float | None = None
        self.is_on = False
        self.started: list[subprocess.Popen[Any]] = []

    def __repr__(self) -> str:
        return f"{self.name} ({self.address})"

    def run(self, args: Sequence[str | Path], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen:
        """Starts a process on this host. `env` is added to the environment; `options` are those of `Popen`.

        The process reads the boot id of this host. Code that checks the processes of its own boot by their ids, as the
        lease does, must not do so with those of other hosts, although it could here.
        """
        if not self.is_on:
            raise RuntimeError(f"{self.name} is powered off; call power_on() first")
        folder = self.network.folder
        files = {folder / "hosts": "/etc/hosts", folder / f"boot-{self.name}": BOOT_ID}
        names = {"MESHWRIGHT_HOST_NAME": self.name, "MESHWRIGHT_HOST_ADDRESS": self.address}
        process = subprocess.Popen(
            [*enter(self.namespace, self.name, files), *map(str, args)],
            env={**os.environ, **names, **(env or {})},
            **options,
        )
        self.started.append(process)
        # Whoever ends all processes of this host next must find this one.
        deadline = time.monotonic() + START_TIMEOUT
        while process.poll() is None and not is_in_namespace(process.pid, self.namespace):
            if time.monotonic() > deadline:
                raise NetworkCommandError(f"a process did not enter {self.namespace} within {START_TIMEOUT:g} s")
            time.sleep(0.001)
        return process

    def output(self, args: Sequence[str | Path], timeout: float = 30.0, **options: Any) -> str:
        """Runs a process to its end and returns what it prints; raises `CalledProcessError` if it fails."""
        with self.run(args, stdout=subprocess.PIPE, text=True, **options) as process:
            try:
                text, _ = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args, text)
        return text

    def socket(self, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """A socket of the test itself on this host: a test needs no further process to exchange a few bytes."""
        return socket_in(self.namespace, socket.AF_INET, kind)

    def processes(self) -> list[int]:
        return processes_in(self.namespace) if self.is_on else []

    def kill(self) -> None:
        """Ends all processes by SIGKILL. The kernel lives and closes their connections, which peers notice at once."""
        kill_processes(self.namespace)
        self.reap()

    def stop(self) -> None:
        """Stops all processes by SIGSTOP. Their connections stay open."""
        stop_processes(self.namespace)

    def resume(self) -> None:
        """Continues the processes that `stop` has stopped."""
        continue_processes(self.namespace)

    def power_off(self) -> None:
        """Ends this host without a last word: no process reacts, and no kernel closes a connection."""
        if self.is_on:
            stop_processes(self.namespace)
            ip("-n", self.network.switch, "link", "delete", self.port)
            self.remove()

    def power_on(self) -> None:
        """Boots this host again, with its address, under a new boot id and without processes."""
        if not self.is_on:
            self.create()
            self.network.apply_faults()

    def create(self) -> None:
        (self.network.folder / f"boot-{self.name}").write_text(f"{uuid.uuid4()}\n")
        self.is_on = True  # before anything is made, so that whatever interrupts this, everything is removed
        ip("netns", "add", self.namespace)
        switch = self.network.switch
        ip_batch(
            self.namespace,
            "link set lo up",
            f"link add {INTERFACE} address {self.mac} type veth peer name {self.port} netns {switch}",
            f"link set {INTERFACE} addrgenmode none",
            f"address add {self.address}/24 dev {INTERFACE}",
            f"link set {INTERFACE} up",
        )
        ip_batch(switch, f"link set {self.port} addrgenmode none", f"link set {self.port} master switch up")
        if self.mbit is not None:
            self.change_queue("add", *token_bucket(self.mbit))

    def limit(self, mbit: float | None) -> None:
        had_limit, self.mbit = self.mbit is not None, mbit
        if self.is_on and mbit is not None:
            self.change_queue("replace", *token_bucket(mbit))
        elif self.is_on and had_limit:
            self.change_queue("delete")

    def change_queue(self, action: str, *options: str) -> None:
        for namespace, interface in ((self.namespace, INTERFACE), (self.network.switch, self.port)):
            run_command("tc", "-n", namespace, "qdisc", action, "dev", interface, "root", *options)

    def remove(self) -> None:
        remove_namespace(self.namespace)
        self.is_on = False
        self.reap()

    def reap(self) -> None:
        for process in self.started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)


@dataclass(frozen=True)
class Degradation:
    """What a link does to frames: seconds of delay, and the probability that one is lost."""

    delay: float
    loss: float
    seed: int


Hosts = Host | Iterable[Host]
Pair = tuple[Host, Host]


class NetworkHosts:
    """Hosts that reach each other and nothing else, while the context is open.

    Each host is a network namespace with a link to a switch, which is a namespace of its own: nothing is added to the
    namespace of the test, and several networks do not see each other. Faults are rules of the switch, so that they also
    affect connections that exist. Methods that take hosts take one or several of them.

    With `resolves_names` the names of all hosts are in /etc/hosts. Without it, as in many containers, a host cannot
    even resolve its own name.
    """

    def __init__(self, count: int, resolves_names: bool = True) -> None:
        if not 1 <= count <= 200:
            raise ValueError(f"count: expected 1 to 200 hosts, found {count}")
        self.resolves_names = resolves_names
        self.name = unique_name()
        self.switch = f"{self.name}-switch"
        self.folder = folder_of(self.name)
        # Random, so that a test with a fixed address fails early.
        self.subnet = random.SystemRandom().randrange(1, 255)
        self.hosts = [Host(self, index) for index in range(count)]
        self.cuts: set[Pair] = set()
        self.degraded: dict[Pair, Degradation] = {}
        self.relayed: set[Pair] = set()
        self.relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> NetworkHosts:
        remove_stale()
        try:
            self.folder.mkdir(mode=0o755)
            named = self.hosts if self.resolves_names else []
            names = "".join(f"{host.address} {host.name}\n" for host in named)
            (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
            ip("netns", "add", self.switch)
            ip_batch(self.switch, "link add switch type bridge", "link set switch addrgenmode none up")
            for host in self.hosts:
                host.create()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = self.relay is not None and self.relay.poll() is not None
        self.close()
        if failed and error is None:
            raise NetworkCommandError("the process that delays frames ended before the network was closed")

    def __iter__(self):
        return iter(self.hosts)

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def close(self) -> None:
        """Ends all processes of all hosts and removes every trace of them, also if one removal fails."""
        with ExitStack() as removals:  # runs all of them, also after a failure or an interrupt of one
            removals.callback(shutil.rmtree, self.folder, ignore_errors=True)
            removals.callback(self.remove_switch)
            for host in self.hosts:
                if host.is_on:
                    removals.callback(host.remove)

    def remove_switch(self) -> None:
        remove_namespace(self.switch)
        if self.relay is not None:
            self.relay.communicate()
            self.relay = None

    def partition(self, first: Hosts, second: Hosts) -> None:
        """Drops everything between two hosts or groups of hosts, in both directions."""
        self.cuts |= {*pairs(first, second), *pairs(second, first)}
        self.apply_faults()

    def cut(self, sources: Hosts, targets: Hosts) -> None:
        """Drops what goes from sources to targets; the other direction is as before."""
        self.cuts |= set(pairs(sources, targets))
        self.apply_faults()

    def isolate(self, host: Host) -> None:
        """Drops everything between a host and all others."""
        self.partition(host, [other for other in self.hosts if other is not host])

    def degrade(self, sources: Hosts, targets: Hosts, delay: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        """Delays what goes from sources to targets by `delay` seconds and loses frames with probability `loss`.

        The other direction is as before. A frame of a bulk transfer contains up to 64 KiB: segmentation is offloaded.
        """
        if delay < 0 or not 0 <= loss <= 1:
            raise ValueError(f"expected delay >= 0 and 0 <= loss <= 1, found delay {delay} and loss {loss}")
        for pair in pairs(sources, targets):
            self.degraded[pair] = Degradation(delay, loss, seed)
        self.apply_faults()

    def heal(self) -> None:
        """Removes all cuts, delays and losses. Limits of hosts remain; hosts that are powered off remain so."""
        self.cuts.clear()
        self.degraded.clear()
        self.apply_faults()

    def limit(self, host: Host, mbit: float | None) -> None:
        """Limits what a host sends, and what it receives, to `mbit` per second each; None removes the limit."""
        if mbit is not None and mbit <= 0:
            raise ValueError(f"mbit: expected a positive rate or None, found {mbit}")
        host.limit(mbit)

    def apply_faults(self) -> None:
        """Makes the switch do what `cuts` and `degraded` say."""
        relayed = {
            pair: degradation
            for pair, degradation in self.degraded.items()
            if pair not in self.cuts and all(host.is_on for host in pair)
        }
        if relayed or self.relayed:
            # The bridge drops what the relay forwards. While one takes over, frames are lost, not doubled.
            self.drop({*self.cuts, *relayed, *self.relayed})
            self.configure_relay(relayed)
            self.relayed = set(relayed)
        self.drop({*self.cuts, *relayed})

    def drop(self, dropped: set[Pair]) -> None:
        replace_drop_rules(self.switch, sorted((source.port, target.port) for source, target in dropped))

    def configure_relay(self, relayed: dict[Pair, Degradation]) -> None:
        if self.relay is None:
            self.relay = subprocess.Popen(
                ["ip", "netns", "exec", self.switch, sys.executable, "-S", "-E", str(RELAY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for the test, which then closes the network
            )
        links = [
            {
                "source": source.port,
                "target": target.port,
                "target_mac": target.mac,
                "delay": degradation.delay,
                "loss": degradation.loss,
                "seed": f"{degradation.seed} {source.index} {target.index}",
            }
            for (source, target), degradation in relayed.items()
        ]
        assert self.relay.stdin is not None
        assert self.relay.stdout is not None
        with suppress(BrokenPipeError):
            self.relay.stdin.write(json.dumps(links) + "\n")
            self.relay.stdin.flush()
        if self.relay.stdout.readline() != "ready\n":
            raise NetworkCommandError("the process that delays frames did not accept its links; see its output above")


def as_hosts(hosts: Hosts) -> list[Host]:
    return [hosts] if isinstance(hosts, Host) else list(hosts)


def pairs(sources: Hosts, targets: Hosts) -> list[Pair]:
    return [(source, target) for source in as_hosts(sources) for target in as_hosts(targets) if source is not target]
