"""What does a step without a barrier take and send, and what does the switch to it cost?

Two hosts with a rank or two each, which this machine imitates (``hvd_autosync.testing.Testbed``;
needs root), train copies of one model, one under each protocol, in turn. The bytes are those that
leave a host's interface, with all headers. "hidden" is the share of the waiting that goes away
because buckets are sent in backward: against a copy that sends all of them at its end. The second
table has the seconds from the vote to the first step without a barrier (with and without the
opening of connections), and back.

    python benchmarks/protocols.py --rates 100 --models vgg
    python benchmarks/protocols.py --controllers gloo,mpi --slots 1 --output protocols.csv
    python benchmarks/protocols.py --show protocols.csv
"""

from __future__ import annotations

import csv
import os
import statistics
import sys
from time import perf_counter
from typing import Any

from command_line import add_table, need_hosts, new_parser, open_table, own_part, parse
from rich.console import Console
from rich.table import Table

from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.testing import Testbed

_HOSTS = 2
_COLUMNS = (
    "controller",
    "rate_mbit",
    "slots",
    "model",
    "protocol",
    "round",
    "step_s",
    "waited_s",
    "sent_bytes",
    "gradient_bytes",
)
#: Name -> protocol, and whether buckets wait for the end of backward; ``None``: Horovod's own.
_PROTOCOLS: dict[str, tuple[Protocol, bool] | None] = {
    "Horovod": None,
    "SSP(0)": (Protocol("ssp", 0), False),
    "SSP(2)": (Protocol("ssp", 2), False),
    "ASP": (Protocol("asp"), False),
    "ASP, after backward": (Protocol("asp"), True),
}
_SWITCHES = ("first switch", "second switch", "back")


class Timed:
    """A method of an object, whose calls are timed."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds: list[float] = []
        self._method = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            return self._method(*args, **kwargs)
        finally:
            self.seconds.append(perf_counter() - began)


def work(
    controller: str,
    rate: float,
    slots: int,
    models: list[str],
    rounds: int,
    steps: int,
    output: str,
) -> None:
    """A rank's part: train, count, and on rank 0 write down."""
    import horovod.torch as hvd
    import torch
    from exchanged.interface import sent_bytes
    from exchanged.models import MODELS
    from exchanged.trainers import Trainer
    from torch.utils.data import DataLoader

    from hvd_autosync.runtime.collectives.messaging import prepare_messaging
    from hvd_autosync.search_space.exchange_plan import ExchangePlan

    prepare_messaging()
    hvd.init()
    torch.set_num_threads(1)

    def write(*row: object) -> None:
        if hvd.rank() == 0:
            with open(output, "a", newline="") as file:
                csv.writer(file).writerow((controller, rate, slots, *row))

    def a_pass(trainer: Any, waits: Timed) -> tuple[float, float, float]:
        own, before, count = [], sent_bytes(), len(waits.seconds)
        for _ in DataLoader(range(steps), batch_size=None):  # type: ignore[arg-type]
            own.append(trainer.step())
        numbers = [
            statistics.median(own),
            statistics.median(waits.seconds[count:]),
            (sent_bytes() - before) / steps,
        ]
        most = hvd.allreduce(torch.tensor(numbers), op=hvd.Max, name="most").tolist()
        return most[0], most[1], most[2]

    for model in models:
        trainers: dict[str, tuple[Any, Timed]] = {}
        for number, (name, how) in enumerate(_PROTOCOLS.items()):
            plan = None if how is None else ExchangePlan()
            protocol = None if how is None else how[0]
            trainer = Trainer(f"{model}.{number}", MODELS[model], plan, protocol)
            phases: Any = None if how is None else trainer.optimizer._sync.method
            if how is not None and how[1]:
                phases._script_uses_gradients = True
            begun = None if phases is None else Timed(phases, "_begin")
            waits = Timed(
                *((trainer.optimizer, "synchronize") if phases is None else (phases, "on_step_end"))
            )
            trainers[name] = trainer, waits
            a_pass(trainer, waits) if phases is None else _begin(trainer, steps)
            if name == "ASP":
                leave = Timed(phases, "before_sharing")
                phases.before_sharing()
                _begin(trainer, steps)
                assert begun is not None, "it has phases"
                for switch, seconds in zip(
                    _SWITCHES, (*begun.seconds[:2], leave.seconds[0]), strict=True
                ):
                    write(model, switch, 0, seconds, 0, 0, trainer.bytes)
        for number in range(rounds):
            for name, (trainer, waits) in trainers.items():
                write(model, name, number, *a_pass(trainer, waits), trainer.bytes)


def _begin(trainer: Any, steps: int) -> None:
    """Train until steps have no barrier."""
    from torch.utils.data import DataLoader

    for _ in DataLoader(range(max(steps, 16)), batch_size=None):  # type: ignore[arg-type]
        trainer.step()
    assert trainer.optimizer._sync.method.running


def show(output: str) -> None:
    """Print the tables of a file of measurements."""
    with open(output) as file:
        rows = list(csv.DictReader(file))
    table = Table(title="two hosts", title_justify="left")
    for column in ("controller", "Mbit/s", "ranks on each", "model", "protocol"):
        table.add_column(column)
    for column in ("step ms", "of rounds", "speedup", "waited ms", "hidden", "of gradients"):
        table.add_column(column, justify="right")
    keys = ("controller", "rate_mbit", "slots", "model")
    for key in dict.fromkeys(tuple(row[each] for each in keys) for row in rows):
        own = [row for row in rows if tuple(row[each] for each in keys) == key]
        base = {r["round"]: float(r["step_s"]) for r in own if r["protocol"] == "Horovod"}
        late = [float(r["waited_s"]) for r in own if r["protocol"] == "ASP, after backward"]
        for name in _PROTOCOLS:
            of_name = [row for row in own if row["protocol"] == name]
            times = [1e3 * float(row["step_s"]) for row in of_name]
            waited = statistics.median(float(row["waited_s"]) for row in of_name)
            ratios = [base[row["round"]] / float(row["step_s"]) for row in of_name]
            sent = statistics.median(
                float(r["sent_bytes"]) / float(r["gradient_bytes"]) for r in of_name
            )
            hidden = f"{1 - waited / statistics.median(late):.0%}" if name == "ASP" else ""
            table.add_row(
                *key,
                name,
                f"{statistics.median(times):.1f}",
                f"{min(times):.1f} .. {max(times):.1f}",
                f"{statistics.median(ratios):.2f}",
                f"{1e3 * waited:.1f}",
                hidden,
                f"{sent:.2f}",
            )
        table.add_section()
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table)
    switches = Table(title="switches, seconds", title_justify="left")
    for column in (*keys, *_SWITCHES):
        switches.add_column(column)
    for key in dict.fromkeys(tuple(row[each] for each in keys) for row in rows):
        own = [row for row in rows if tuple(row[each] for each in keys) == key]
        switches.add_row(
            *key,
            *(
                f"{statistics.median(float(r['step_s']) for r in own if r['protocol'] == name):.3f}"
                for name in _SWITCHES
            ),
        )
    console.print(switches)


def main() -> None:
    """Runs the benchmark, or a rank's part of it."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--controllers", default="gloo", metavar="C,...", help="(default: %(default)s)")
    add("--rates", default="100,1000", metavar="MBIT,...", help="(default: %(default)s)")
    add("--slots", type=int, default=2, help="ranks on each host (default: %(default)s)")
    add("--models", default="ncf,vgg,bert", metavar="M,...", help="(default: %(default)s)")
    add("--rounds", type=int, default=4, help="(default: %(default)s)")
    add("--steps", type=int, default=8, help="of each protocol in a round (default: %(default)s)")
    add_table(parser, "protocols.csv", "every measurement")
    args = parse(parser, show, work)
    need_hosts()
    output = open_table(parser, args, _COLUMNS)
    for controller in args.controllers.split(","):
        for rate in map(float, args.rates.split(",")):
            script = own_part(
                __file__,
                controller=controller,
                rate=rate,
                slots=args.slots,
                models=args.models.split(","),
                rounds=args.rounds,
                steps=args.steps,
                output=output,
            )
            with Testbed(_HOSTS, rate) as bed:
                command = ["horovodrun", *bed.horovodrun_options(args.slots), f"--{controller}"]
                if controller == "mpi":
                    command += [
                        "--binding-args=--bind-to none --map-by slot",
                        "--mpi-args=--oversubscribe",
                    ]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = bed.run([*command, *script], env=environment)
            if done.returncode:
                sys.exit(f"the job at {rate:g} Mbit/s ended with status {done.returncode}")
    show(output)


if __name__ == "__main__":
    main()
