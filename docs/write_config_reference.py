"""Writes docs/config.md, the reference of all config keys, from the docstrings of the config classes."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright.base.config import PRESETS
from meshwright.base.config.reference import SectionDescription, describe_config

INTRODUCTION = f"""\
# Config reference

Look up every setting of a run here. `meshwright train --help` prints the same text; this page is written by
`python docs/write_config_reference.py` from the docstrings in `meshwright/base/config/`.

A run file is TOML and names only what differs from its preset:

```toml
preset = "small"
steps = 2000

[optimizer]
lr = 6e-4

[layout]
replicate = 4
```

On the command line, `--optimizer.lr=6e-4` and `--optimizer.lr 6e-4` are equivalent. The command line takes precedence
over the run file, and the run file over the preset. In Python, build a `meshwright.RunConfig`, or call
`meshwright.base.config.load_config(Path("run.toml"), ["optimizer.lr=6e-4"])`.

Presets: {", ".join(f"`{name}`" for name in PRESETS)}. Defaults below are those of `tiny`.

A key marked *identity* changes the numbers of a run: a run folder resumes only with the same value, except
that `steps` may grow. The other keys are *placement* and may differ between attempts at the same run.
"""


def config_reference() -> str:
    """Returns the text of docs/config.md."""
    return INTRODUCTION + "".join(section_table(section) for section in describe_config())


def section_table(section: SectionDescription) -> str:
    heading = f"## `[{section.name}]`\n\n{section.help}" if section.name else "## Top level"
    rows = []
    for key in section.keys:
        kind, mark = key.type.replace("|", " or "), "identity" if key.identity else ""
        rows.append(f"| `{key.key}` | {kind} | {key.default} | {mark} | {key.help} |")
    return "\n".join(["", heading, "", "| key | type | default | | meaning |", "|---|---|---|---|---|", *rows, ""])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    (Path(__file__).parent / "config.md").write_text(config_reference())
