"""Makes a rank's files private, or reports why not and ends before the script starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from hvd_autosync.launch.private_files import FilesOrder, NotPrivateError, make_private
from hvd_autosync.runtime.driver.wire import write_message
from hvd_autosync.search_space.horovod_settings import RANK_VARIABLES

#: Message number; far above those of the ranks, which start at 0.
_NUMBER = 3 * 10**8
_EX_UNAVAILABLE = 69


def enter_or_refuse(environment: Mapping[str, str]) -> None:
    """Make this rank's files private if its environment requires it; end it if that fails."""
    try:
        order = FilesOrder.of(environment)
    except NotPrivateError as error:  # the key of the driver's messages is not known
        print(f"hvd-autosync: {error}", file=sys.stderr)
        os._exit(_EX_UNAVAILABLE)
    if order is None:
        return
    rank = next(int(environment[name]) for name in RANK_VARIABLES if name in environment)
    try:
        make_private(order, rank)
    except NotPrivateError as error:
        message = {"type": "refused", "trial": order.name, "reason": str(error)}
        write_message(2, order.key, rank, _NUMBER, message)
        os._exit(_EX_UNAVAILABLE)
