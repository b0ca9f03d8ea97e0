"""What a user's code prints on rank 0 is shown while the run trains; the logs of all ranks have what they print."""

from __future__ import annotations

import copy
import io
import json

import torch
from torch import nn

from meshwright import train
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.terminal.terminal import JsonLines, Terminal
from meshwright.core.trainer.records.shown_output import MAX_LINE, ShownOutput
from tests.kit.custom_model import Points, custom_config, summed_cross_entropy


class Talking(nn.Linear):
    def forward(self, x):
        if torch.distributed.is_initialized():
            print("rank", torch.distributed.get_rank(), "\033[2Jsees", len(x))
        return super().forward(x)


def test_output_of_rank_0_is_shown_and_each_rank_has_a_log_that_the_header_names(tmp_path, capsys):
    config, folder, stream = custom_config(steps=2), RunFolder(tmp_path / "run"), io.StringIO()

    class Display(Terminal):
        def show(self, event):
            super().show(event)
            JsonLines(self.attempt).show(event)

    def display(attempt):
        return Display(config, folder.root, attempt, stream)

    train(config, model=Talking(4, 3), loss=summed_cross_entropy, source=Points(), run=folder.root, display=display)
    shown = stream.getvalue()
    assert "rank 0 ?[2Jsees 2" in shown
    assert "rank 1" not in shown
    assert f"what all processes print is in {folder.root}/attempts/0001/*.log" in shown.replace("\n", "")
    assert "rank 0 \033[2Jsees 2\n" in folder.log(1, 0).read_text()
    assert "rank 1 \033[2Jsees 2\n" in folder.log(1, 1).read_text()
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]  # standard output is JSON alone
    assert "rank 0 \033[2Jsees 2" in [event["text"] for event in events if event["kind"] == "output"]


def test_lines_are_shown_whole_without_what_they_overwrite_and_up_to_a_length():
    stream, lines = io.StringIO(), []
    output = ShownOutput(stream, lines.append)
    print("loss", 1, file=output, end="")
    print(" of 2", file=output)
    print("10%\r20%\r30%", file=output)
    print("x" * 3 * MAX_LINE, file=output)
    print("not ended", file=output, end="")
    assert lines == ["loss 1 of 2", "30%", "x" * MAX_LINE]
    assert stream.getvalue().endswith("x\nnot ended")
    assert not output.isatty()


def test_lines_that_are_written_at_once_are_shown_and_a_copy_writes_to_the_same_stream():
    stream, lines = io.StringIO(), []
    output = ShownOutput(stream, lines.append)
    output.writelines(line for line in ("one\n", "two\n"))
    assert lines == ["one", "two"]
    assert stream.getvalue() == "one\ntwo\n"
    assert vars(copy.copy(output)) == vars(output)
