"""Finds the rows of a gradient that a batch touched.

A module of its own, because every trial profiles with it.
"""

from __future__ import annotations

import torch

#: Bytes of an element -> the integer type of that size.
_INTEGERS = {2: torch.int16, 4: torch.int32}


def touched_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Indices of the rows of ``gradient``, shape ``(rows, ...)``, that are not all zero."""
    if not gradient.numel():
        return torch.empty(0, dtype=torch.int64, device=gradient.device)
    rows = gradient.view(len(gradient), -1)
    if rows.element_size() in _INTEGERS:
        # Viewed as integers, zeros stay zero and other values nonzero; extremes of integers are
        # found several times faster than any floating-point test.
        bits = rows.view(_INTEGERS[rows.element_size()])
        touched = (bits.amax(dim=1) != 0).logical_or_(bits.amin(dim=1) != 0)
    else:
        touched = rows.any(dim=1)
    return touched.nonzero().squeeze(1)
