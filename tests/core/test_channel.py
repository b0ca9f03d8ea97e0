"""The channel between hosts: who does not know the secret changes nothing, and a frame is valid once, at its place."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import struct
import threading
import time
from contextlib import suppress

import pytest

from meshwright.core import channel
from meshwright.core.channel import ChannelError, FrameCodec, Listener, connect, read_secret, session_keys
from meshwright.core.recover.hosts.messages import FIELDS, decode_message, encode_message
from meshwright.errors import ConfigError

SECRET = b"0123456789abcdef0123456789abcdef"


class Server:
    """A listener that collects what its connections receive."""

    def __init__(self) -> None:
        self.received: queue.Queue = queue.Queue()
        self.connections: list = []
        self.listener = Listener("127.0.0.1", SECRET, self.serve)
        self.address = ("127.0.0.1", self.listener.port)

    def serve(self, connection) -> None:
        self.connections.append(connection)
        while True:
            self.received.put(connection.receive())


@pytest.fixture
def server():
    server = Server()
    yield server
    server.listener.close()


def wait_for_end(stream: socket.socket) -> None:
    """Reads until the other end closes the connection."""
    stream.settimeout(10)
    with suppress(ConnectionResetError):
        while stream.recv(4096):
            pass


def test_frames_pass_in_both_directions(server):
    connection = connect(server.address, SECRET, 5)
    connection.send(b"one")
    connection.send(b"")
    connection.send(os.urandom(1 << 20))
    assert server.received.get(timeout=5) == b"one"
    assert server.received.get(timeout=5) == b""
    assert len(server.received.get(timeout=5)) == 1 << 20
    server.connections[0].send(b"answer")
    assert connection.receive() == b"answer"


def test_end_of_a_connection_is_reported_at_both_ends(server):
    connection = connect(server.address, SECRET, 5)
    connection.send(b"one")
    server.received.get(timeout=5)
    server.connections[0].close()
    with pytest.raises(ChannelError):
        connection.receive()


def test_peer_with_another_secret_is_refused_by_both_ends(server):
    with pytest.raises(ChannelError):
        connect(server.address, SECRET[::-1], 5)
    assert server.connections == []


def test_client_refuses_a_server_that_does_not_know_the_secret():
    impostor = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        stream, _ = impostor.accept()
        stream.sendall(channel.MAGIC + bytes(32))
        stream.recv(64)
        stream.sendall(bytes(32))

    threading.Thread(target=serve, daemon=True).start()
    with pytest.raises(ChannelError, match="another secret"):
        connect(impostor.getsockname(), SECRET, 5)
    impostor.close()


@pytest.mark.parametrize(
    "content", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), bytes(range(256)) * 16, pickle.dumps(["x"])]
)
def test_intruder_reaches_no_handler(server, content):
    with socket.create_connection(server.address) as intruder:
        intruder.sendall(content)
        with suppress(OSError):  # it is closed already
            intruder.shutdown(socket.SHUT_WR)
        wait_for_end(intruder)
    assert server.connections == []
    assert server.received.empty()


def test_silent_intruder_is_closed_after_the_handshake_timeout(server, monkeypatch):
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.2)
    with socket.create_connection(server.address) as intruder:
        intruder.settimeout(5)
        assert intruder.recv(4096).startswith(channel.MAGIC)
        assert intruder.recv(4096) == b""


def test_intruder_that_sends_byte_by_byte_is_closed_after_the_same_timeout(server, monkeypatch):
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.5)
    deadline = time.monotonic() + 30  # a timeout that every byte begins again would never close it
    with socket.create_connection(server.address) as intruder, suppress(OSError):
        while time.monotonic() < deadline:
            intruder.sendall(b"x")
            time.sleep(0.1)
    assert time.monotonic() < deadline
    assert server.connections == []


def test_flood_of_intruders_does_not_keep_hosts_out(server, monkeypatch):
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.3)
    count = 2 * channel.MAX_HANDSHAKES_PER_ADDRESS
    intruders = [socket.create_connection(server.address) for _ in range(count)]
    time.sleep(0.6)
    connect(server.address, SECRET, 5).send(b"one")
    assert server.received.get(timeout=5) == b"one"
    for intruder in intruders:
        intruder.close()


def record_session(server) -> bytes:
    """What a host sends through a relay: its handshake and one frame."""
    relay, sent = socket.create_server(("127.0.0.1", 0)), bytearray()

    def copy() -> None:
        client, _ = relay.accept()
        upstream = socket.create_connection(server.address)

        def back() -> None:
            while content := upstream.recv(4096):
                client.sendall(content)

        threading.Thread(target=back, daemon=True).start()
        while content := client.recv(4096):
            sent.extend(content)
            upstream.sendall(content)
        upstream.close()

    threading.Thread(target=copy, daemon=True).start()
    connection = connect(relay.getsockname(), SECRET, 5)
    connection.send(b"stop the job")
    assert server.received.get(timeout=5) == b"stop the job"
    connection.close()
    relay.close()
    return bytes(sent)


def test_replayed_session_changes_nothing(server):
    recorded = record_session(server)
    served = len(server.connections)
    with socket.create_connection(server.address) as attacker:
        attacker.sendall(recorded)
        wait_for_end(attacker)
    assert len(server.connections) == served
    assert server.received.empty()


def test_frame_is_invalid_at_another_place_and_in_the_other_direction():
    to_server, to_client = session_keys(SECRET, bytes(32), bytes(32))
    sender, receiver = FrameCodec(to_server), FrameCodec(to_server)
    frames = [sender.seal(payload) for payload in (b"one", b"two")]
    parts = [(frame[4:-32], frame[-32:]) for frame in frames]
    assert receiver.open(*parts[0]) == b"one"
    with pytest.raises(ChannelError):
        receiver.open(*parts[0])  # again
    with pytest.raises(ChannelError):
        FrameCodec(to_server).open(*parts[1])  # out of order
    with pytest.raises(ChannelError):
        FrameCodec(to_client).open(*parts[0])
    with pytest.raises(ChannelError):
        FrameCodec(to_server).open(b"onf", parts[0][1])


def test_frame_that_announces_too_many_bytes_ends_the_connection_without_allocating_them(server):
    connection = connect(server.address, SECRET, 5)
    connection.stream.sendall(struct.pack("<I", 0xFFFFFFFF))
    with pytest.raises(ChannelError):
        connection.receive()
    assert server.received.empty()
    with pytest.raises(ChannelError, match="larger than"):
        FrameCodec(SECRET).seal(bytes(channel.MAX_FRAME_BYTES + 1))


def test_secret_comes_from_the_environment_or_a_file(tmp_path):
    assert read_secret({channel.SECRET_VARIABLE: "x" * 20}) == b"x" * 20
    (tmp_path / "secret").write_text("y" * 32 + "\n")
    assert read_secret({channel.SECRET_FILE_VARIABLE: str(tmp_path / "secret")}) == b"y" * 32
    for environment in ({}, {channel.SECRET_VARIABLE: "short"}, {channel.SECRET_FILE_VARIABLE: str(tmp_path / "none")}):
        with pytest.raises(ConfigError, match=r"secret|SECRET"):
            read_secret(environment)


def test_address_that_is_not_of_this_host_is_named():
    with pytest.raises(ConfigError, match=r"cannot listen at the address 192\.0\.2\.1"):
        Listener("192.0.2.1", SECRET, lambda connection: None)


VALUES = {int: 1, str: "x", dict: {}}
PLACEMENT = {"first_rank": 0, "ranks": 1, "hosts": ["a"], "addresses": ["h"], "control_ports": [1], "port": 5}


@pytest.mark.parametrize("kind", FIELDS)
def test_message_with_missing_extra_or_wrong_fields_is_refused(kind):
    message = {"kind": kind} | {name: VALUES[type_] for name, type_ in FIELDS[kind].items()}
    if kind == "start":
        message["placement"] = PLACEMENT
    assert decode_message(encode_message(message)) == message
    for name in FIELDS[kind]:
        for broken in (
            {key: value for key, value in message.items() if key != name},
            message | {name: None},
            message | {name: True},
            message | {name: [1]},
        ):
            with pytest.raises(ChannelError):
                decode_message(encode_message(broken))
    with pytest.raises(ChannelError):
        decode_message(encode_message(message | {"more": 1}))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"5", b'{"kind": "fly"}', b'{"kind": {}}', b"[" * 100_000, b"\xff"])
def test_message_that_is_none_of_ours_is_refused(raw):
    with pytest.raises(ChannelError):
        decode_message(raw)


@pytest.mark.parametrize(
    "change",
    [{"first_rank": 1}, {"ranks": 0}, {"ranks": -1}, {"port": 0}, {"port": 70000}, {"hosts": []}, {"hosts": [1]},
     {"addresses": []}, {"control_ports": ["1"]}, {"first_rank": "0"}, {"hosts": 5}],
)  # fmt: skip
def test_start_with_an_invalid_placement_is_refused(change):
    message = {"kind": "start", "attempt": 1, "restart": 0, "placement": PLACEMENT | change}
    with pytest.raises(ChannelError):
        decode_message(encode_message(message))
