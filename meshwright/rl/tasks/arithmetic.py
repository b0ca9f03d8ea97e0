"""The task `arithmetic`: expressions of integers, whose answer is their value. Torch-free."""

from __future__ import annotations

from meshwright.rl.tasks.draws import Draws
from meshwright.rl.tasks.task import Problem, Task, TaskLevel


def add_to_four(draws: Draws) -> Problem:
    return add(draws.integer(0, 4), draws.integer(0, 4))


def add_digits(draws: Draws) -> Problem:
    return add(draws.integer(0, 9), draws.integer(0, 9))


def add_or_subtract_digits(draws: Draws) -> Problem:
    first, second = draws.integer(0, 9), draws.integer(0, 9)
    return subtract(max(first, second), min(first, second)) if draws.integer(0, 1) else add(first, second)


def add_two_digits(draws: Draws) -> Problem:
    return add(draws.integer(10, 99), draws.integer(10, 99))


def subtract_two_digits(draws: Draws) -> Problem:
    return subtract(draws.integer(10, 99), draws.integer(10, 99))


def multiply_digits(draws: Draws) -> Problem:
    first, second = draws.integer(2, 9), draws.integer(2, 9)
    return f"{first}*{second}=", str(first * second)


def multiply_and_add(draws: Draws) -> Problem:
    first, second, third = draws.integer(10, 99), draws.integer(2, 9), draws.integer(0, 99)
    return f"{first}*{second}+{third}=", str(first * second + third)


def three_terms(draws: Draws) -> Problem:
    """A sum or difference of three terms, one of which is a product."""
    first, second, third, fourth = (draws.integer(1, 20) for _ in range(4))
    sign = draws.choice("+-")
    product = second * third
    return f"{first}{sign}{second}*{third}-{fourth}=", str(first + (product if sign == "+" else -product) - fourth)


def parentheses(draws: Draws) -> Problem:
    first, second, third, fourth = (draws.integer(1, 50) for _ in range(4))
    return f"({first}+{second})*({third}-{fourth})=", str((first + second) * (third - fourth))


def add(first: int, second: int) -> Problem:
    return f"{first}+{second}=", str(first + second)


def subtract(first: int, second: int) -> Problem:
    return f"{first}-{second}=", str(first - second)


ARITHMETIC = Task(
    "arithmetic",
    "0123456789-",
    (
        TaskLevel("sums of two numbers up to 4: answers of one digit", add_to_four, 4, 1),
        TaskLevel("sums of two digits", add_digits, 4, 2),
        TaskLevel("sums and differences of two digits, none negative", add_or_subtract_digits, 4, 2),
        TaskLevel("sums of two numbers of two digits", add_two_digits, 6, 3),
        TaskLevel("differences of two numbers of two digits, some negative", subtract_two_digits, 6, 3),
        TaskLevel("products of two digits", multiply_digits, 4, 2),
        TaskLevel("a product and a sum", multiply_and_add, 8, 3),
        TaskLevel("three terms, one of which is a product", three_terms, 12, 4),
        TaskLevel("a sum times a difference, in parentheses", parentheses, 16, 5),
    ),
)
