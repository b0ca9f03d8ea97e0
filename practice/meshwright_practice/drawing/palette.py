"""The colors and fill characters that all drawings share, and how they write numbers. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from meshwright.base.io import format_bytes, format_seconds

COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
FILLS = "█▒░▓#=+:"
"""What tells parts apart where there are no colors."""
COUNT = "count"
"""The unit of plain numbers, which is not written."""
BYTE_UNITS = ("B", "bytes", "byte")
SECOND_UNITS = ("s", "seconds", "second")
MAX_LABEL = 28
LONG_UNIT = 8


def color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def fill(number: int, has_colors: bool) -> str:
    return "█" if has_colors else FILLS[number % len(FILLS)]


def format_number(value: float) -> str:
    """A number with four significant digits, and all digits of an integer: "0.7502", "12,288"."""
    if value == int(value) and abs(value) < 1e15 if abs(value) < 1e300 and value == value else False:
        return f"{int(value):,}"
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.3e}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.1f}"


def format_quantity(value: float, unit: str) -> str:
    """A value with its unit: bytes and seconds in readable multiples, everything else as it is."""
    if unit in BYTE_UNITS:
        return format_bytes(value)
    if unit in SECOND_UNITS:
        return format_seconds(value)
    return f"{format_number(value)} {'' if unit == COUNT else unit}".strip()


def format_figure(value: float, unit: str) -> str:
    """A value in a drawing, whose title names the unit: a long unit is left out."""
    return format_quantity(value, unit if len(unit) <= LONG_UNIT else "")


def short_label(text: str, limit: int = MAX_LABEL) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def legend(names: Sequence[str], has_colors: bool, width: int, indent: int = 0) -> list[Text]:
    """Lines that name the parts with their colors or fill characters; no name is divided between two lines."""
    lines: list[Text] = []
    for number, name in enumerate(names):
        entry = Text.assemble((fill(number, has_colors) * 2, color(number)), f" {name}")
        if lines and len(lines[-1]) + 3 + len(entry) <= width:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(Text(" " * indent).append_text(entry))
    return lines
