"""For which classes of gradients lossless codes can pay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hvd_autosync.search_space.exchange_plan import LARGE, Classes, can_send_factors, class_of
from hvd_autosync.search_space.model_profile import ParameterProfile

#: Least bytes of a class; a message of fewer takes about as long when it is shorter.
_LEAST_BYTES = 256 * 1024
#: The largest share of the bytes that codes may have; coding takes time, too.
_MOST_SHARE = 0.9


def repeating_classes(
    gradients: Iterable[ParameterProfile], classes: Classes, ranks: int
) -> set[str]:
    """Return the classes whose gradients or factors have lossless codes of clearly fewer bytes.

    Of gradients two ranks send codes only; more ranks also send codes of sums, which have as many
    bytes before coding.

    Args:
        gradients: Parameters with dense gradients.
        classes: Their classes.
        ranks: Number of ranks.
    """
    size, coded = Counter[str](), Counter[str]()
    factors, coded_factors = Counter[str](), Counter[str]()
    for p in gradients:
        share = p.coded_share if ranks == 2 else (p.coded_share + p.summed_share) / 2
        own = class_of(p.name, classes)
        size[own] += p.size_bytes
        coded[own] += round(share * p.size_bytes)
        if own == LARGE and can_send_factors(p, ranks):
            factors[own] += p.factor_bytes
            coded_factors[own] += round(p.coded_factors_share * p.factor_bytes)
    return {
        name
        for name, size_bytes in size.items()
        if size_bytes >= _LEAST_BYTES
        and (
            coded[name] <= _MOST_SHARE * size_bytes
            or coded_factors[name] <= _MOST_SHARE * factors[name] > 0
        )
    }
