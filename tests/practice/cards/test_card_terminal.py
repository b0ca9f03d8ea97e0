"""The review on a real terminal, typed by a person: the command itself in a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from meshwright_practice.cards.registry import all_cards, teaching_order
from meshwright_practice.progress import load_progress, progress_file

SECONDS = 180.0


class Typist:
    """A command in a pseudo-terminal of 100 columns."""

    def __init__(self, *args):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meshwright", *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"},
        )
        os.close(slave)
        self.text = ""

    def expect(self, words):
        deadline = time.monotonic() + SECONDS
        while words not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self.master], [], [], 0.5)[0]:
                try:
                    self.text += os.read(self.master, 1 << 16).decode(errors="replace")
                except OSError:  # the command has ended
                    assert words in self.text, self.text
                    return

    def type(self, text):
        self.text = ""
        os.write(self.master, f"{text}\n".encode())

    def end(self):
        code = self.process.wait(SECONDS)
        os.close(self.master)
        return code


@pytest.mark.long
def test_a_review_on_a_terminal_and_ctrl_c_before_the_next_card(home):
    cards = teaching_order(all_cards())
    typist = Typist("practice", "cards")
    typist.expect(f"1 of 10 · {cards[0].kind}")
    for prediction in cards[0].predictions:
        typist.expect(f"[{prediction.unit}] > " if prediction.unit else " > ")
        typist.type("1")
    if cards[0].claims:
        typist.expect("Which claims are true?")
        typist.type("a")
    typist.expect("Next review")
    typist.expect("q ends > ")
    typist.type("")
    typist.expect("2 of 10")
    time.sleep(0.5)
    os.kill(typist.process.pid, signal.SIGINT)
    typist.expect("1 review saved")
    assert typist.end() == 0
    assert list(load_progress(progress_file(), pytest.fail).cards) == [cards[0].id]
