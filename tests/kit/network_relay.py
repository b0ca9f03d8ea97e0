"""Forwards frames between ports of a switch with delay and loss.

`NetworkHosts` starts this process where delay or loss is asked for. It reads one line of JSON per
configuration from its standard input, answers "ready", and ends when its input is closed.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import select
import socket
import sys
import time

ETH_P_ALL = 3
ETH_P_ARP = b"\x08\x06"
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SO_RCVBUFFORCE = 33
VNET_HEADER = 10
"""Bytes before every frame that say how it is to be segmented: frames of 64 KiB pass as they do in the kernel."""
LARGEST_FRAME = 1 << 17
LARGEST_QUEUE = 20_000
"""Frames in flight; as in a switch, those for which there is no place are lost."""
FRAMES_PER_TURN = 64


class Link:
    """One direction between two ports."""

    def __init__(self, options: dict) -> None:
        self.source = options["source"]
        self.target = options["target"]
        self.target_mac = bytes.fromhex(options["target_mac"].replace(":", ""))
        self.delay = float(options["delay"])
        self.loss = float(options["loss"])
        self.random = random.Random(options["seed"])
        self.output = open_port(self.target, receives=False)

    @property
    def key(self) -> tuple[str, str]:
        return self.source, self.target


def open_port(name: str, receives: bool) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setblocking(False)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    if receives:
        port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
    port.bind((name, ETH_P_ALL if receives else 0))
    return port


class Relay:
    """The links, the frames in flight, and the ports that are read."""

    def __init__(self) -> None:
        self.links: dict[tuple[str, str], Link] = {}
        self.inputs: dict[int, tuple[socket.socket, list[Link]]] = {}
        self.flying: list[tuple[float, int, tuple[str, str], bytes]] = []
        self.received = 0

    def configure(self, options: list[dict]) -> None:
        for port, _ in self.inputs.values():
            port.close()
        for link in self.links.values():
            link.output.close()
        self.links = {link.key: link for link in map(Link, options)}
        self.inputs = {}
        for source in {link.source for link in self.links.values()}:
            port = open_port(source, receives=True)
            self.inputs[port.fileno()] = (port, [link for link in self.links.values() if link.source == source])

    def receive(self, descriptor: int) -> None:
        port, links = self.inputs[descriptor]
        for _ in range(FRAMES_PER_TURN):
            try:
                frame = port.recv(LARGEST_FRAME)
            except OSError:  # nothing more, or the port is down
                return
            addresses = frame[VNET_HEADER : VNET_HEADER + 14]
            if addresses[12:14] == ETH_P_ARP:  # the bridge forwards it
                continue
            for link in links:
                if addresses[:6] == link.target_mac:
                    self.queue(link, frame)

    def queue(self, link: Link, frame: bytes) -> None:
        if len(self.flying) >= LARGEST_QUEUE or link.random.random() < link.loss:
            return
        self.received += 1
        heapq.heappush(self.flying, (time.monotonic() + link.delay, self.received, link.key, frame))

    def send_due(self) -> float | None:
        """Sends the frames that are due, and returns the seconds until the next one is."""
        while self.flying and self.flying[0][0] <= time.monotonic():
            _, _, key, frame = heapq.heappop(self.flying)
            if link := self.links.get(key):
                try:
                    link.output.send(frame)
                except OSError:  # the port is down or its queue is full: the frame is lost
                    continue
        return max(0.0, self.flying[0][0] - time.monotonic()) if self.flying else None


def main() -> None:
    relay = Relay()
    lines = b""
    while True:
        ready, _, _ = select.select([0, *relay.inputs], [], [], relay.send_due())
        for descriptor in ready:
            if descriptor:
                relay.receive(descriptor)
        if 0 in ready:
            text = os.read(0, 1 << 16)
            if not text:
                return
            *complete, lines = (lines + text).split(b"\n")
            for line in complete:
                relay.configure(json.loads(line))
                sys.stdout.write("ready\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
