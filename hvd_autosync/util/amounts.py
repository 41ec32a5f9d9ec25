"""Amounts of things in messages."""

from __future__ import annotations

import re


def amount(number: float, thing: str) -> str:
    """Return ``1 trial``, ``3 trials``, ``2 studies``, ``0.5 minutes``.

    Args:
        number: How many.
        thing: What, in the singular; its plural ends in s, or in ies instead of a consonant and y.
    """
    shown = f"{number:g}" if isinstance(number, float) else str(number)
    plural = re.sub("(?<=[^aeiou])y$", "ie", thing) + "s"
    return f"{shown} {thing if number == 1 else plural}"


def four_digits(number: float) -> str:
    """Return ``0.5``, ``36004``: four digits, or all before the point instead of an exponent.

    Args:
        number: A number of at least 0.
    """
    return f"{number:.4g}" if number < 1000 else f"{number:.0f}"


def be(number: float, *, past: bool = False) -> str:
    """Return the verb after an amount: ``is`` or ``are``, ``was`` or ``were``.

    Args:
        number: How many.
        past: Whether it is over.
    """
    if past:
        return "was" if number == 1 else "were"
    return "is" if number == 1 else "are"
