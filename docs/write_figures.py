"""Updates the figures of the pages in docs/ that stand between comments; see docs/hooks/figures.py."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "hooks"))

from figures import MARKER, with_figures  # noqa: E402


def pages() -> list[Path]:
    """The pages that have figures."""
    return [path for path in sorted(DOCS.rglob("*.md")) if MARKER.search(path.read_text())]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path in pages():
        path.write_text(with_figures(path.read_text()))
