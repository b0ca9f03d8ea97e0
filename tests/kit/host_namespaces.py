"""Creates and removes network namespaces, and signals the processes in them."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from meshwright.base.records.heartbeat import process_stat

PREFIX = "meshwright-hosts"
NAMESPACES = Path("/run/netns")
COMMANDS = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "unshare": "util-linux", "mount": "mount"}
COMMANDS["hostname"] = "hostname"
COMMAND_TIMEOUT = 30.0
SIGNAL_TIMEOUT = 20.0
CLONE_NEWNET = 0x40000000


class NetworkCommandError(RuntimeError):
    """A command that changes the network failed."""


def require_network_hosts() -> None:
    """Skips the test where network namespaces cannot be used, and says what is missing."""
    if reason := missing_for_network_hosts():
        pytest.skip(f"hosts cannot be made of network namespaces: {reason}")


@cache
def missing_for_network_hosts() -> str:
    """Returns what this machine lacks; empty if it lacks nothing. The kernel is asked by doing what tests do."""
    if os.geteuid() != 0:
        return "root is required"
    missing = sorted({package for command, package in COMMANDS.items() if shutil.which(command) is None})
    if missing:
        return f"install {', '.join(missing)}"
    name = f"{unique_name()}-probe"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "switch", "type", "bridge")
        ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "port0")
        run_command("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *token_bucket(10.0))
        replace_drop_rules(name, [("port0", "port1")])
        run_command(*enter(name, "probe", {}), "true")
    except NetworkCommandError as error:
        return str(error)
    finally:
        remove_namespace(name)
    return ""


def run_command(*args: str, text: str = "") -> str:
    try:
        done = subprocess.run(args, input=text, capture_output=True, text=True, timeout=COMMAND_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise NetworkCommandError(f"{' '.join(args)}: no result within {COMMAND_TIMEOUT:g} s") from None
    if done.returncode:
        raise NetworkCommandError(f"{' '.join(args)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def ip(*args: str) -> str:
    return run_command("ip", *args)


def ip_batch(namespace: str, *lines: str) -> None:
    """Runs several commands of `ip` in a namespace by one process."""
    run_command("ip", "-n", namespace, "-batch", "-", text="\n".join(lines) + "\n")


def token_bucket(mbit: float) -> list[str]:
    """The options of a queue that passes `mbit` per second. A bucket must contain what passes between two ticks."""
    return [
        "tbf",
        "rate",
        f"{mbit * 1e6:.0f}bit",
        "burst",
        f"{max(16384, mbit * 1e6 / 8 / 100):.0f}",
        "latency",
        "100ms",
    ]


def replace_drop_rules(switch: str, pairs: list[tuple[str, str]]) -> None:
    """Makes the switch drop what enters at the first and leaves at the second port of a pair, and nothing else.

    ARP passes: otherwise a cut in one direction would also end the other one as soon as an address has to be resolved.
    """
    drops = "".join(f'iifname "{source}" oifname "{target}" drop\n' for source, target in pairs)
    chain = f"chain forward {{\n type filter hook forward priority 0;\n ether type arp accept\n {drops} }}"
    # One transaction: no packet passes between the old rules and the new ones.
    rules = f"table bridge faults {{}}\ndelete table bridge faults\ntable bridge faults {{\n {chain}\n}}\n"
    run_command("ip", "netns", "exec", switch, "nft", "-f", "-", text=rules)


def enter(namespace: str, host_name: str, files: dict[Path, str]) -> list[str]:
    """The command line that runs the arguments after it in a namespace, with a host name and files in place of others.

    `ip netns exec` makes a mount namespace, so that nobody else sees those files. Every step is an exec: the process
    that is started becomes the one of the arguments.
    """
    mounts = "".join(f"mount --bind '{source}' '{target}' && " for source, target in files.items())
    script = f'hostname "$0" && {mounts}exec "$@"'
    return ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", script, host_name]


def namespace_identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def is_in_namespace(pid: int, namespace: str) -> bool:
    identity = namespace_identity(NAMESPACES / namespace)
    return identity is not None and namespace_identity(Path(f"/proc/{pid}/ns/net")) == identity


def processes_in(namespace: str) -> list[int]:
    """The processes that run in a namespace. A zombie has left it."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and is_in_namespace(int(name), namespace)]


def signal_until(namespace: str, number: signal.Signals, settled: Callable[[int], bool]) -> None:
    """Sends a signal to all processes in a namespace, also those that are forked meanwhile, until all are settled."""
    deadline = time.monotonic() + SIGNAL_TIMEOUT
    while waiting := [pid for pid in processes_in(namespace) if not settled(pid)]:
        if time.monotonic() > deadline:
            raise NetworkCommandError(f"processes {waiting} in {namespace} did not react to {number.name}")
        for pid in waiting:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.002)


def kill_processes(namespace: str) -> None:
    signal_until(namespace, signal.SIGKILL, settled=lambda pid: False)


def stop_processes(namespace: str) -> None:
    signal_until(namespace, signal.SIGSTOP, settled=lambda pid: process_stat(pid).get("state") in ("T", "t", None))


def continue_processes(namespace: str) -> None:
    signal_until(namespace, signal.SIGCONT, settled=lambda pid: process_stat(pid).get("state") != "T")


def socket_in(namespace: str, family: int, kind: int) -> socket.socket:
    """Returns a socket of this process in another namespace. Only the thread that makes it enters the namespace."""
    made: list[socket.socket] = []
    failures: list[OSError] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            with open(NAMESPACES / namespace) as file:
                if libc.setns(file.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"setns of {namespace}")
            made.append(socket.socket(family, kind))
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return made[0]


def unique_name() -> str:
    """Names this process by its id and its start, since ids are reused, and one of its networks by random digits."""
    return f"{PREFIX}-{os.getpid()}-{process_stat(os.getpid())['start']}-{os.urandom(3).hex()}"


def folder_of(name: str) -> Path:
    return Path(tempfile.gettempdir()) / name


def namespaces() -> list[str]:
    return sorted(os.listdir(NAMESPACES)) if NAMESPACES.is_dir() else []


def remove_namespace(namespace: str) -> None:
    """Ends the processes of a namespace and removes it. One that somebody else has removed meanwhile is no error."""
    kill_processes(namespace)
    try:
        ip("netns", "delete", namespace)
    except NetworkCommandError:
        if namespace in namespaces():
            raise


def remove_stale() -> list[str]:
    """Removes the namespaces and folders of test processes that have ended, and returns their names."""
    folders = [path.name for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*")]
    stale = []
    for name in sorted({*namespaces(), *folders}):
        owner = re.match(rf"{PREFIX}-(\d+)-(\d+)-", name)
        if owner is None or process_stat(int(owner[1])).get("start") == int(owner[2]):
            continue
        stale.append(name)
        if name in namespaces():
            remove_namespace(name)
        if name in folders:
            shutil.rmtree(folder_of(name), ignore_errors=True)
    return stale
