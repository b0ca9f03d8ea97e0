"""The local mirror of a run in an object store: its records are written here, and copied to the store. Torch-free.

Checkpoints and leases are in the object store alone. Everything else that a run writes grows by small appends, which an
object store does not have: it is written into a local folder, the mirror. `push` copies what has changed to the store,
in parts of bounded size, and `pull` fetches what another host has pushed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count, takewhile
from pathlib import Path

from meshwright.base.io import meshwright_home, open_regular_file
from meshwright.base.store.object_calls import RequestLimits
from meshwright.base.store.object_store import ObjectStore
from meshwright.base.store.object_url import is_url, parse_url
from meshwright.errors import ConfigError

URL_FILE = ".url"
PUSHED_FILE = ".pushed.json"
LOCK_FILE = ".lock"
IDENTITY_FILES = ("run.toml", "identity.json")
"""Written and pushed before the first checkpoint; fetched before an attempt starts."""
PUSHED = ("plan.json", "events/*.jsonl", "attempts/*/incident.json", "trace/*.jsonl", "attempts/*/*.log", "trace/*.gz")
"""The records that are pushed while the run trains, the most useful first."""
RECORD = re.compile(
    r"(run\.toml|identity\.json|plan\.json|(events|trace)/[\w.-]{1,100}|attempts/[0-9]{4,9}/[\w.-]{1,100})"
)
"""The names that are fetched: a store that somebody else can write must not place a file outside of the mirror."""
RANK = re.compile(r"/rank-([0-9]{5,9})\.")
RANK_RECORDS = (("events", ".jsonl"), ("trace", ".spans.jsonl"))
"""The records of a rank that grow over all attempts."""
PART = re.compile(r"(.+)\.part-([0-9]{5})")
PART_BYTES = 4 << 20
"""A record is pushed in parts of this size, so that only its last part is sent again when it grows."""
MAX_RECORD_BYTES = 64 << 20
"""Longer records are not pushed further, and not fetched."""
MAX_RECORDS = 100_000
LEASE_FILE = "lease.json"
LEASE_LIMITS = RequestLimits(retries=1, seconds=4.0, timeout=2.0)
RECORD_LIMITS = RequestLimits(retries=3, seconds=15.0, timeout=10.0)


def mirror_root(url: str) -> Path:
    """The folder of the mirror of a run."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", url.rpartition("/")[2])[:60]
    return meshwright_home() / "mirrors" / f"{name}-{digest}"


def mirrored_url(root: Path) -> str:
    """The URL of the run whose mirror a folder is; '' for any other folder. A folder that somebody sends cannot name
    a URL of its own: the name of a mirror follows from its URL.
    """
    if root.parent.name != "mirrors":
        return ""
    try:
        with open_regular_file(root / URL_FILE) as file:
            url = parse_url(file.read(4096).decode().strip())
        return url if mirror_root(url).resolve() == root.resolve() else ""
    except (OSError, ValueError, ConfigError):
        return ""


def make_mirror(text: str | Path) -> Path:
    """The mirror of the run at a URL, created if it does not exist. Raises a ConfigError."""
    url = parse_url(text)
    root = mirror_root(url).absolute()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(root / URL_FILE, url.encode() + b"\n")
    except OSError as error:
        raise ConfigError(
            f"cannot create {root}, the local mirror of {url}: {error.strerror}", "try MESHWRIGHT_HOME=DIR"
        ) from None
    return root.resolve()


def resolve_run(run: str | Path) -> Path:
    """The folder of a run that is only read: a path, or the mirror of a URL with the records that the store has. The
    URL of a checkpoint resolves to the path that its folder would have in the mirror.
    """
    if not is_url(run):
        return Path(run)
    url, slash, name = parse_url(run).partition("/checkpoints/")
    if "/" in name or "/" not in url[5:]:
        raise ConfigError(f"{url}{slash}{name} is not a run", "expected the URL of a run, or of one of its checkpoints")
    root = make_mirror(url)
    with RunMirror(root) as mirror:
        mirror.pull()
    return root / "checkpoints" / name if slash else root


class MirroredStore(ObjectStore):
    """The store of a run that has a mirror. A lease that it publishes is also written to the mirror, in the folder that
    the other records of the attempt go to.
    """

    def __init__(self, url: str, root: Path) -> None:
        super().__init__(url)
        self.root = root

    def size(self, name: str) -> int | None:
        """See `Store.size`. A supervisor asks twice per second whether its lease is there, and must not wait long for a
        store that does not answer.
        """
        if name.endswith(f"/{LEASE_FILE}"):
            return ObjectStore(self.url, LEASE_LIMITS).size(name)
        return super().size(name)

    def publish_if_absent(self, name: str, content: bytes, before_publish: Callable[[], object] = lambda: None) -> bool:
        published = super().publish_if_absent(name, content, before_publish)
        if published and name.startswith("attempts/"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            write_file(self.root / name, content)
        return published


class RunMirror:
    """Copies records between a mirror and the store. While a job uses the mirror, nobody else pulls into it: the files
    that its ranks append to must not be replaced.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, mirrored_url(root)
        self.store = ObjectStore(self.url, RECORD_LIMITS)
        self.lock = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.seen: dict[str, tuple[int, int, int]] = {}
        """The inode, the size and the time of modification of a record when it was pushed."""

    def __enter__(self) -> RunMirror:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        if self.lock >= 0:
            os.close(self.lock)
        self.lock = -1

    def use(self) -> None:
        """Fetch the records, unless another job of this machine uses the mirror, and use it from now on. Records of an
        earlier run at the same URL, which has been deleted, are removed.
        """
        self.remove_earlier_run()
        self.pull()
        with suppress(OSError):
            fcntl.flock(self.lock, fcntl.LOCK_SH)

    def pull(self) -> None:
        """Fetch every record that differs from what this machine has pushed. Raises a ConfigError."""
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # the mirror is in use, and its records are the newest ones
        try:
            pushed, sizes = self.read_pushed(), self.list_records()
            for name, size in sizes.items():
                if size == pushed.get(name) and (self.root / name).is_file():
                    continue
                if (content := self.fetch(name, size)) is not None:
                    self.write(name, content)
                    pushed[name] = len(content)
            self.fetch_identity()
            self.write_pushed(pushed)
        except OSError as error:
            raise ConfigError(
                f"the records of {self.url} cannot be read: {error.strerror}",
                "expected the URL of a run, and credentials in the environment (AWS_*, GOOGLE_*, AZURE_*)",
            ) from None
        finally:
            fcntl.flock(self.lock, fcntl.LOCK_UN)

    def remove_earlier_run(self) -> None:
        """Empty the mirror if the store has no run, unless another job of this machine uses it."""
        with suppress(OSError):
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                empty = self.store.size("identity.json") is None and not self.store.list_sizes("attempts")
                for name in ("events", "attempts", "trace") if empty else ():
                    shutil.rmtree(self.root / name, ignore_errors=True)
                for name in (*IDENTITY_FILES, "plan.json", PUSHED_FILE) if empty else ():
                    (self.root / name).unlink(missing_ok=True)
            finally:
                fcntl.flock(self.lock, fcntl.LOCK_UN)

    def prepare_attempt(self, attempt: int, ranks: Iterable[int]) -> None:
        """Fetch what the ranks of this host append to, where another host has run them meanwhile."""
        (self.root / f"attempts/{attempt:04d}").mkdir(parents=True, exist_ok=True)
        self.fetch_identity()
        pushed = self.read_pushed()
        for name in (f"{folder}/rank-{rank:05d}{ending}" for rank in ranks for folder, ending in RANK_RECORDS):
            sizes = takewhile(
                lambda size: size is not None, map(self.store.size, map(partial(part_name, name), count()))
            )
            size = sum(filter(None, sizes))
            if size and size != pushed.get(name) and (content := self.fetch(name, size)) is not None:
                self.write(name, content)
                pushed[name] = len(content)
        self.write_pushed(pushed)

    def fetch_identity(self) -> None:
        """Fetch run.toml and identity.json: an attempt on another host may have written them."""
        for name in IDENTITY_FILES:
            with suppress(FileNotFoundError):
                content = self.store.read(name, 0, MAX_RECORD_BYTES)
                self.write(name, content)

    def list_records(self) -> dict[str, int]:
        """The names and sizes of the records in the store, except the identity."""
        sizes: dict[str, int] = {}
        for folder in ("events", "attempts", "trace"):
            for name, size in sorted(self.store.list_sizes(folder).items()):
                part = PART.fullmatch(name)
                record = part[1] if part else name
                if RECORD.fullmatch(record) and len(sizes) < MAX_RECORDS:
                    sizes[record] = sizes.get(record, 0) + size
        plan = self.store.size("plan.json")
        return sizes if plan is None else sizes | {"plan.json": plan}

    def fetch(self, name: str, size: int) -> bytes | None:
        """The content of a record, or None if it is too long or gone."""
        if size > MAX_RECORD_BYTES:
            return None
        parts = []
        for number in range(max(1, -(-size // PART_BYTES))):
            try:
                parts.append(self.store.read(part_name(name, number), 0, PART_BYTES))
            except FileNotFoundError:  # deleted since
                break
        return b"".join(parts) if parts else None

    def push_identity(self) -> None:
        """Copy run.toml and identity.json to the store; they are durable there when the call returns."""
        for name in IDENTITY_FILES:
            self.store.replace(name, (self.root / name).read_bytes())

    def push(self, on_skipped: Callable[[str], None] = lambda _name: None, ranks: Container[int] | None = None) -> None:
        """Copy every record that has changed since the last call, of these ranks if they are given: other hosts push
        those of the others. Raises OSError at the first one that fails.
        """
        pushed = self.read_pushed()
        try:
            for name, path in self.find_records():
                rank = RANK.search(name)
                if ranks is not None and rank is not None and int(rank[1]) not in ranks:
                    continue
                status = path.lstat()
                now = status.st_ino, status.st_size, status.st_mtime_ns
                before = self.seen.get(name)
                if not stat.S_ISREG(status.st_mode) or now == before:
                    continue
                if status.st_size > MAX_RECORD_BYTES:
                    on_skipped(name)
                    continue
                grown = before is not None and before[0] == now[0] and before[1] <= now[1]
                with suppress(FileNotFoundError):
                    pushed[name] = self.push_record(name, path, pushed.get(name, 0), grown)
                    self.seen[name] = now
        finally:
            self.write_pushed(pushed)

    def push_record(self, name: str, path: Path, before: int, grown: bool) -> int:
        """Copy the parts of a record that have changed, and return how many of its bytes are in the store."""
        first = before // PART_BYTES if grown else 0
        with open_regular_file(path) as file:
            file.seek(first * PART_BYTES)
            content = file.read(MAX_RECORD_BYTES - first * PART_BYTES)
        if name.endswith(".jsonl"):
            content = content[: content.rfind(b"\n") + 1]  # the next attempt truncates a torn line
        for number in range(max(1, -(-len(content) // PART_BYTES))):
            part = content[number * PART_BYTES : (number + 1) * PART_BYTES]
            self.store.replace(part_name(name, first + number), part)
        size = first * PART_BYTES + len(content)
        for number in range(max(1, -(-size // PART_BYTES)), -(-before // PART_BYTES)):
            self.store.remove(part_name(name, number))  # the record was shorter than before
        return size

    def find_records(self) -> Iterator[tuple[str, Path]]:
        for pattern in PUSHED:
            for path in sorted(self.root.glob(pattern)):
                name = path.relative_to(self.root).as_posix()
                if RECORD.fullmatch(name) and not path.name.startswith("."):
                    yield name, path

    def write(self, name: str, content: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)

    def read_pushed(self) -> dict[str, int]:
        """The sizes of the records when they were last pushed or fetched by this machine."""
        try:
            with open_regular_file(self.root / PUSHED_FILE) as file:
                value = json.loads(file.read(MAX_RECORD_BYTES))
            return {name: size for name, size in value.items() if RECORD.fullmatch(name) and type(size) is int}
        except (OSError, ValueError, AttributeError):
            return {}

    def write_pushed(self, pushed: dict[str, int]) -> None:
        with suppress(OSError):  # the records are then fetched again
            write_file(self.root / PUSHED_FILE, json.dumps(pushed).encode())


def part_name(name: str, number: int) -> str:
    return f"{name}.part-{number:05d}" if number else name


def write_file(path: Path, content: bytes) -> None:
    """Replace a file of the mirror atomically. It need not be durable: the store is."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
