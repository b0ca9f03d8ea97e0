"""The run folder: the paths of everything that a run writes. Torch-free."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.base.store.mirror import mirrored_url
from meshwright.errors import ConfigError

CERTIFICATE = "certificate.json"
REPORTS = ("report.html", "report.md")
"""The reports that `meshwright report` writes by default."""
MERGED_TRACE = "trace.json.gz"
"""The trace that `meshwright trace` writes by default."""
FILES = ("run.toml", "identity.json", "plan.json", CERTIFICATE, *REPORTS, MERGED_TRACE)
INITIAL = "initial"
"""The folder of the weights that a run starts from, if `checkpoint import` copied them."""
FOLDERS = ("events", "attempts", "checkpoints", "trace", INITIAL, "rollouts", "policies")
"""What a run folder contains."""
KINDS: dict[Callable[[int], bool], str] = {
    stat.S_ISLNK: "a symbolic link",
    stat.S_ISDIR: "a folder",
    stat.S_ISREG: "a regular file",
    stat.S_ISFIFO: "a pipe",
}
MAX_ATTEMPT = 999_999_999
"""The largest number of an attempt."""


@dataclass(frozen=True)
class RunFolder:
    """The paths inside a run folder; `docs/records.md` describes their content."""

    root: Path

    @property
    def url(self) -> str:
        """The URL of the run if it is in an object store and this folder is its mirror; else ''."""
        return mirrored_url(self.root)

    @property
    def run_file(self) -> Path:
        """The resolved config."""
        return self.root / "run.toml"

    @property
    def identity_file(self) -> Path:
        """The identity of the run."""
        return self.root / "identity.json"

    @property
    def plan_file(self) -> Path:
        """The prediction for the newest attempt."""
        return self.root / "plan.json"

    def events(self, rank: int) -> Path:
        """The events of a rank, over all attempts."""
        return self.root / "events" / f"rank-{rank:05d}.jsonl"

    @property
    def trace(self) -> Path:
        """Spans of all ranks, and profiles of steps."""
        return self.root / "trace"

    @property
    def merged_trace(self) -> Path:
        """The merged trace of all ranks, if `meshwright trace` has written it."""
        return self.root / MERGED_TRACE

    def spans(self, rank: int) -> Path:
        """The newer spans of a rank, over all attempts."""
        return self.trace / f"rank-{rank:05d}.spans.jsonl"

    def profile(self, rank: int, steps: range, attempt: int) -> Path:
        """The profile of some steps of a rank."""
        return self.trace / f"rank-{rank:05d}.steps-{steps.start}-{steps.stop}.a{attempt:04d}.json.gz"

    def profiles(self, rank: int, steps: range) -> list[Path]:
        """The profiles of some steps of a rank that exist, of the oldest attempt first."""
        return sorted(self.trace.glob(self.profile(rank, steps, 0).name.replace(".a0000.", ".a*.")))

    def attempt(self, number: int) -> Path:
        return self.root / "attempts" / f"{number:04d}"

    def incident(self, number: int) -> Path:
        """Why an attempt ended."""
        return self.attempt(number) / "incident.json"

    def heartbeat(self, attempt: int, rank: int) -> Path:
        """The heartbeat of a rank."""
        return self.attempt(attempt) / f"heartbeat-{rank:05d}"

    def log(self, attempt: int, rank: int) -> Path:
        """The output of a rank."""
        return self.attempt(attempt) / f"rank-{rank:05d}.log"

    def last_attempt(self) -> int:
        """The number of the newest attempt, or 0."""
        return max(self.attempts(), default=0)

    def attempts(self) -> list[int]:
        """The numbers of the attempts that have a folder, in order."""
        return sorted(filter(None, map(parse_attempt, self._names("attempts"))))

    @property
    def has_run(self) -> bool:
        """Whether the folder has the records of a run. A run.toml alone may be a user's run file."""
        checkpoints = (name for name in self._names("checkpoints") if name.startswith("step-"))
        return os.path.lexists(self.identity_file) or bool(self.attempts()) or any(checkpoints)

    def _names(self, folder: str = "") -> list[str]:
        """The sorted names in a folder; none if it is absent."""
        try:
            return sorted(os.listdir(self.root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def require_usable(self) -> None:
        """Raises a ConfigError unless a run can be in this folder: it has one, is empty, or does not exist."""
        self.require_own_files()
        if self.has_run:
            return
        names = [name for name in self._names() if name not in (*FILES, *FOLDERS) and not is_ignored(name)]
        if names:
            found = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ConfigError(
                f"{self.root} is not a run folder: it has other files ({found}), and no identity.json, attempts/ or "
                "checkpoints/",
                "expected --run DIR with a new or empty folder, or with the folder of a run",
            )

    def require_own_files(self) -> None:
        """Raises a ConfigError if a part of the folder is a symbolic link, a pipe, or another kind of file than a run
        writes. Checked before a run writes to a folder, which may come from somebody else.
        """
        self.require_own_folders()
        inner = (f"{folder}/{name}" for folder in ("events", "trace") for name in self._names(folder))
        for name in (*FILES, *inner):
            require_kind(self.root / name, stat.S_ISREG, "a regular file")

    def require_own_folders(self) -> None:
        """Raises a ConfigError if a folder in here is something else, such as a symbolic link to another folder.
        Checked before anything is read; the files themselves are opened by `open_descriptor`.
        """
        for name in FOLDERS:
            require_kind(self.root / name, stat.S_ISDIR, "a folder")
        for name in ("attempts", "checkpoints"):
            for inner in self._names(name):
                require_kind(self.root / name / inner, is_file_or_folder, "a folder")

    def set_aside(self) -> RunFolder:
        """Renames the folder to the first free NAME.old-K beside it, and returns that; nothing is deleted."""
        root = self.root.resolve()
        for name, inside in (("current", Path.cwd()), ("home", Path(os.path.expanduser("~")))):
            if inside.resolve().is_relative_to(root):
                raise ConfigError(
                    f"--fresh would rename {root}, which contains the {name} folder",
                    "try it from another folder, or use another --run DIR",
                )
        number = 1
        while os.path.lexists(target := root.with_name(f"{root.name}.old-{number}")):
            number += 1
        try:
            os.rename(root, target)
        except OSError as error:
            raise ConfigError(
                f"--fresh cannot rename {root} to {target.name}: {error.strerror}", "try another --run DIR"
            ) from None
        self.link_initial_weights(target)
        return RunFolder(target)

    def link_initial_weights(self, earlier: Path) -> None:
        """Gives the folder the initial weights of an earlier one, which keeps them: the files get a second name."""
        try:
            names = sorted(os.listdir(earlier / INITIAL))
        except (FileNotFoundError, NotADirectoryError):
            return
        (self.root / INITIAL).mkdir(parents=True)
        for name in names:
            os.link(earlier / INITIAL / name, self.root / INITIAL / name, follow_symlinks=False)


def parse_attempt(name: str) -> int | None:
    """The number of an attempt from the name of its folder; None for a name that no attempt has."""
    number = int(name) if re.fullmatch(r"[0-9]{4,9}", name) else 0
    return number if number and f"{number:04d}" == name else None


def is_ignored(name: str) -> bool:
    """Whether a file in an otherwise empty folder does not matter: a hidden one, and what mkfs creates."""
    return name.startswith(".") or name == "lost+found"


def is_file_or_folder(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def require_kind(path: Path, is_kind: Callable[[int], bool], expected: str) -> None:
    """Raises a ConfigError if a path exists and is of another kind; symbolic links are not followed."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not is_kind(mode):
        found = next((name for test, name in KINDS.items() if test(mode)), "a special file")
        raise ConfigError(f"{path} is {found}", f"expected {expected}")
