"""Learns the hyperprior of the learner from measured tasks, and writes it into the package.

python tools/learn_hyperprior.py                        # from benchmarks/traces
python tools/learn_hyperprior.py --store sqlite:///mine.db --note "our cluster" --check
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import date
from pathlib import Path

from hvd_autosync.learner import hyperprior
from hvd_autosync.learner.hyperprior_learning import held_out_scores, learn
from hvd_autosync.learner.problem import Source
from hvd_autosync.study.related_studies import observations_of
from hvd_autosync.traces import TraceStore, import_studies

_REPOSITORY = Path(__file__).parents[1]
_TABLES = _REPOSITORY / "benchmarks" / "traces"
_NOTE = (
    "tables of benchmarks/traces: two ranks on emulated hosts of one machine with two cores, "
    "links of 100 to 1000 Mbit/s"
)


def tasks_of(store: TraceStore) -> Iterator[Source]:
    """All studies of a store that know their task and space."""
    for study in store.studies():
        if study.task is not None and study.space is not None:
            seen = observations_of(study.space, store.trials(study.study_id))
            yield Source(study.study_id, study.task, study.space, tuple(seen), 1.0)


def tables(folder: Path) -> Iterator[Source]:
    """All traces of a folder, under the names of their files."""
    for path in sorted(folder.glob("*.jsonl*")):
        with closing(TraceStore("sqlite://")) as store:
            import_studies(store, path)
            for task in tasks_of(store):
                yield replace(task, study_id=path.name.partition(".")[0])


def main() -> None:
    """Learn, print what tasks that are left out say of it, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", metavar="URL", help="its studies instead of the tables")
    parser.add_argument("--note", default=_NOTE, help="where they were measured")
    parser.add_argument("--check", action="store_true", help="print only, write nothing")
    args = parser.parse_args()
    if args.store:
        with closing(TraceStore(args.store)) as store:
            tasks = list(tasks_of(store))
    else:
        tasks = list(tables(_TABLES))
    today = date.today().isoformat()
    learned = learn(tasks, today, args.note)
    text = json.dumps(learned.to_json(), indent=2)
    print(text)
    print("mean log density of unseen trials: shipped, learned from other tasks")
    for name, shipped, others in held_out_scores(tasks, today, args.note):
        print(f"{name:24} {shipped:8.3f} {others:8.3f}", flush=True)
    if not args.check:
        path = Path(hyperprior.__file__).with_name("hyperprior.json")
        path.write_text(text + "\n", encoding="utf-8")
        print(f"wrote {path.relative_to(_REPOSITORY)}")


if __name__ == "__main__":
    main()
