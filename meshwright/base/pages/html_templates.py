"""The environment of the HTML templates: every text is escaped, and a missing value is an error. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def template_environment(finalize: Callable[[Any], Any] | None = None) -> Environment:
    """Returns the environment of `templates` beside this file; `finalize` maps every value before it is written."""
    return Environment(
        loader=PackageLoader("meshwright.base.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
