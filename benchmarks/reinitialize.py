"""How long does it take to initialize Horovod again in a running training?

Each job makes steps of a small model, and initializes Horovod again between two of them, with
another response cache each time: from the end of one step to the moment in which all ranks can send
again. The table has every time of rank 0; the summary their median.

A job whose times are in the file is not run again.

    python benchmarks/reinitialize.py
    python benchmarks/reinitialize.py --controllers gloo --ranks 2 --times 20 --output again.csv
"""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from time import perf_counter

from command_line import add_table, check_names, commit_now, new_parser, open_table, own_part, parse

_COLUMNS = ("commit", "controller", "ranks", "number", "seconds", "load")
#: Aims in seconds, for two ranks; twice as many for four.
AIMS_S = {"gloo": 0.2, "mpi": 0.4}
_MPI = ["--binding-args=--bind-to none --map-by slot"]
#: Ranks that wait for more than there are processors would keep them from those that work.
_CROWDED = ["--mpi-args=--oversubscribe --mca mpi_yield_when_idle 1"]
_CACHES = ("512", None)


def work(controller: str, times: int, commit: str, output: str) -> None:
    """One rank's part."""
    import horovod.torch as hvd
    import torch

    from hvd_autosync.runtime.collectives.initialization import record_initialization
    from hvd_autosync.runtime.collectives.reinitialize import reinitialize

    record_initialization()
    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    rows = []
    for number in range(-1, times):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).pow(2).mean().backward()
            optimizer.step()
        began = perf_counter()
        reinitialize({"HOROVOD_CACHE_CAPACITY": _CACHES[number % 2]})
        seconds = perf_counter() - began
        if number >= 0:  # the first finds the address of the host, too
            load = f"{os.getloadavg()[0]:.1f}"
            rows.append((commit, controller, hvd.size(), number, f"{seconds:.4f}", load))
    if hvd.rank() == 0:
        with open(output, "a", newline="") as file:
            csv.writer(file).writerows(rows)
    hvd.barrier()


def show(output: str) -> None:
    """Print the median of each job beside its aim."""
    found = defaultdict(list)
    with open(output) as file:
        for row in csv.DictReader(file):
            found[row["controller"], int(row["ranks"])].append(row)
    print("controller  ranks  times   median      90 %   largest      aim   load")
    for (controller, ranks), rows in sorted(found.items()):
        seconds = sorted(float(row["seconds"]) for row in rows)
        load = statistics.median(float(row["load"]) for row in rows)
        aim_s = AIMS_S[controller] * ranks / 2
        print(
            f"{controller:10}  {ranks:5}  {len(rows):5}  {statistics.median(seconds):5.3f} s"
            f"   {seconds[len(seconds) * 9 // 10]:5.3f} s   {seconds[-1]:5.3f} s"
            f"  {aim_s:5.1f} s  {load:5.1f}"
        )


def main() -> None:
    """Run the benchmark, or a rank's part of it."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--controllers", default="gloo,mpi", metavar="C,...", help="(default: %(default)s)")
    add("--ranks", default="2,4", metavar="N,...", help="ranks (default: %(default)s)")
    add("--times", type=int, default=50, help="for each job (default: %(default)s)")
    add_table(parser, "reinitialize.csv", "every re-initialization")
    args = parse(parser, show, work)
    controllers = check_names(parser, "controllers", args.controllers, list(AIMS_S))
    output = open_table(parser, args, _COLUMNS, goes_on=True)
    with open(output) as file:
        known = {(row["controller"], row["ranks"]) for row in csv.DictReader(file)}
    commit = commit_now()
    for ranks in args.ranks.split(","):
        for controller in controllers:
            if (controller, ranks) in known:
                continue
            part = own_part(
                __file__, controller=controller, times=args.times, commit=commit, output=output
            )
            options = (_MPI + (_CROWDED if int(ranks) > 2 else [])) if controller == "mpi" else []
            command = ["horovodrun", "-np", ranks, f"--{controller}", *options, *part]
            done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
            if done.returncode:
                sys.exit(f"{ranks} ranks over {controller} ended with status {done.returncode}")
    show(output)


if __name__ == "__main__":
    main()
