"""Fixtures of object stores: a local S3 server, its environment, and a proxy in front of it that injects faults."""

from __future__ import annotations

import uuid

import pytest

from benchmarks.s3_server import BUCKET, environment, missing_packages, s3_server
from meshwright.base.store.object_process import STATE, close_processes
from tests.base.store.fault_proxy import FaultProxy


@pytest.fixture(scope="module")
def s3_port():
    if missing := missing_packages():
        pytest.skip(f"not installed: {', '.join(missing)}")
    with s3_server() as port:
        yield port


@pytest.fixture
def s3(s3_port, monkeypatch):
    """The port of the server, which the environment names. As in a new process: no test before has trained here."""
    monkeypatch.setattr(STATE, "forking", 0)
    for name, value in environment(s3_port).items():
        monkeypatch.setenv(name, value)
    yield s3_port
    close_processes()
    STATE.calls.clear()


@pytest.fixture
def proxy(s3, monkeypatch):
    """A proxy without faults, which the environment names instead of the server."""
    opened = FaultProxy(s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{opened.port}")
    yield opened
    opened.close()


@pytest.fixture
def url() -> str:
    """A URL that no other test uses."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/run"
