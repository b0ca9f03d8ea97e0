"""Every command of docs/object-stores.md works as typed, against a local S3 server."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.s3_server import environment, missing_packages, s3_server

PAGE = Path(__file__).parents[2] / "docs" / "object-stores.md"
SMALL = "--model.width=32 --model.layers=2 --model.ffn=48 --data.sequence=16 --data.kind=synthetic --launch.device=cpu"


@pytest.mark.long
def test_commands_of_the_object_store_page_work_as_typed(tmp_path):
    if missing := missing_packages():
        pytest.skip(f"not installed: {', '.join(missing)}")
    [block] = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    commands = block.strip().splitlines()
    assert [command.split()[1] for command in commands] == ["train", "checkpoint", "checkpoint", "report"]
    with s3_server() as port:
        variables = os.environ | environment(port) | {"MESHWRIGHT_HOME": str(tmp_path / "home")}
        for number, command in enumerate(commands):
            if number == 3:  # the report is read on another machine
                variables["MESHWRIGHT_HOME"] = str(tmp_path / "other")
            args = shlex.split(f"{command} {SMALL}" if "train" in command else command)
            done = subprocess.run(
                [sys.executable, "-m", *args], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stdout + done.stderr
    assert "20 of 20 steps" in done.stdout
