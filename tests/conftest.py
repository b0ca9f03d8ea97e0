"""Settings shared by all tests: one CPU thread per process, a home folder per test, and seconds per package."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from itertools import count
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
# Tests must not read what was measured on this machine. Set before anything else, also for the processes tests start.
os.environ["MESHWRIGHT_HOME"] = os.path.join(tempfile.gettempdir(), f"meshwright-no-home-{os.getpid()}")
# Home folders are new, and what one test has compiled is used by the next.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"meshwright-tests-compiled-{os.getuid()}")
)

import pytest
import torch
from hypothesis import settings
from small_run import small_config

torch.set_num_threads(1)
# Time is not a test, and a failure must be the same on the next run.
settings.register_profile("deterministic", deadline=None, derandomize=True, database=None)
settings.load_profile("deterministic")

HOME_NUMBERS = count()


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """A home folder of its own for every test, in which nothing was measured."""
    folder = tmp_path_factory.getbasetemp() / "homes" / str(next(HOME_NUMBERS))
    monkeypatch.setenv("MESHWRIGHT_HOME", str(folder))
    return folder


@pytest.fixture
def small():
    return small_config


def pytest_collection_modifyitems(items):
    """Skips tests of CUDA where there is no device. To ask torch would start CUDA, which does not survive a fork."""
    if torch.version.cuda is None or not Path("/dev/nvidiactl").exists():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_addoption(parser):
    parser.addoption("--package-durations", action="store_true", help="print the seconds of tests per package")


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--package-durations"):
        return
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                package = Path(report.nodeid.partition("::")[0]).parts[1].removesuffix(".py")
                seconds[package] += report.duration
                tests[package] += report.when == "call"
    terminalreporter.section("seconds per package")
    for package, total in seconds.most_common():
        terminalreporter.write_line(f"{package:<16} {total:8.1f} s  {tests[package]:6,} tests")
    terminalreporter.write_line(f"{'all':<16} {seconds.total():8.1f} s  {tests.total():6,} tests")
