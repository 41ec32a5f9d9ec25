"""Lossless codes: their knobs, and for which classes of gradients they can pay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hvd_autosync.search_space.exchange_plan import (
    EMBEDDING,
    LARGE,
    REST,
    Classes,
    class_knob,
    class_of,
)
from hvd_autosync.search_space.knobs import CategoricalKnob, Condition, categorical_knob
from hvd_autosync.search_space.model_profile import ParameterProfile


def _knob(parameter_class: str, which: str) -> CategoricalKnob:
    exchange = class_knob(parameter_class, "exchange")
    return categorical_knob(
        class_knob(parameter_class, "lossless"),
        (False, True),
        False,
        group="exchange",
        help=f"Whether gradients of {which} travel as lossless codes, which are shorter where bits "
        "repeat.",
        # Those of the class "rest" have no other exchange.
        condition=Condition(exchange, ("allreduce", "hierarchical"))
        if parameter_class != REST
        else None,
    )


LOSSLESS_KNOBS = (
    _knob(EMBEDDING, "embedding tables (a batch touches few rows)"),
    _knob(LARGE, "large matrices"),
    _knob(REST, "all other parameters"),
)

#: Least bytes of a class; a message of fewer takes about as long when it is shorter.
_LEAST_BYTES = 256 * 1024
#: The largest share of the bytes that codes may have; coding takes time, too.
_MOST_SHARE = 0.9


def repeating_classes(
    gradients: Iterable[ParameterProfile], classes: Classes, ranks: int
) -> set[str]:
    """Return the classes whose lossless codes would have clearly fewer bytes.

    Two ranks send codes of gradients only; more ranks also send codes of sums, which have as many
    bytes before coding.

    Args:
        gradients: Parameters with dense gradients.
        classes: Their classes.
        ranks: Number of ranks.
    """
    size, coded = Counter[str](), Counter[str]()
    for p in gradients:
        share = p.coded_share if ranks == 2 else (p.coded_share + p.summed_share) / 2
        own = class_of(p.name, classes)
        size[own] += p.size_bytes
        coded[own] += round(share * p.size_bytes)
    return {
        name
        for name, size_bytes in size.items()
        if size_bytes >= _LEAST_BYTES and coded[name] <= _MOST_SHARE * size_bytes
    }
