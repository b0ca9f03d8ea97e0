"""The authenticated channel between the hosts of a job: bounded frames, each with a message authentication code.

Both ends know the secret of the job. Every connection has keys of its own, derived from the secret and from a nonce of
each end, and every frame is authenticated together with its number: a frame that was recorded is invalid on any other
connection and at any other place of its own. Frames are authenticated, not encrypted, and are never unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from meshwright.base.io import open_regular_file
from meshwright.errors import ConfigError

MAGIC = b"MESHWRIGHT1\n"
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_FRAME_BYTES = 8 << 20
HANDSHAKE_SECONDS = 5.0
MAX_HANDSHAKES, MAX_HANDSHAKES_PER_ADDRESS = 1024, 64
"""Connections that may be in their handshake at the same time, in all and from one address; further ones are closed."""
MIN_SECRET_BYTES = 16
SECRET_VARIABLE, SECRET_FILE_VARIABLE = "MESHWRIGHT_JOB_SECRET", "MESHWRIGHT_JOB_SECRET_FILE"
LENGTH = struct.Struct("<I")
NUMBER = struct.Struct("<Q")


class ChannelError(OSError):
    """The connection has ended, or the other end does not know the secret."""


def read_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret of the job, from the environment or from the file that it names."""
    if path := environment.get(SECRET_FILE_VARIABLE):
        try:
            with open_regular_file(Path(path)) as file:
                secret = file.read(4096).strip()
        except OSError as error:
            raise ConfigError(
                f"{SECRET_FILE_VARIABLE} = {path} cannot be read: {error.strerror}", "expected a file with the secret"
            ) from None
    else:
        secret = environment.get(SECRET_VARIABLE, "").encode()
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            "the hosts of a job share a secret, and this host has none of at least 16 bytes",
            f"try `openssl rand -hex 32 > FILE` and {SECRET_FILE_VARIABLE}=FILE on every host",
        )
    return secret


def mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of the parts."""
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


class FrameCodec:
    """The frames of one direction of a connection: length, payload, code."""

    def __init__(self, key: bytes) -> None:
        self.key, self.number = key, 0

    def seal(self, payload: bytes) -> bytes:
        if len(payload) > MAX_FRAME_BYTES:
            raise ChannelError(f"a frame of {len(payload):,} bytes is larger than {MAX_FRAME_BYTES:,}")
        return LENGTH.pack(len(payload)) + payload + self._code(payload)

    def open(self, payload: bytes, code: bytes) -> bytes:
        if not hmac.compare_digest(self._code(payload), code):
            raise ChannelError("a frame has a wrong authentication code")
        return payload

    def _code(self, payload: bytes) -> bytes:
        self.number += 1
        return mac(self.key, NUMBER.pack(self.number), payload)


class Connection:
    """A connection whose other end has proven that it knows the secret. Any thread may send; one thread receives."""

    def __init__(self, stream: socket.socket, send_key: bytes, receive_key: bytes, patience: float) -> None:
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer that does not read fills the buffer; the sender then must not wait for it for ever.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(patience), 0))
        self.stream, self.sender, self.receiver = stream, FrameCodec(send_key), FrameCodec(receive_key)
        self.lock = threading.Lock()

    def send(self, payload: bytes) -> None:
        try:
            with self.lock:
                self.stream.sendall(self.sender.seal(payload))
        except OSError as error:
            self.close()
            raise ChannelError(f"the connection was lost: {error}") from None

    def receive(self, limit: int = MAX_FRAME_BYTES) -> bytes:
        """The next frame. Raises ChannelError if the connection has ended or a frame is not authentic."""
        try:
            (length,) = LENGTH.unpack(receive_exactly(self.stream, LENGTH.size))
            if length > limit:
                raise ChannelError(f"a frame announces {length:,} bytes, more than {limit:,}")
            payload = receive_exactly(self.stream, length)
            return self.receiver.open(payload, receive_exactly(self.stream, MAC_BYTES))
        except OSError as error:
            self.close()
            raise error if isinstance(error, ChannelError) else ChannelError(str(error)) from None

    def close(self) -> None:
        with suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self.stream.close()


def receive_exactly(stream: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """The next bytes of a connection, before `deadline` if one is given (monotonic clock)."""
    content = bytearray()
    while len(content) < size:
        if deadline is not None:
            stream.settimeout(max(0.01, deadline - time.monotonic()))
        part = stream.recv(min(size - len(content), 1 << 20))
        if not part:
            raise ChannelError("the other end has closed the connection")
        content += part
    return bytes(content)


def session_keys(secret: bytes, server_nonce: bytes, client_nonce: bytes) -> tuple[bytes, bytes]:
    """The keys of frames from client to server, and from server to client."""
    nonces = server_nonce + client_nonce
    return mac(secret, b"client to server", nonces), mac(secret, b"server to client", nonces)


def connect(address: tuple[str, int], secret: bytes, timeout: float, patience: float = 5.0) -> Connection:
    """Connects to the listener of another host. Raises ChannelError if it does not answer or has another secret."""
    stream = None
    try:
        stream = socket.create_connection(address, timeout)
        stream.settimeout(timeout)
        if receive_exactly(stream, len(MAGIC)) != MAGIC:
            raise ChannelError("the other end is not a supervisor")
        server_nonce, client_nonce = receive_exactly(stream, NONCE_BYTES), os.urandom(NONCE_BYTES)
        to_server, to_client = session_keys(secret, server_nonce, client_nonce)
        stream.sendall(client_nonce + mac(to_server, b"hello"))
        if not hmac.compare_digest(receive_exactly(stream, MAC_BYTES), mac(to_client, b"hello")):
            raise ChannelError("the other end has another secret")
    except (OSError, OverflowError, UnicodeError) as error:
        if stream is not None:
            stream.close()
        raise ChannelError(f"{address[0]}:{address[1]}: {error}") from None
    return Connection(stream, to_server, to_client, patience)


class Listener:
    """Accepts connections of hosts that know the secret. Any other connection gets a nonce, and is closed after its
    first bytes or after a few seconds.
    """

    def __init__(
        self, address: str, secret: bytes, on_connection: Callable[[Connection], None], patience: float = 5.0
    ) -> None:
        """`on_connection` runs in a thread of the connection; the connection is closed when it returns."""
        self.secret, self.on_connection, self.patience = secret, on_connection, patience
        try:
            family = socket.getaddrinfo(address, None)[0][0]
            self.socket = socket.create_server((address, 0), family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                f"this host cannot listen at the address {address}: {error.strerror}",
                "try MESHWRIGHT_HOST_ADDRESS=ADDRESS with an address of this host",
            ) from None
        self.port = int(self.socket.getsockname()[1])
        self.handshakes: Counter[str] = Counter()
        """Connections that are in their handshake, by the address that they come from."""
        self.lock, self.closed = threading.Lock(), False
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                stream, (address, *_) = self.socket.accept()
            except OSError:
                if self.closed:
                    return
                time.sleep(0.1)  # no file descriptor is free, or the connection has ended already
                continue
            with self.lock:
                full = sum(self.handshakes.values()) >= MAX_HANDSHAKES
                if full or self.handshakes[address] >= MAX_HANDSHAKES_PER_ADDRESS:
                    stream.close()
                    continue
                self.handshakes[address] += 1
            threading.Thread(target=self._serve, args=(stream, address), name="connection", daemon=True).start()

    def _serve(self, stream: socket.socket, address: str) -> None:
        try:
            connection = self._handshake(stream)
        except OSError:
            stream.close()
            return
        finally:
            with self.lock:
                self.handshakes[address] -= 1
                self.handshakes += Counter()  # forgets addresses without a handshake
        try:
            self.on_connection(connection)
        except ChannelError:
            pass
        finally:
            connection.close()

    def _handshake(self, stream: socket.socket) -> Connection:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        stream.settimeout(HANDSHAKE_SECONDS)
        server_nonce = os.urandom(NONCE_BYTES)
        stream.sendall(MAGIC + server_nonce)
        answer = receive_exactly(stream, NONCE_BYTES + MAC_BYTES, deadline)
        client_nonce, code = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        to_server, to_client = session_keys(self.secret, server_nonce, client_nonce)
        if not hmac.compare_digest(code, mac(to_server, b"hello")):
            raise ChannelError("the other end does not know the secret")
        stream.sendall(mac(to_client, b"hello"))
        return Connection(stream, to_client, to_server, self.patience)

    def close(self) -> None:
        self.closed = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self.socket.close()
