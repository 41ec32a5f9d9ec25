"""How many trials does each learner need? Ours in four forms beside its peers, on measured tables.

Every contestant (``contest/contestants.py`` has the list) plays every table several times, with
other noise and another seed each time; the default is everybody's first trial. Transfer learns from
the other tables; those of the same task are left out. A strategy is judged by its true step time in
the table, not by the noisy measurement.

    python benchmarks/learners.py
    python benchmarks/learners.py --contestants "ours,ours: gp,optuna-tpe" --seeds 5 --trials 20
    python benchmarks/learners.py --show learners.csv --plot learners.svg

Peers that are not installed are left out, with a line that says so. Two games run at once; games
that stand in the output file already are not played again. Where no other table is related,
transfer changes nothing: the form without it plays, and its games stand under both names.

What is fair, and what is not: a fifth of each table was chosen by our cost model, so the emulated
optimum may lie where that looked; a related task has 20 of its strategies, as many as a study of a
user. Peers get the space without its conditions. Regret is that of the best
strategy that was tried, so no contestant has to recognize it. "adversarial" is a related task of
the same knobs whose step times are inverted, "unrelated" one whose step times belong to other
strategies: what they cost is the price of negative transfer.
"""

from __future__ import annotations

import csv
import gzip
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from command_line import commit_now, new_parser
from contest.contestants import CONTESTANTS
from contest.emulator import Emulator
from rich.console import Console
from rich.table import Table

from hvd_autosync.learner.problem import Source
from hvd_autosync.learner.similarity import similarity
from hvd_autosync.study.related_studies import LEAST_SIMILAR, MOST_RELATED

#: Names in files of earlier versions -> names today.
_RENAMED = {
    "ours: gp + liar": "ours: gp + adversarial",
    "ours: gp + stranger": "ours: gp + unrelated",
    "ours: gp + cost + liar": "ours: gp + cost + adversarial",
    "ours: gp + cost + stranger": "ours: gp + cost + unrelated",
}
#: Where the tables are.
TABLES = Path(__file__).resolve().parent / "traces"
_SOURCE_TRIALS = 20
_CLOSE = (0.05, 0.02)
#: Regrets that the median of all games comes down to.
_LEVELS = (0.16, 0.12, 0.10, 0.08)
_AFTER = (5, 10, 20, 40)
_FIELDS = (
    "table",
    "contestant",
    "seed",
    "trial",
    "regret",
    "best_regret",
    "trial_s",
    "ask_s",
    "commit",
)

Row = dict[str, str | int | float]


@lru_cache
def emulators(folder: str) -> dict[str, Emulator]:
    """All tables of a folder by name."""
    return {
        emulator.name: emulator
        for emulator in (Emulator(path) for path in sorted(Path(folder).glob("*.jsonl*")))
    }


@lru_cache
def related_to(folder: str, name: str) -> tuple[Source, ...]:
    """The most similar of the other tasks, as sources."""
    table, found = emulators(folder)[name], []
    for other in emulators(folder).values():
        alike = similarity(other.task, table.task)
        if other.task.fingerprint != table.task.fingerprint and alike >= LEAST_SIMILAR:
            seen = other.small_study(_SOURCE_TRIALS)
            found.append(Source(other.study_id, other.task, other.space, seen, alike))
    found.sort(key=lambda source: -source.similarity)
    return tuple(found[:MOST_RELATED])


def play(folder: str, name: str, contestant: str, seed: int, trials: int) -> list[Row]:
    """One game; one row per trial."""
    import torch

    torch.set_num_threads(1)
    table = emulators(folder)[name]
    player = CONTESTANTS[contestant].start(table, related_to(folder, name), seed)
    rows: list[Row] = []
    best, ask_s, strategy = float("inf"), 0.0, table.space.default
    for trial in range(trials):
        if trial:
            began = time.perf_counter()
            strategy = player.ask()
            ask_s = time.perf_counter() - began
        seen = table.measure(strategy, seed, trial)
        player.tell(seen)
        regret = table.regret(strategy)
        best = min(best, regret)
        rows.append(
            {
                "table": name,
                "contestant": contestant,
                "seed": seed,
                "trial": trial,
                "regret": round(regret, 5),
                "best_regret": round(best, 5),
                "trial_s": round(table.trial_s(seen), 3),
                "ask_s": round(ask_s, 4),
            }
        )
    return rows


def games(rows: Sequence[Row]) -> dict[tuple[str, str], list[list[Row]]]:
    """(contestant, table) -> the rows of each of its games; see :attr:`Entry.alone`."""
    found: dict[tuple[str, str], dict[int, list[Row]]] = {}
    for row in rows:
        by_seed = found.setdefault((str(row["contestant"]), str(row["table"])), {})
        by_seed.setdefault(int(row["seed"]), []).append(row)
    for contestant in {contestant for contestant, _ in found} & set(CONTESTANTS):
        for alone, table in list(found):
            if alone == CONTESTANTS[contestant].alone:
                found.setdefault((contestant, table), found[alone, table])
    return {key: list(by_seed.values()) for key, by_seed in found.items()}


def trials_until(game: Sequence[Row], close: float) -> float:
    """Trials after the default until one is that close to the best; infinite if none was."""
    return next((int(r["trial"]) for r in game if float(r["best_regret"]) <= close), float("inf"))


def seconds_until(game: Sequence[Row], close: float) -> float:
    """As :func:`trials_until`, the seconds of asks and trials, the default's among them."""
    count = trials_until(game, close)
    spent = sum(float(r["trial_s"]) + float(r["ask_s"]) for r in game if int(r["trial"]) <= count)
    return spent if count < float("inf") else count


def trials_until_median(many: Sequence[Sequence[Row]], level: float) -> float:
    """Trials after the default until half of the games are that close; infinite if never."""
    for trial in range(min(len(game) for game in many)):
        if statistics.median(float(game[trial]["best_regret"]) for game in many) <= level:
            return trial
    return float("inf")


def show(rows: Sequence[Row]) -> None:
    """Print the tables; see ``--help``."""
    played = games(rows)
    tables = list(dict.fromkeys(table for _, table in played))
    contestants = list(dict.fromkeys(contestant for contestant, _ in played))
    console = Console(width=None if sys.stdout.isatty() else 260)
    overall = Table(title="over all tables: medians (quartiles) of the games")
    for column in (
        "contestant",
        "games",
        *(f"trials of half to {c:.0%}" for c in _LEVELS),
        *(f"trials to {c:.0%}" for c in _CLOSE),
        *(f"s to {c:.0%}" for c in _CLOSE),
        *(f"regret % @{n}" for n in _AFTER),
        "mean ask s",
    ):
        overall.add_column(column)
    for contestant in contestants:
        overall.add_row(contestant, *_summary(_as_many_of_each(played, contestant)))
    console.print(overall)
    for title, cell in (
        ("median trials after the default until within 5 % of the best", _to_five_percent),
        (f"median regret in percent after {', '.join(map(str, _AFTER))} trials", _regrets),
    ):
        each = Table(title=title)
        for column in ("contestant", *tables):
            each.add_column(column)
        for contestant in contestants:
            own_tables = [played.get((contestant, table), []) for table in tables]
            each.add_row(contestant, *map(cell, own_tables))
        console.print(each)


def _as_many_of_each(
    played: dict[tuple[str, str], list[list[Row]]], contestant: str
) -> list[list[Row]]:
    """As many games of each table that a contestant has played, so that all weigh the same."""
    own = [many for (name, _), many in played.items() if name == contestant]
    fewest = min(map(len, own))
    return [game for many in own for game in many[:fewest]]


def _to_five_percent(many: Sequence[Sequence[Row]]) -> str:
    return _number([trials_until(game, 0.05) for game in many])


def _regrets(many: Sequence[Sequence[Row]]) -> str:
    return ", ".join(filter(None, (_number(_regret_after(many, after)) for after in _AFTER)))


def _regret_after(many: Sequence[Sequence[Row]], after: int) -> list[float]:
    """Regret in percent after so many trials, of the games that are that long."""
    return [100 * float(game[after]["best_regret"]) for game in many if len(game) > after]


def _summary(many: Sequence[Sequence[Row]]) -> Iterator[str]:
    yield str(len(many))
    for level in _LEVELS:
        yield _number([trials_until_median(many, level)])
    for close in _CLOSE:
        yield _number([trials_until(game, close) for game in many], quartiles=True)
    for close in _CLOSE:
        yield _number([seconds_until(game, close) for game in many], quartiles=True)
    for after in _AFTER:
        yield _number(_regret_after(many, after), digits=1, quartiles=True)
    yield f"{statistics.fmean(float(r['ask_s']) for g in many for r in g if r['trial']):.2f}"


def _number(values: Sequence[float], digits: int = 0, quartiles: bool = False) -> str:
    """The median, and the quartiles if wanted; ``never`` where half or more never came there."""
    if not values:
        return ""
    ordered = sorted(values)
    picks = [ordered[int(q * (len(ordered) - 1) + 0.5)] for q in (0.5, 0.25, 0.75)]
    texts = [f"{v:.{digits}f}" if v < float("inf") else "never" for v in picks]
    return f"{texts[0]} ({texts[1]}..{texts[2]})" if quartiles else texts[0]


def read(path: str) -> list[Row]:
    """The rows of a CSV file of ours, which may be compressed."""
    with _opener(path)(path, "rt", newline="", encoding="utf-8") as file:
        return [
            {
                **row,
                "contestant": _RENAMED.get(row["contestant"], row["contestant"]),
                "seed": int(row["seed"]),
                "trial": int(row["trial"]),
            }
            for row in csv.DictReader(file)
        ]


def _opener(path: str) -> Callable[..., Any]:
    return gzip.open if path.endswith(".gz") else open


def installed(names: Sequence[str]) -> list[str]:
    """Those of the contestants whose libraries are here; of others a line says so."""
    found = []
    for name in names:
        try:
            if CONTESTANTS[name].library:
                import_module(CONTESTANTS[name].library)
            found.append(name)
        except ImportError as missing:
            print(f"{name}: left out, {missing.name} is not installed", flush=True)
    return found


def _alone(contestant: str) -> str:
    """The contestant that plays its games where no table is related."""
    return CONTESTANTS[contestant].alone or contestant


def picture(rows: Sequence[Row], path: str) -> None:
    """Draw the games into a file, except those with a wrong source."""
    from contest.curves import draw

    curves = {
        key: [[float(row["best_regret"]) for row in game] for game in many]
        for key, many in games(rows).items()
        if key[0] not in CONTESTANTS or not CONTESTANTS[key[0]].wrong_source
    }
    draw(curves, path)
    print(f"wrote {path}")


def main() -> None:
    """Plays the games, or shows former ones."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--contestants", default=",".join(CONTESTANTS), metavar="C,...", help="(default: all)")
    add("--tables", default=str(TABLES), metavar="FOLDER", help="traces (default: %(default)s)")
    add("--only", default="", metavar="T,...", help="of the tables, play these")
    add("--seeds", type=int, default=20, help="games of each on each table (default: %(default)s)")
    add("--trials", type=int, default=41, help="with the default's (default: %(default)s)")
    add("--output", default="learners.csv", metavar="FILE", help="(default: %(default)s)")
    add("--show", metavar="FILE", help="print the tables of such a file again and end")
    add("--check", action="store_true", help="say how well tables are interpolated, and end")
    add("--plot", metavar="FILE", help="draw the regrets, too: .svg, .png or .pdf")
    args = parser.parse_args()
    if args.show:
        _tell(args.show, args.plot)
        return
    unknown = set(args.contestants.split(",")) - set(CONTESTANTS)
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(CONTESTANTS)}")
    wanted = set(args.only.split(",")) if args.only else set(emulators(args.tables))
    if wanted - set(emulators(args.tables)):
        parser.error(
            f"unknown tables: {', '.join(sorted(wanted - set(emulators(args.tables))))}; known are "
            f"{', '.join(emulators(args.tables))}"
        )
    names = [name for name in emulators(args.tables) if name in wanted]
    if args.check:
        for name in names:
            print(name, emulators(args.tables)[name].quality(), flush=True)
        return
    forms = dict.fromkeys(
        (name, contestant if related_to(args.tables, name) else _alone(contestant))
        for contestant in installed(args.contestants.split(","))
        for name in names
    )
    plans = [
        (args.tables, name, contestant, seed, args.trials)
        for name, contestant in forms
        for seed in range(args.seeds)
    ]
    known = read(args.output) if os.path.exists(args.output) else []
    played = Counter((row["table"], row["contestant"], row["seed"]) for row in known)
    if set(played.values()) - {args.trials}:
        parser.error(f"{args.output} has games of another length: give --trials or --output")
    if known and set(known[0]) != set(_FIELDS):
        parser.error(f"{args.output} has other columns, of an earlier version: give --output")
    _play([plan for plan in plans if plan[1:4] not in played], args.output)
    _tell(args.output, args.plot)


def _tell(path: str, plot: str | None) -> None:
    """Print the tables of a file of games, and draw them if wanted."""
    rows = read(path)
    show(rows)
    if plot:
        picture(rows, plot)


def _play(plans: Sequence[tuple[str, str, str, int, int]], output: str) -> None:
    """Play the games in two processes, and append each to the file as it ends."""
    os.environ["OMP_NUM_THREADS"] = "1"
    fresh, commit = not os.path.exists(output), commit_now()
    if not plans:
        return
    opened = _opener(output)
    with ProcessPoolExecutor(2) as pool, opened(output, "at", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _FIELDS)
        if fresh:
            writer.writeheader()
        for count, rows in enumerate(pool.map(play, *zip(*plans, strict=True)), start=1):
            writer.writerows({**row, "commit": commit} for row in rows)
            file.flush()
            if sys.stderr.isatty() or count % 20 == 0:
                print(f"{count} of {len(plans)} games", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
