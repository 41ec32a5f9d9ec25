"""What does each exchange put on the slow link, and what does a step take with it?

Two ranks on each of two hosts, which this machine imitates (``hvd_autosync.testing.Testbed``; needs
root), train copies of one model, one under each exchange, in turn: in one job those of one level,
in the next those of two, for process sets slow down whoever is in their job. The bytes are those
that leave a host's interface, counted there with all headers. Beside them is the law: what a step's
operations put on that link by the algorithm of each (a ring for allreduce and allgather), and what
as many operations of one element put there. An existing output file is continued
with the same options: jobs that it has whole are left out, one that was broken off runs again.

    python benchmarks/exchanges.py --rates 100 --models ncf
    python benchmarks/exchanges.py --exchanges "Horovod,4 buckets,lossless" --slots 1 --autocast
    python benchmarks/exchanges.py --output exchanges.csv
"""

from __future__ import annotations

import csv
import math
import os
import statistics
import sys
import time
from dataclasses import replace

from command_line import (
    add_table,
    check_names,
    commit_now,
    need_hosts,
    new_parser,
    open_table,
    own_part,
    parse,
    read_table,
)
from mean_interval import mean_interval
from rich.console import Console
from rich.table import Table

from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.horovod_settings import OURS_ALONE, PROCESS_SETS_VARIABLE
from hvd_autosync.testing import Testbed

_HOSTS, _SLOTS = 2, 2
_LEVEL = 0.9  # of the intervals
_COLUMNS = (
    "commit",
    "job",
    "rate_mbit",
    "model",
    "exchange",
    "round",
    "step_s",
    "sent_bytes",
    "gradient_bytes",
    "slots",
    "autocast",
    "law_bytes",
    "empty_bytes",
    "operations",
)


def _all(plan: ClassPlan, buckets: int = 0) -> ExchangePlan:
    return ExchangePlan(buckets, embedding=plan, large=plan, rest=plan)


_HIERARCHICAL, _ROWS, _SHARDED = map(ClassPlan, ("hierarchical", "rows", "sharded"))
Row = dict[str, str]
#: Name -> plan; ``None`` is Horovod's own optimizer.
EXCHANGES: dict[str, ExchangePlan | None] = {
    "Horovod": None,
    "allreduce": ExchangePlan(),
    "4 buckets": ExchangePlan(4),
    "hierarchical": _all(_HIERARCHICAL, 4),
    "rows": ExchangePlan(0, "ordered", embedding=_ROWS),
    "rows, hierarchical": replace(_all(_HIERARCHICAL, 4), embedding=_ROWS),
    "sharded": ExchangePlan(4, embedding=_SHARDED, large=_SHARDED),
    "factors": ExchangePlan(4, large=ClassPlan("factors")),
    "factors, hierarchical": ExchangePlan(4, large=ClassPlan("hierarchical_factors")),
    "factors, lossless": ExchangePlan(4, large=ClassPlan("factors", lossless=True)),
    "priority": ExchangePlan(order="priority"),
    "lossless": _all(ClassPlan(lossless=True), 4),
    "lossless, hierarchical": _all(ClassPlan("hierarchical", lossless=True), 4),
    "fp16": _all(ClassPlan(codec="fp16"), 4),
    "int8": _all(ClassPlan(codec="int8"), 4),
    "int8, hierarchical": _all(ClassPlan("hierarchical", codec="int8"), 4),
    "topk 1 %": _all(ClassPlan(codec="topk"), 4),
    "powersgd 2": ExchangePlan(4, "ordered", "arrival", _ROWS, ClassPlan(codec="powersgd")),
}


def work(
    commit: str,
    job: str,
    rate: float,
    models: list[str],
    exchanges: list[str],
    rounds: int,
    steps: int,
    output: str,
    slots: int,
    autocast: bool,
) -> None:
    """A rank's part: train, count, and on rank 0 write down."""
    import horovod.torch as hvd
    import torch
    from exchanged.interface import sent_bytes
    from exchanged.models import MODELS
    from exchanged.operations import Operations, repeat_empty
    from exchanged.trainers import Trainer

    from hvd_autosync.runtime.collectives.levels import prepare_levels

    prepare_levels()
    hvd.init()
    torch.set_num_threads(1)
    for model in models:
        trainers = {
            name: Trainer(f"{model}.{number}", MODELS[model], EXCHANGES[name], autocast=autocast)
            for number, name in enumerate(exchanges)
        }
        for number in range(rounds + 1):
            for name, trainer in trainers.items():
                trainer.step()  # whatever the one before left in caches and queues
                before = sent_bytes()
                with Operations() as operations:
                    own = [trainer.step() for _ in range(steps)]
                sent = sent_bytes() - before
                begun = operations.begun
                repeat_empty(begun, steps)  # negotiated once
                before = sent_bytes()
                for _ in range(steps):
                    repeat_empty(begun, steps)
                empty = sent_bytes() - before
                law = torch.zeros(hvd.size() // slots, dtype=torch.float64)
                law[hvd.rank() // slots] = sum(
                    each.leaving_bytes(hvd.rank(), slots) for each in begun
                )
                most = float(hvd.allreduce(law, op=hvd.Sum, name="law").max())
                slowest = torch.tensor(
                    [statistics.median(own), sent, empty, most], dtype=torch.float64
                )
                slowest = hvd.allreduce(slowest, op=hvd.Max, name="slowest")
                if number > 0 and hvd.rank() == 0:
                    step_s, *counted = slowest.tolist()
                    all_bytes, empty_bytes, law_bytes = (each / steps for each in counted)
                    what = (commit, job, rate, model, name, number)
                    where = (trainer.bytes, slots, autocast)
                    beside = (law_bytes, empty_bytes, len(begun) / steps)
                    with open(output, "a", newline="") as file:
                        csv.writer(file).writerow([*what, step_s, all_bytes, *where, *beside])


def _read(output: str) -> list[Row]:
    """Rows of the last job of each exchange, in each setting."""
    rows = read_table(output, "job")
    last = {_cell(each): each["job"] for each in rows}
    return [each for each in rows if each["job"] == last[_cell(each)]]


def _cell(row: Row) -> tuple[str, ...]:
    return (*_setting(row), row["exchange"])


def _setting(row: Row) -> tuple[str, ...]:
    """Where and what a row measured, but for the exchange."""
    return row["slots"], row["autocast"], f"{float(row['rate_mbit']):g}", row["model"]


def show(output: str) -> None:
    """Print the tables of a file of measurements, one for each number of ranks and type."""
    rows = _read(output)
    for slots, autocast in dict.fromkeys(_setting(each)[:2] for each in rows):
        _show(slots, autocast, [r for r in rows if _setting(r)[:2] == (slots, autocast)])


def _show(slots: str, autocast: str, rows: list[Row]) -> None:
    what = ", bfloat16 autocast" if autocast == "True" else ""
    title = f"exchanges: two hosts, ranks on each: {slots}{what}"
    table = Table(title=title, title_justify="left")
    for column in ("Mbit/s", "model", "exchange"):
        table.add_column(column)
    speedup = f"speedup ({_LEVEL:.0%})"
    for column in ("step ms", "of rounds", speedup, "MiB/step", "of gradients", "law", "over it"):
        table.add_column(column, justify="right")
    last = None
    for key in dict.fromkeys((r["rate_mbit"], r["model"], r["exchange"]) for r in rows):
        own = [r for r in rows if (r["rate_mbit"], r["model"], r["exchange"]) == key]
        times = [1e3 * float(r["step_s"]) for r in own]
        base = {
            r["round"]: float(r["step_s"])
            for r in rows
            if (r["rate_mbit"], r["model"], r["exchange"]) == (*key[:2], "Horovod")
        }
        ratios = [
            math.log(base[r["round"]] / float(r["step_s"])) for r in own if r["round"] in base
        ]
        sent = statistics.median(float(r["sent_bytes"]) for r in own)
        share = sent / float(own[0]["gradient_bytes"])
        if last not in (None, key[:2]):
            table.add_section()
        last = key[:2]
        table.add_row(
            f"{float(key[0]):g}",
            key[1],
            key[2],
            f"{statistics.median(times):.1f}",
            f"{min(times):.1f} .. {max(times):.1f}",
            _speedup(ratios),
            f"{sent / 2**20:.2f}",
            f"{share:.2f}",
            *_law(own, sent),
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _speedup(log_ratios: list[float]) -> str:
    """The geometric mean of the rounds' ratios, with its interval if there are several."""
    if not log_ratios:
        return ""
    mean, low, high = map(math.exp, mean_interval(log_ratios, _LEVEL))
    return f"{mean:.2f}" if math.isnan(low) else f"{mean:.2f} ({low:.2f} .. {high:.2f})"


def _law(rows: list[Row], sent: float) -> tuple[str, str]:
    """Return the law's share of the gradients, and what was sent for each byte that had to be.

    That is the law's, and that of as many empty operations. Earlier files have neither.
    """
    if not rows[0].get("law_bytes"):
        return "", ""
    law, empty = (
        statistics.median(float(row[name]) for row in rows) for name in ("law_bytes", "empty_bytes")
    )
    return f"{law / float(rows[0]['gradient_bytes']):.2f}", f"{sent / (law + empty):.2f}"


def main() -> None:
    """Runs the benchmark, or a rank's part of it."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--rates", default="50,100,300,1000", metavar="MBIT,...", help="(default: %(default)s)")
    add("--models", default="ncf,vgg,bert", metavar="M,...", help="(default: %(default)s)")
    add(
        "--exchanges",
        default=",".join(n.replace(", ", "+") for n in EXCHANGES),
        metavar="E,...",
        help="(default: %(default)s)",
    )
    add("--rounds", type=int, default=4, help="(default: %(default)s)")
    add("--steps", type=int, default=6, help="of each exchange in a round (default: %(default)s)")
    add("--slots", type=int, default=_SLOTS, help="ranks on each host (default: %(default)s)")
    add("--autocast", action="store_true", help="forward in bfloat16")
    add_table(parser, "exchanges.csv", "every measurement")
    args = parse(parser, show, work)
    need_hosts()
    output = open_table(parser, args, _COLUMNS, goes_on=True)
    known = [each.replace(", ", "+") for each in EXCHANGES]
    asked = check_names(parser, "exchanges", args.exchanges, known)
    exchanges = [each.replace("+", ", ") for each in asked]
    # Process sets slow a job down, whoever uses them.
    groups = [[e for e in exchanges if _two_levels(e) == needed] for needed in (False, True)]
    for rate in args.rates.split(","):
        for model in args.models.split(","):
            setting = (str(args.slots), str(args.autocast), f"{float(rate):g}", model)
            for group in filter(None, groups):
                if _has(output, setting, group, args.rounds):
                    print(f"{model} at {rate} Mbit/s: in {args.output} already", flush=True)
                    continue
                script = own_part(
                    __file__,
                    commit=commit_now(),
                    job=f"{time.time():.0f}",
                    rate=float(rate),
                    models=[model],
                    rounds=args.rounds,
                    exchanges=group,
                    steps=args.steps,
                    output=output,
                    slots=args.slots,
                    autocast=args.autocast,
                )
                environment = {PROCESS_SETS_VARIABLE: OURS_ALONE} if _two_levels(group[0]) else {}
                _launch(script, float(rate), args.slots, environment)
    show(output)


def _has(output: str, setting: tuple[str, ...], exchanges: list[str], rounds: int) -> bool:
    """Whether a file has all rounds of these exchanges."""
    found = {(r["exchange"], int(r["round"])) for r in _read(output) if _setting(r) == setting}
    return found >= {(each, number) for each in exchanges for number in range(1, rounds + 1)}


def _two_levels(exchange: str) -> bool:
    plan = EXCHANGES[exchange]
    return plan is not None and plan.two_levels


def _launch(script: list[str], rate: float, slots: int, environment: dict[str, str]) -> None:
    with Testbed(_HOSTS, rate) as bed:
        command = ["horovodrun", *bed.horovodrun_options(slots), "--gloo", *script]
        done = bed.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    if done.returncode:
        sys.exit(f"the job at {rate:g} Mbit/s ended with status {done.returncode}")


if __name__ == "__main__":
    main()
