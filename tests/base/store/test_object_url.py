"""Tests of meshwright.base.store.object_url: supported URLs have one spelling, and none contains a credential."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.base.cli.args import parse_path
from meshwright.base.store.object_url import allows_http, is_url, parse_url
from meshwright.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("s3://bucket/runs/a", "s3://bucket/runs/a"),
        ("s3://bucket/runs//a/", "s3://bucket/runs/a"),
        ("gs://bucket/a", "gs://bucket/a"),
        ("az://container/a", "az://container/a"),
        (Path("s3://bucket/runs/a"), "s3://bucket/runs/a"),
    ],
)
def test_url_has_one_spelling(given, expected):
    assert is_url(given)
    assert parse_url(given) == expected


@pytest.mark.parametrize(
    "given",
    [
        "s3://user:hunter2@bucket/run",
        "s3://hunter2@bucket/run",
        "s3://bucket/run?X-Amz-Signature=hunter2",
        "az://container/run?sig=hunter2",
        "s3://bucket/run#hunter2",
        "https://user:hunter2@host/run",
    ],
)
def test_url_with_a_credential_is_refused_and_not_repeated(given):
    with pytest.raises(ConfigError) as refused:
        parse_url(given)
    assert "hunter2" not in str(refused.value)
    assert "user" not in refused.value.message.replace("user name", "")
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "given", ["ftp://host/x", "s3://bucket", "s3:///x", "s3://bucket/../x", "s3://bucket/a\x00b", "s3://b/" + "x" * 900]
)
def test_other_urls_are_refused(given):
    with pytest.raises(ConfigError, match="expected s3://BUCKET/PATH"):
        parse_url(given)


@pytest.mark.parametrize("given", ["runs/a", "/tmp/s3:/x", "C:/x", "s3:bucket"])
def test_paths_are_not_urls(given):
    assert not is_url(given)


def test_path_option_does_not_take_a_url_for_a_folder():
    with pytest.raises(Exception, match="a URL is not a path"):
        parse_path("s3://bucket/x")


def test_unencrypted_endpoint_is_only_on_this_machine(monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert not allows_http()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    assert allows_http()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hunter2@minio.example:9000")
    with pytest.raises(ConfigError, match=r"minio\.example, is not encrypted") as refused:
        allows_http()
    assert "hunter2" not in str(refused.value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert allows_http()
