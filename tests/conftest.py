"""Settings shared by all tests: threads, signals, home folders, garbage collection, the order of files, seconds per
package.
"""

from __future__ import annotations

import gc
import os
import signal
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

from tests.kit.small_run import small_config

torch.set_num_threads(1)
# A script, cron and a container may start the session with SIGINT ignored, which every process that a test starts and
# interrupts would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Time is not a test, and a failure must be the same on the next run.
settings.register_profile("deterministic", deadline=None, derandomize=True, database=None)
settings.load_profile("deterministic")

TESTS = Path(__file__).parent
LONGEST = (
    "docs/test_readme.py",
    "repository/test_gpu_benchmark.py",
    "core/recover/hosts/test_snapshot_recovery.py",
    "docs/test_notebook.py",
    "core/trainer/test_trackers.py",
    "prover/test_clean_controls.py",
    "core/recover/test_resume_on_other_layouts.py",
    "ops/measure/preflight/test_preflight_on_hosts.py",
    "core/cli/test_train.py",
    "rl/test_rl_recovery.py",
    "core/test_api.py",
    "core/recover/test_hang.py",
    "core/recover/test_resume.py",
)
"""Files that take longest, which start first: none of them is left for the end, when only one process would work."""
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


class GarbageOfOneFile:
    """Lets garbage collections find what the tests of a file make, and not the modules that all files have imported:
    to walk through those took a fifth of the time of tests in this process.
    """

    file: Path | None = None

    def pytest_runtest_setup(self, item):
        if item.path == self.file:
            return
        previous, self.file = self.file, item.path
        gc.collect()
        gc.freeze()
        # A rank that is forked from now on would wait for these threads as soon as it frees their process group.
        threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        assert "pt_gloo_runloop" not in threads, f"{previous} has left a process group in this process"


def pytest_configure(config):
    config.pluginmanager.register(GarbageOfOneFile())


def pytest_collection_modifyitems(items):
    """Puts the longest files first. Skips tests of CUDA where there is no device; to ask torch would start CUDA, which
    does not survive a fork.
    """
    order = {TESTS / name: number for number, name in enumerate(LONGEST)}
    assert all(path.exists() for path in order), "a file of LONGEST was renamed"
    items.sort(key=lambda item: order.get(item.path, len(order)))
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
