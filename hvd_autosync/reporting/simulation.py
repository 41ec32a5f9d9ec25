"""``hvd-autosync simulate``: a prediction as text."""

from __future__ import annotations

from collections.abc import Iterator

from hvd_autosync.engine.simulation import Range, Simulation
from hvd_autosync.reporting.words import seconds_text
from hvd_autosync.util.amounts import amount
from hvd_autosync.util.printable import printable


def simulation_text(simulation: Simulation) -> Iterator[str]:
    """Yield the lines of a report."""
    across = simulation.resources.links.across
    hosts = simulation.resources.hosts
    layout = f"{amount(len(hosts), 'host')} of {amount(hosts[0].slots, 'rank')}"
    if len({host.slots for host in hosts}) > 1:
        each = ", ".join(f"{printable(host.name)}:{host.slots}" for host in hosts)
        layout = f"{amount(simulation.resources.world_size, 'rank')} on {len(hosts)} hosts ({each})"
    rate = f", {across.bus_bytes_per_s * 8 / 1e9:.3g} Gbit/s" if across is not None else ""
    trials = amount(simulation.trials, "trial")
    yield f"On {layout}{rate}, by a cost model calibrated with {trials}:"
    yield f"  default strategy      {_seconds(simulation.default_s)} per step"
    yield f"  without communication {seconds_text(simulation.compute_s)} per step"
    share = 1 - simulation.compute_s / simulation.default_s.value
    yield f"  communication         {max(share, 0):.0%} of a step"
    if simulation.speedup.value < 1.005:
        yield "No exact strategy is expected to be faster."
    else:
        yield f"The best strategy by the model has speed-up {_times(simulation.speedup)}:"
        yield f"  {simulation.space.describe(simulation.best)}"
        yield f"  {_seconds(simulation.best_s)} per step"
    if simulation.asked_s is not None and simulation.asked_speedup is not None:
        yield f"The given strategy has speed-up {_times(simulation.asked_speedup)}:"
        yield f"  {_seconds(simulation.asked_s)} per step"
    yield (
        "In brackets: 90 % intervals, from the uncertainty of the calibration and the misfit of "
        f"the model ({simulation.misfit:.0%}). Nothing was run. Assumptions: ring networks without "
        "other traffic, and values of an ordinary server where nothing was measured."
    )


def _seconds(time: Range) -> str:
    return f"{seconds_text(time.value)} ({seconds_text(time.low)} to {seconds_text(time.high)})"


def _times(ratio: Range) -> str:
    return f"{ratio.value:.2f}x ({ratio.low:.2f}x to {ratio.high:.2f}x)"
