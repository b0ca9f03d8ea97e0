"""Two torchrun agents in network namespaces of their own, which a link of limited bandwidth connects."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

TORCHRUN = Path(sys.executable).parent / "torchrun"
TIMEOUT = 240.0
AS_HOST = 'hostname "$0" && exec "$@"'
"""A shell command that runs its arguments under another host name."""


def missing_permission() -> str:
    """Why network namespaces cannot be used here, or an empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"mw-probe-{os.getpid()}"
    try:
        with namespace(name):
            shaped = subprocess.run(
                ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", *limit("1gbit")],
                capture_output=True,
                text=True,
            )
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces are not permitted: {error}"
    return f"traffic control is not permitted: {shaped.stderr.strip()}" if shaped.returncode else ""


def limit(rate: str) -> list[str]:
    return ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]


@contextmanager
def namespace(name: str) -> Iterator[None]:
    subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True, text=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@contextmanager
def linked_namespaces(rate: str) -> Iterator[list[tuple[str, str, str]]]:
    """Yields (namespace, interface, address) of both ends of a link that passes `rate` in each direction."""
    ends = [(f"mw{i}-{os.getpid()}", f"mw{i}v{os.getpid()}"[:15], f"10.199.7.{i + 1}") for i in range(2)]
    with ExitStack() as stack:
        for name, _, _ in ends:
            stack.enter_context(namespace(name))
        (first, first_interface, _), (second, second_interface, _) = ends
        peer = ["peer", "name", second_interface, "netns", second]
        ip("link", "add", first_interface, "netns", first, "type", "veth", *peer)
        for name, interface, address in ends:
            ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", interface, "up")
            shape = ["tc", "qdisc", "add", "dev", interface, "root", *limit(rate)]
            subprocess.run(["ip", "netns", "exec", name, *shape], check=True)
        yield ends


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def throttled_link(rate: str) -> Callable[[Path, tuple[str, ...], dict[str, str]], None]:
    """Starts a run on two agents of one rank each, over a link with this rate."""

    def launch(run: Path, settings: tuple[str, ...], environment: dict[str, str]) -> None:
        with linked_namespaces(rate) as ends:
            agents = []
            for node, (name, interface, _) in enumerate(ends):
                static = [f"--node-rank={node}", f"--master-addr={ends[0][2]}", "--master-port=29577"]
                command = [str(TORCHRUN), "--nnodes=2", "--nproc-per-node=1", *static]
                command += ["-m", "meshwright", "train", "--run-dir", str(run), *settings]
                agents.append(
                    subprocess.Popen(
                        [
                            "ip",
                            "netns",
                            "exec",
                            name,
                            "unshare",
                            "--uts",
                            "sh",
                            "-c",
                            AS_HOST,
                            f"host-{node}",
                            *command,
                        ],
                        env=environment | {"GLOO_SOCKET_IFNAME": interface},
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
            try:
                outputs = [agent.communicate(timeout=TIMEOUT)[0] for agent in agents]
            finally:
                for agent in agents:
                    agent.kill()
            assert all(agent.returncode == 0 for agent in agents), outputs

    return launch
