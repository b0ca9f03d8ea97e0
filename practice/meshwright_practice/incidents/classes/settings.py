"""The settings of the jobs that incidents run: small models that train on the CPU of this machine. Torch-free."""

from __future__ import annotations

from random import Random

JOB = (
    "--launch.device=cpu",
    "--launch.restarts=0",
    "--data.kind=synthetic",
    "--eval.every=0",
    "--checkpoint.seconds=0",
    "--checkpoint.keep=9",
    "--schedule.warmup=2",
    "--launch.grace_period=10",
)
"""Settings of every job; later ones override them."""


def decoder(dice: Random, steps: int, ranks: int) -> tuple[str, ...]:
    """A decoder of random sizes. The global batch divides by two, three and four ranks."""
    width, layers = dice.choice((64, 80, 96)), dice.choice((2, 3))
    return sizes(width, layers, dice.choice((32, 48, 64)), 12, steps, ranks)


def sizes(width: int, layers: int, sequence: int, batch: int, steps: int, ranks: int) -> tuple[str, ...]:
    return (
        *JOB,
        f"--model.width={width}",
        f"--model.layers={layers}",
        f"--model.ffn={2 * width}",
        f"--data.sequence={sequence}",
        f"--batch.global={batch}",
        f"--steps={steps}",
        f"--ranks={ranks}",
    )


def custom(steps: int, ranks: int) -> tuple[str, ...]:
    """A job that trains a model of its own."""
    settings = (*JOB, "--batch.global=12", f"--steps={steps}", f"--ranks={ranks}")
    return tuple(setting for setting in settings if not setting.startswith("--data."))


def ranks_of(dice: Random) -> int:
    return dice.choice((2, 3))


def onset(dice: Random, steps: int) -> int:
    """The first step of a fault that lasts to the end: early, so that most steps show it."""
    return dice.randint(4, max(5, steps // 12))


def moment(dice: Random, steps: int) -> int:
    """The step of a fault that happens once."""
    return dice.randint(max(8, steps // 8), steps // 3)


def hang_timeout(steps: int) -> str:
    """Long enough to look at the hang while it lasts, in a job of the default length."""
    return f"--launch.hang_timeout={12 + steps // 16}"


def around(step: int) -> tuple[int, int]:
    """The steps that count as `step` in an answer: a figure on a screen is read a few steps early or late."""
    return max(0, step - 3), step + 5
