"""Random damage to a run folder: its files, its links, its names."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from fuzz.mutations import GARBAGE, mutate_bytes, mutate_json

ODD_ATTEMPTS = ("0000", "-001", "99999", "999999999", "9999999999", "00001", "٠٠٠٢", "0001 ", "1e3", "0001\n", "nan")
ODD_CHECKPOINTS = (
    *("step-99999999.a0001", "step-00000001.a999999999", "step-00000000.a0000", "step-999999999999999999.a0001"),
    *("step-00000003.a0001.tmp", "step-0000000é.a0001", "step-00000002.a0001\n", "..step", "-rf"),
)
HUGE = 1 << 36
"""Size of a sparse file that no reader may load."""


def damage_folder(rng: random.Random, folder: Path, canary: Path) -> str:
    """Damages one place of a run folder, and says what it did. `canary` is what must not change."""
    paths = sorted(path for path in folder.rglob("*") if is_folder_or_small_file(path))
    small = [path for path in paths if path.suffix in (".json", ".jsonl", ".toml")]
    target = rng.choice(small if rng.random() < 0.5 and small else paths)
    kind = rng.choice([*DAMAGE, *["mutate"] * 6])
    DAMAGE[kind](rng, target, canary)
    return f"{kind} {target.relative_to(folder)}"


def is_folder_or_small_file(path: Path) -> bool:
    """Whether earlier damage has left a path that can be damaged again: reading a pipe would block."""
    mode, size = path.lstat().st_mode, path.lstat().st_size
    return stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and size < HUGE)


def mutate(rng: random.Random, target: Path, _canary: Path) -> None:
    """Changes the content of a file; JSON stays JSON most of the time."""
    if target.is_dir():
        (target / rng.choice(["x", "é\u202e", "a" * 200, "\n", "manifest.json", "lease.json"])).write_bytes(b"garbage")
        return
    content = target.read_bytes()
    if target.suffix == ".json":
        target.write_bytes(mutate_json(rng, content.decode()) if is_json(content) else mutate_bytes(rng, content))
    elif target.suffix == ".jsonl" and (lines := content.splitlines()):
        number = rng.randrange(len(lines))
        lines[number] = mutate_json(rng, lines[number].decode()) if is_json(lines[number]) else b"?"
        target.write_bytes(b"\n".join(lines) + b"\n")
    else:
        target.write_bytes(mutate_bytes(rng, content))


def is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def delete(_rng: random.Random, target: Path, _canary: Path) -> None:
    remove(target)


def replace_by_link(rng: random.Random, target: Path, canary: Path) -> None:
    """Replaces a file or folder by a symbolic link that leads out of the folder, to itself, to a device or nowhere."""
    remove(target)
    places = [canary / "file", canary / "folder", canary, canary / "new", target, Path("/dev/zero"), Path("/dev/null")]
    target.symlink_to(rng.choice(places))


def move_behind_link(_rng: random.Random, target: Path, canary: Path) -> None:
    """Replaces a file or folder by a link to a copy of it outside of the run folder."""
    outside = canary / f"moved-{target.name}"
    if not outside.exists():
        shutil.move(target, outside)
        target.symlink_to(outside)


def replace_by_pipe(_rng: random.Random, target: Path, _canary: Path) -> None:
    remove(target)
    os.mkfifo(target)


def replace_by_other_type(rng: random.Random, target: Path, _canary: Path) -> None:
    """Replaces a file by a folder, and a folder by a file."""
    was_folder = target.is_dir()
    remove(target)
    if was_folder:
        target.write_bytes(rng.choice(GARBAGE))
    else:
        target.mkdir()
        (target / "inside").write_text("x")


def make_huge(_rng: random.Random, target: Path, _canary: Path) -> None:
    if target.is_file():
        with target.open("ab") as file:
            file.truncate(HUGE)


def make_unreadable(rng: random.Random, target: Path, _canary: Path) -> None:
    target.chmod(rng.choice([0o000, 0o444, 0o555]))


def swap(rng: random.Random, target: Path, _canary: Path) -> None:
    """Swaps a file with another one of the same folder."""
    others = [path for path in target.parent.iterdir() if path != target and is_folder_or_small_file(path)]
    others = [path for path in others if path.is_file()]
    if target.is_file() and others:
        other = rng.choice(sorted(others))
        content = other.read_bytes()
        shutil.copyfile(target, other)
        target.write_bytes(content)


def add_odd_name(rng: random.Random, target: Path, _canary: Path) -> None:
    """Adds an attempt or a checkpoint with an unusual name beside the others, empty or a copy of another."""
    root = next(path for path in (target, *target.parents) if (path / "attempts").is_dir() or path.parent == path)
    if root.parent == root:
        return
    kind, names = rng.choice([("attempts", ODD_ATTEMPTS), ("checkpoints", ODD_CHECKPOINTS)])
    folder, name = root / kind, rng.choice(names)
    others = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not folder.is_dir() or (folder / name).exists():
        return
    if others and rng.random() < 0.6:
        copy_folder(rng.choice(others), folder / name)
    elif rng.random() < 0.5:
        (folder / name).mkdir()
    else:
        (folder / name).write_bytes(b"{}")


def copy_folder(source: Path, target: Path) -> None:
    """Copies the regular files of a folder; the pipes and huge files of earlier damage are left out."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_file() and is_folder_or_small_file(path):
            shutil.copyfile(path, target / path.name)


def nest_deeply(_rng: random.Random, target: Path, _canary: Path) -> None:
    folder = target if target.is_dir() else target.parent
    for _ in range(60):
        folder = folder / ("d" * 20)
    folder.mkdir(parents=True, exist_ok=True)


DAMAGE: dict[str, Callable[[random.Random, Path, Path], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        mutate,
        delete,
        replace_by_link,
        move_behind_link,
        replace_by_pipe,
        replace_by_other_type,
        make_huge,
        make_unreadable,
        swap,
        add_odd_name,
        nest_deeply,
    )
}
