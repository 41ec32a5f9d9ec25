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


def be(number: float, *, past: bool = False) -> str:
    """Return the verb after an amount: ``is`` or ``are``, ``was`` or ``were``.

    Args:
        number: How many.
        past: Whether it is over.
    """
    if past:
        return "was" if number == 1 else "were"
    return "is" if number == 1 else "are"
