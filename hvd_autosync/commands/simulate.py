"""``hvd-autosync simulate``."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from hvd_autosync.commands.common import StoreOption, StudyArgument, console, open_store
from hvd_autosync.errors import ConfigurationError

if TYPE_CHECKING:
    from hvd_autosync.search_space import Resources, Strategy
    from hvd_autosync.traces import StudyRecord

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g|t)bit(?:/s|ps)?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s)")
_FACTORS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_MOST = 1_000_000


def add_command(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(simulate)


def simulate(
    study: StudyArgument = "last",
    hosts: Annotated[
        int | None, typer.Option(min=1, max=_MOST, help="Hosts; as in the study by default.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=_MOST, help="Ranks on each host; likewise.")
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="What a host can send to others, e.g. 25gbit; likewise."),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of a message between hosts (default: 50us).")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Predict this one too; it may change the model (asp, codecs)."
        ),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Predict what a job would do on another cluster, and which strategy would win there.

    The model, its times and its trials are those of a study; nothing is run:

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
    record = traces.study(study)
    if record.task is None:
        raise ConfigurationError(
            f"study {record.study_id} knows no model and no cluster",
            hint="Name another study; hvd-autosync traces list shows them.",
        )
    resources = record.task.resources
    if (hosts, slots, rate, hop) != (None, None, None, None):
        layout = hosts or len(resources.hosts), slots or resources.hosts[0].slots
        if layout[0] > 1 and rate is None and not resources.several_hosts:
            raise ConfigurationError(
                f"study {record.study_id} ran on one host, so that no network between hosts is "
                "known",
                hint="Say what a host can send, as with --bandwidth 25gbit.",
            )
        resources = hypothetical_resources(resources, *layout, rate, hop)
    asked = None if strategy is None else _asked(strategy, record, resources)
    out = console()
    trials = traces.trials(record.study_id)
    for line in simulation_text(predict(record, trials, resources, asked=asked)):
        out.print(line)


def _asked(path: str, record: StudyRecord, resources: Resources) -> Strategy:
    """The strategy of a file, of which the cost model can tell what it does.

    Raises:
        AutosyncError: The file cannot be read, does not fit the model or the cluster, or speaks of
            what the cost model does not know.
    """
    from hvd_autosync.search_space import CATALOGUE
    from hvd_autosync.search_space.documents import read_toml
    from hvd_autosync.search_space.exchange_plan import class_of, parameter_classes
    from hvd_autosync.search_space.strategy_file import check_fits, check_model, read_strategy

    assert record.task is not None, "looked at before"
    model = record.task.model
    asked, classes = read_strategy(read_toml(path, "the strategy file"))
    check_fits(asked, resources.hosts, dict(record.space.fixed) if record.space else {})
    check_model(asked, classes, model)
    for knob in asked.keys() - {known.name for known in CATALOGUE}:
        raise ConfigurationError(
            f"knob {knob} is an extension's, of which the cost model knows nothing",
            hint="Leave it out: what is predicted is then the strategy without it.",
        )
    measured = parameter_classes(model)
    for name in classes:
        members = {p.name for p in model.parameters if class_of(p.name, classes) == name}
        own = sorted(measured.get(name, ()))
        if any(knob.startswith(f"{name}_") for knob in asked) and members != set(own):
            raise ConfigurationError(
                f"class {name} of {path} is not that of study {record.study_id}, by which the cost "
                f"model goes: {', '.join(sorted(members))}",
                hint=f"Write [classes] {name} = {json.dumps(own)}."
                if own
                else f"Its model has none of class {name}: leave these knobs out.",
            )
    return asked


def _rate(text: str) -> float:
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigurationError(
            f"--bandwidth {text!r} is no rate", hint="Write for example 25gbit or 100mbit."
        )
    return float(match[1]) * _FACTORS[match[2].lower()] / 8


def _time(text: str) -> float:
    match = _TIME.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigurationError(
            f"--latency {text!r} is no time", hint="Write for example 20us or 0.5ms."
        )
    return float(match[1]) * _SECONDS[match[2]]
