"""Connections between hosts: a listener answers with its token; a closed or wrong port is a problem with its reason."""

from __future__ import annotations

import socket

import pytest

from meshwright.ops.preflight.reach import MAX_PARTNERS, answer_with, connect_to_hosts, host_address, partners


def test_listener_answers_with_its_token():
    with answer_with("token", "127.0.0.1") as port:
        addresses = {"right": ("127.0.0.1", port, "token"), "wrong": ("127.0.0.1", port, "other")}
        reached = connect_to_hosts(addresses)
    assert reached == {"right": "", "wrong": f"127.0.0.1 port {port}: another process answers"}


def test_closed_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert connect_to_hosts({"a": ("127.0.0.1", port, "t")}) == {"a": f"127.0.0.1 port {port}: Connection refused"}


@pytest.mark.parametrize("hosts", [2, 3, 33, 34, 512])
def test_every_host_is_reached_by_as_many_hosts_as_it_reaches(hosts):
    tried = [partners(number, hosts) for number in range(hosts)]
    counts = [sum(number in others for others in tried) for number in range(hosts)]
    assert set(counts) == {min(hosts - 1, MAX_PARTNERS)}
    assert all(number not in others and len(set(others)) == len(others) for number, others in enumerate(tried))


def test_address_is_given_or_that_of_the_interface(monkeypatch):
    monkeypatch.delenv("MESHWRIGHT_HOST_ADDRESS", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert host_address() == "127.0.0.1"
    monkeypatch.setenv("MESHWRIGHT_HOST_ADDRESS", "10.1.2.3")
    assert host_address() == "10.1.2.3"
