"""Encodes answers of the page as JSON, with numbers as short as people need them. Torch-free."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from meshwright.base.io import finite

DIGITS = 4
"""Significant digits of a number in a series."""


def encode(value: Any) -> bytes:
    """Encodes a value as compact JSON; infinity and NaN become null."""
    return json.dumps(finite(value), allow_nan=False, separators=(",", ":")).encode()


def shorten(values: NDArray[np.float64], digits: int = DIGITS) -> list[float | None]:
    """Returns numbers with so many significant digits; None for those that are not finite."""
    return [float(f"{value:.{digits}g}") if abs(value) < np.inf else None for value in values.tolist()]


def json_response(content: bytes) -> Response:
    return Response(content, media_type="application/json", headers={"cache-control": "no-store"})
