"""The starter file: the signatures of the contract, with what each function is for."""

from __future__ import annotations

from pathlib import Path

from meshwright.base.io import write_output
from meshwright.errors import ConfigError
from meshwright_practice.interview.exercise import CONFIG_KEYS, CONTRACT, PROMPT, RULES, STAGES

FILE = "interview.py"


def starter_text() -> str:
    """The text of the starter file. Every function raises NotImplementedError until it is written."""
    lines = ['"""The interview exercise.', "", *PROMPT.splitlines(), "", "config has these keys:"]
    lines += [f"- {keys}: {meaning}" for keys, meaning in CONFIG_KEYS.items()]
    lines += [
        "",
        "Rules:",
        *(f"- {rule}" for rule in RULES),
        '"""',
        "",
        "import torch",
        "import torch.distributed as dist",
    ]
    lines += ["from torch import nn"]
    for stage in STAGES:
        if stage.needs:
            lines += ["", f"# Minute {stage.gate}, {stage.title}: {stage.task}"]
        for name in stage.needs:
            function = CONTRACT[name]
            lines += [
                "",
                "",
                f"def {name}({', '.join(function.parameters)}):",
                f'    """-> {function.returns}: {function.meaning}."""',
                "    raise NotImplementedError",
            ]
    return "\n".join(lines) + "\n"


def write_starter(folder: Path) -> Path:
    """Writes the starter into a folder; a file that exists is never overwritten."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--write {folder} cannot be made: {error.strerror}", "expected a folder") from None
    path = folder / FILE
    if path.exists():
        raise ConfigError(f"{path} exists", "try another folder, or --file with this one")
    write_output(path, starter_text(), "--write")
    return path
