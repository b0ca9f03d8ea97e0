"""A local S3 server (moto) in a process of its own, so that no thread of it is in a process that forks ranks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

SERVER = """
import logging, sys
logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
BUCKET = "bucket"


def missing_packages() -> list[str]:
    """The packages that the tests of object stores need and that are not installed."""
    return [name for name in ("obstore", "moto", "flask") if importlib.util.find_spec(name) is None]


@contextmanager
def s3_server() -> Iterator[int]:
    """Runs a server with one bucket, and yields its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(request, timeout=30):
            yield port
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)


def environment(port: int) -> dict[str, str]:
    """The variables with which obstore and s3fs use the server."""
    return {
        "AWS_ACCESS_KEY_ID": "the-key-of-the-user",
        "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-user",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }


def open_uploads(port: int) -> int:
    """The multipart uploads that were begun and neither completed nor aborted."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{BUCKET}?uploads", timeout=30) as answer:
        return int(answer.read().count(b"<Upload>"))
