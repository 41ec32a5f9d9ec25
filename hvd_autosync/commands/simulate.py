"""``hvd-autosync simulate``: predict a job on another cluster."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from hvd_autosync.commands.common import (
    StoreOption,
    StudyArgument,
    console,
    mention_failed,
    open_store,
    refuse_without_effect,
)
from hvd_autosync.errors import ConfigurationError

if TYPE_CHECKING:
    from hvd_autosync.search_space import Resources, Strategy
    from hvd_autosync.traces import StudyRecord

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g|t)bit(?:/s|ps)?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s)")
_FACTORS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_MOST = 1_000_000
#: For twice as many a prediction takes more than a minute.
_MOST_HOSTS = 50_000


def add_command(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(simulate)


def simulate(
    context: typer.Context,
    study: StudyArgument = "last",
    hosts: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST_HOSTS, help="Number of hosts. Default: as in the study."),
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=_MOST, help="Ranks per host. Default: as in the study.")
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Network bandwidth of a host, e.g. 25gbit. Default: as in the study.",
        ),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Latency of a message between hosts. Default: 50us."),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Also predict the strategy of this file, which may be lossy."
        ),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Predict the step time of a job and its fastest strategy on another cluster.

    The prediction uses the model profile and the trials of a study; nothing is run:

    \b
      hvd-autosync simulate --hosts 64 --slots 8 --bandwidth 25gbit
      hvd-autosync simulate --hosts 8 --strategy asp.toml
    """
    from hvd_autosync.cost.hypothetical import hypothetical_resources
    from hvd_autosync.engine.simulation import simulate as predict
    from hvd_autosync.reporting.simulation import simulation_text

    rate = None if bandwidth is None else _rate(bandwidth)
    hop = None if latency is None else _time(latency)
    traces = open_store(store)
    mention_failed(traces, study, store)
    record = traces.study(study)
    if record.task is None:
        raise ConfigurationError(
            f"study {record.study_id} has no profile of a model and a cluster",
            hint="Choose another study; hvd-autosync traces list shows them.",
        )
    resources = record.task.resources
    if (hosts or len(resources.hosts)) == 1:
        why = "on one host (--hosts N is for several)"
        refuse_without_effect(context, why, "bandwidth", "latency")
    if (hosts, slots, rate, hop) != (None, None, None, None):
        if (hosts or len(resources.hosts)) > 1 and rate is None and not resources.several_hosts:
            raise ConfigurationError(
                f"study {record.study_id} ran on one host: the bandwidth between hosts is unknown",
                hint="Give it, for example --bandwidth 25gbit.",
            )
        resources = hypothetical_resources(resources, hosts, slots, rate, hop)
    asked = None if strategy is None else _asked(strategy, record, resources)
    out = console()
    trials = traces.trials(record.study_id)
    for line in simulation_text(predict(record, trials, resources, asked=asked)):
        out.print(line)


def _asked(path: str, record: StudyRecord, resources: Resources) -> Strategy:
    """Read a strategy file that the cost model can predict.

    Raises:
        AutosyncError: The file cannot be read, does not fit the model or the cluster, or sets knobs
            that the cost model does not know.
    """
    from hvd_autosync.search_space import CATALOGUE
    from hvd_autosync.search_space.documents import read_toml
    from hvd_autosync.search_space.exchange_plan import class_of, parameter_classes
    from hvd_autosync.search_space.strategy_file import check_fits, check_model, read_strategy

    assert record.task is not None, "the caller has checked"
    model = record.task.model
    asked, classes = read_strategy(read_toml(path, "the strategy file"))
    check_fits(asked, resources.hosts, dict(record.space.fixed) if record.space else {})
    check_model(asked, classes, model)
    for knob in asked.keys() - {known.name for known in CATALOGUE}:
        raise ConfigurationError(
            f"the cost model cannot predict knob {knob}, which belongs to an extension",
            hint="Remove the knob to predict the strategy without it.",
        )
    measured = parameter_classes(model)
    for name in classes:
        members = {p.name for p in model.parameters if class_of(p.name, classes) == name}
        own = sorted(measured.get(name, ()))
        if any(knob.startswith(f"{name}_") for knob in asked) and members != set(own):
            raise ConfigurationError(
                f"class {name} of {path} ({', '.join(sorted(members))}) is not the class {name} of "
                f"study {record.study_id}, which the cost model uses",
                hint=f"Write [classes] {name} = {json.dumps(own)}."
                if own
                else f"The model has no parameters of class {name}: remove the knobs of it.",
            )
    return asked


def _rate(text: str) -> float:
    """Return a rate in bytes per second."""
    match = _RATE.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) <= _MOST:
        raise ConfigurationError(
            f"invalid value {text!r:.200} for --bandwidth",
            hint="Write for example 25gbit or 100mbit.",
        )
    return float(match[1]) * _FACTORS[match[2].lower()] / 8


def _time(text: str) -> float:
    """Return a time in seconds."""
    match = _TIME.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) <= _MOST:
        raise ConfigurationError(
            f"invalid value {text!r:.200} for --latency", hint="Write for example 20us or 0.5ms."
        )
    return float(match[1]) * _SECONDS[match[2]]
