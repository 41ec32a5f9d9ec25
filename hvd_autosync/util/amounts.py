"""Amounts of things in messages."""

from __future__ import annotations


def amount(number: float, thing: str) -> str:
    """Return ``1 trial``, ``3 trials``, ``0.5 minutes``.

    Args:
        number: How many.
        thing: What, in the singular; its plural ends in s.
    """
    shown = f"{number:g}" if isinstance(number, float) else str(number)
    return f"{shown} {thing}{'s' * (number != 1)}"
