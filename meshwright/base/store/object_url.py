"""URLs of object stores: which ones are supported, and that none contains a credential. Torch-free."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from meshwright.errors import ConfigError

SCHEMES = {"s3": "Amazon S3 and compatible servers", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}
"""The supported schemes -> the service."""
EXPECTED = "expected s3://BUCKET/PATH, gs://BUCKET/PATH or az://CONTAINER/PATH"
CREDENTIALS = (
    "expected the credentials in the environment (AWS_*, GOOGLE_*, AZURE_*); replace this secret, which may be in the "
    "history of the shell"
)
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
COLLAPSED = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)")
"""A URL that was made a `Path`, which keeps one slash."""
BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,221}")
SEGMENT = re.compile(r"[A-Za-z0-9._=+ -]{1,200}")
MAX_URL_LENGTH = 700
LOOPBACK = ("localhost", "127.0.0.1", "::1")
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT")
ALLOW_HTTP = ("AWS_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP", "AZURE_ALLOW_HTTP")


def is_url(text: str | Path) -> bool:
    """Whether a text, or a `Path` that was made of it, is a URL and not the path of a folder."""
    return URL.match(str(text)) is not None or (isinstance(text, Path) and COLLAPSED.match(str(text)) is not None)


def parse_url(text: str | Path) -> str:
    """Returns the URL of a folder in an object store in its one spelling, without a slash at the end.

    Raises:
        ConfigError: the URL is not supported, or contains a credential. The message then does not repeat the URL.
    """
    spelled = COLLAPSED.sub(r"\1://", str(text)) if isinstance(text, Path) else text
    parts = urlsplit(spelled) if len(spelled) <= MAX_URL_LENGTH else None
    if parts is None:
        raise ConfigError(f"the URL of an object store has {len(spelled)} characters", f"{EXPECTED}, and fewer")
    if "@" in spelled:
        raise ConfigError("the URL of an object store contains a user name or a password", CREDENTIALS)
    if "?" in spelled or "#" in spelled:
        raise ConfigError("the URL of an object store contains a query, which may be a credential", CREDENTIALS)
    if parts.scheme not in SCHEMES:
        raise ConfigError(f"URLs that begin with {parts.scheme}:// are not supported", EXPECTED)
    bucket, segments = parts.netloc, [segment for segment in parts.path.split("/") if segment]
    if not BUCKET.fullmatch(bucket):
        raise ConfigError(f"{parts.scheme}:// URL: its bucket name is not valid", EXPECTED)
    wrong = next((s for s in segments if not SEGMENT.fullmatch(s) or s in (".", "..") or s != s.strip()), None)
    if wrong is not None or not segments:
        found = "it has no path" if wrong is None else f"{wrong[:40]!r} is not valid in its path"
        raise ConfigError(f"{parts.scheme}://{bucket}: {found}", f"{EXPECTED}; names of letters, digits and ._=+-")
    return f"{parts.scheme}://{bucket}/{'/'.join(segments)}"


def allows_http() -> bool:
    """Whether requests may be unencrypted: only to this machine, unless the user's environment asks for it."""
    if any(os.environ.get(name, "").lower() in ("1", "true", "yes") for name in ALLOW_HTTP):
        return True
    given = [urlsplit(os.environ[name]) for name in ENDPOINTS if os.environ.get(name)]
    plain = [endpoint for endpoint in given if endpoint.scheme == "http"]
    if remote := [endpoint for endpoint in plain if endpoint.hostname not in LOOPBACK]:
        raise ConfigError(
            f"the endpoint of the object store, host {remote[0].hostname}, is not encrypted",
            "expected an https:// endpoint, or set AWS_ALLOW_HTTP=true in a network that you trust",
        )
    return bool(plain)
