"""Renders the report of a run as HTML: one self-contained page, or a fragment for a notebook. Torch-free."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from meshwright.base.io import printable
from meshwright.base.pages.html_templates import template_environment
from meshwright.insight.report.document import RunDocument


def render_page(document: RunDocument) -> str:
    """Returns the page, in which every text is escaped."""
    return render("run_report.html", ".run-report", document)


def render_fragment(document: RunDocument) -> str:
    """Returns an element for the output of a notebook's cell, whose styles apply to itself alone."""
    return render("run_fragment.html", ".meshwright-run", document)


def render(template: str, root: str, document: RunDocument) -> str:
    environment = template_environment(finalize=shown)
    style = Markup(environment.get_template("run_style.css").render(root=root))
    return environment.get_template(template).render(document=document, style=style).lstrip() + "\n"


def shown(value: Any) -> Any:
    """Replaces the control characters of a text, which HTML does not allow."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
