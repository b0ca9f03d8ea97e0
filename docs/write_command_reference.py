"""Writes docs/commands.md, the reference of all commands, from the parsers of the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from meshwright.base.cli.args import Parser, build_parser
from meshwright.base.cli.main import EXIT_CODES
from meshwright.base.cli.verbs import load_verb, verbs

INTRODUCTION = """\
# Command reference

Look up every command and its options here. `meshwright COMMAND --help` prints the same text; this page is written by
`python docs/write_command_reference.py` from the parsers in `meshwright/base/cli/`.

A command whose usage ends with `[--KEY=VALUE ...]` also takes every key of the [config](config.md) as an option, for
example `--optimizer.lr=3e-4`.

"""


def command_reference() -> str:
    """Returns the text of docs/commands.md."""
    parsers = {name: build_parser(load_verb(name), name) for name in verbs()}
    rows = [f"| [`{name}`](#{anchor(name)}) | {parser.description} |" for name, parser in parsers.items()]
    table = "\n".join(["| command | what it does |", "|---|---|", *rows])
    codes = EXIT_CODES.replace("Exit codes: ", "").replace("\n", " ").rstrip(".")
    exits = "\n".join(
        f"| {code} | {meaning} |" for code, _, meaning in (part.partition(" ") for part in split_codes(codes))
    )
    sections = "\n".join(section(name, parser) for name, parser in parsers.items())
    return f"{INTRODUCTION}{table}\n\n## Exit codes\n\n| code | meaning |\n|---|---|\n{exits}\n\n{sections}"


def anchor(name: str) -> str:
    return f"meshwright-{name.replace(' ', '-')}"


def split_codes(text: str) -> list[str]:
    """Divides the list of exit codes at the commas that a number follows; 130 and 143 have one meaning together."""
    text = text.replace("130 and 143 ", "130/143 ")
    parts: list[str] = []
    for part in text.split(", "):
        if part[:1].isdigit():
            parts.append(part)
        else:
            parts[-1] += f", {part}"
    return [part.replace("130/143", "130,\N{NO-BREAK SPACE}143") for part in parts]


def section(name: str, parser: Parser) -> str:
    """The usage and the arguments of one command."""
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    usage += " [--KEY=VALUE ...]" if parser.accepts_config_keys else ""
    rows = [argument_row(action) for action in parser._actions if action.dest != "help"]
    table = "\n".join(["| argument | meaning |", "|---|---|", *rows]) if rows else "The command has no arguments."
    return f"## `meshwright {name}`\n\n{parser.description}\n\n```text\n{usage}\n```\n\n{table}\n"


def argument_row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar}`"
    if action.option_strings and action.metavar:
        names = ", ".join(f"`{name} {action.metavar}`" for name in action.option_strings)
    meaning = (action.help or "").replace(sys.executable, "the interpreter that runs the command")
    return f"| {names.replace('|', chr(92) + '|')} | {meaning.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    (Path(__file__).parent / "commands.md").write_text(command_reference())
