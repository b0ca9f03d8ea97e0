"""Lab: checkpoints that survive a crash at any time."""

from meshwright_practice.labs.lab import Lab, LabFunction

LAB = Lab(
    id="crash_safe_checkpoint",
    title="A checkpoint that survives a crash at any time",
    problem=(
        "A job may be killed, or the machine may lose power, at any moment while a checkpoint is written. After that, "
        "load must return a checkpoint that is complete: the new one or the one before it, never half of one. Once "
        "save has returned, the new checkpoint must be there even after a loss of power. The checks record every call "
        "that touches the disk, build each state in which a crash could leave the folder, and call load on it. "
        "They also truncate files and flip bits."
    ),
    functions=(
        LabFunction("save", ("folder", "step", "payload"), "None", "writes a checkpoint of a step into the folder"),
        LabFunction(
            "load", ("folder",), "tuple[int, bytes] | None", "returns step and payload of the newest intact checkpoint"
        ),
    ),
    checks=(
        "functions return",
        "newest",
        "first checkpoint",
        "kill",
        "power loss",
        "durable after return",
        "torn file",
        "flipped bit",
        "save after a crash",
    ),
    hints=(
        "A file that is written in place is torn while it is written. Write a temporary file in the same folder, and "
        "rename it with os.replace when it is complete: a rename happens as a whole.",
        "A rename may reach the disk before the data of the file. Call file.flush() and os.fsync(file.fileno()) before "
        "os.replace.",
        "The new name itself is data of the folder. Open the folder with os.open(folder, os.O_RDONLY) and os.fsync it "
        "after the rename.",
        "Store a digest, such as hashlib.sha256(payload).digest(), in front of the payload. load compares it, and goes "
        "on with the checkpoint before if it differs. So keep the one before.",
        "Step 10 is newer than step 9, but '10' < '9' as text: compare numbers, or fill up with zeros.",
    ),
    items=(69, 85),
    chapter="handbook/failure-plane.md",
)
