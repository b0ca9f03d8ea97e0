"""Names the newest checkpoint in a file that is written in place. Expected check: kill."""

from meshwright_practice.labs.crash_safe_checkpoint.solution import save as save_file


def save(folder, step, payload):
    save_file(folder, step, payload)
    (folder / "latest").write_text(str(step))


def load(folder):
    if not (folder / "latest").exists():
        return None
    step = int((folder / "latest").read_text())
    return step, (folder / f"step-{step}.ckpt").read_bytes()[32:]
