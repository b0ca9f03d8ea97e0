"""Identifiers and phrases that Meshwright no longer uses, each with its replacement.

Only terms that are not ordinary words in their plain sense are listed, so that a match is always a mistake.
"""

from __future__ import annotations

IDENTIFIERS: dict[str, str] = {}
"""Whole words, matched with their case."""

PHRASES: dict[str, str] = {}
"""Phrases, matched without their case across line breaks."""
