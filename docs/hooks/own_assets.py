"""Ends a strict build if a page would load a script, a style sheet, a font or an image from another server."""

from __future__ import annotations

import logging
import re
from typing import Any

LOG = logging.getLogger("mkdocs.hooks.own_assets")
LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\ssrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b(?=[^>]*rel=[\"']?(?:stylesheet|preconnect|preload|icon))[^>]*?\shref=[\"']?((?:https?:)?//[^\"'\s>]+)"
)


def external_assets(html: str) -> list[str]:
    """The addresses on other servers from which a browser would load something when it shows the page."""
    return [source or sheet for source, sheet in LOADED.findall(html)]


def on_post_page(output: str, page: Any, **_settings: Any) -> str:
    for address in external_assets(output):
        LOG.warning("%s loads %s from another server", page.file.src_uri, address)
    return output
