"""``hvd-autosync simulate``: a prediction in words."""

from __future__ import annotations

from collections.abc import Iterator

from hvd_autosync.engine.simulation import Range, Simulation
from hvd_autosync.reporting.words import seconds_text


def simulation_text(simulation: Simulation) -> Iterator[str]:
    """The lines of a report."""
    across = simulation.resources.links.across
    hosts, slots = len(simulation.resources.hosts), simulation.resources.hosts[0].slots
    layout = f"{_count(hosts, 'host')} of {_count(slots, 'rank')}"
    rate = f", {across.bus_bytes_per_s * 8 / 1e9:.3g} Gbit/s" if across is not None else ""
    yield f"On {layout}{rate}, by a model that {simulation.trials} trials have calibrated:"
    yield f"  as it is            {_seconds(simulation.default_s)} per step"
    yield f"  without the network {seconds_text(simulation.compute_s)} per step"
    share = 1 - simulation.compute_s / simulation.default_s.value
    yield f"  waiting for it      {max(share, 0):.0%} of a step"
    if simulation.speedup.value < 1.005:
        yield "No exact strategy is expected to be faster."
    else:
        yield f"The best strategy by the model is {_times(simulation.speedup)} faster:"
        yield f"  {simulation.space.describe(simulation.best)}"
        yield f"  {_seconds(simulation.best_s)} per step"
    if simulation.asked_s is not None and simulation.asked_speedup is not None:
        yield f"The strategy that was asked for is {_times(simulation.asked_speedup)} as fast:"
        yield f"  {_seconds(simulation.asked_s)} per step"
    yield (
        "In brackets: 90 % intervals, from what the trials leave open and from how far they were "
        f"from the model ({simulation.misfit:.0%}). Nothing was run; networks are taken for rings "
        "without other traffic, and what was not measured for an ordinary server."
    )


def _seconds(time: Range) -> str:
    return f"{seconds_text(time.value)} ({seconds_text(time.low)} to {seconds_text(time.high)})"


def _times(ratio: Range) -> str:
    return f"{ratio.value:.2f}x ({ratio.low:.2f}x to {ratio.high:.2f}x)"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
