"""All random numbers of a trial that judges follow from its seed, its rank and its script's."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

DRAWS = """
import json, os, pickle, random, sys
import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from hvd_autosync.runtime.patches.seeds import seed_everything

data = TensorDataset(torch.arange(12))

def draw():
    return {
        "torch": torch.rand(1).item(), "numpy": np.random.rand(), "python": random.random(),
        "fresh generator": np.random.default_rng().random(),
        "fresh python": random.Random().random(),
        "shuffled": [b[0].tolist() for b in DataLoader(data, batch_size=4, shuffle=True)],
    }

def draws(seed, rank):
    os.environ["HOROVOD_RANK"] = rank
    seed_everything(int(seed))
    unseeded = draw()
    # As a script that seeds each rank, epoch or step by its number.
    numbers = [*range(50), *(rank << 32 for rank in range(1, 4))]
    numbered = [torch.Generator().manual_seed(g).initial_seed() for g in numbers]
    torch.manual_seed(3); np.random.seed(3); random.seed(3)
    own = torch.Generator()
    own.manual_seed(3)
    seeded = draw() | {
        "own torch": torch.rand(1, generator=own).item(),
        "own numpy": np.random.default_rng(3).random(),
        "own state": np.random.RandomState(3).rand(), "own python": random.Random(3).random(),
        "text": random.Random("three").random(), "sampler": list(DistributedSampler(data, 2, 0)),
    }
    del seeded["fresh generator"], seeded["fresh python"]
    for how, seed_by in ("positional", lambda: random.seed(3)), ("named", lambda: random.seed(a=3)):
        seed_by()
        seeded[how] = random.random()
    kinds = [
        isinstance(torch.default_generator, torch.Generator), isinstance(own, torch.Generator),
        isinstance(np.random.mtrand._rand, np.random.RandomState),
        isinstance(random._inst, random.Random),
    ]
    # As a loader does that starts its workers by spawn.
    generators = [random.Random(3), np.random.RandomState(3), torch.Generator().manual_seed(3)]
    copies = [pickle.loads(pickle.dumps(each)) for each in generators]
    seeded["copies"], expected = (
        [python.random(), state.rand(), torch.rand(1, generator=own).item()]
        for python, state, own in (copies, generators)
    )
    kinds.append(seeded["copies"] == expected)
    as_torch_takes_them = {torch.manual_seed(seed).initial_seed() for seed in (3, 3.0, "3")}
    kinds.append(len(as_torch_takes_them) == 1)
    print(json.dumps([unseeded, seeded, kinds, numbered]), flush=True)

for process in sys.argv[1:]:  # each forked once, after the imports, which take longer than the rest
    if os.fork() == 0:
        draws(*process.split(","))
        os._exit(0)
    os.wait()
"""
#: Seed, rank, and which of its processes it is.
PROCESSES = ((1, 0, 0), (1, 0, 1), (2, 0, 0), (1, 1, 0))


@cache
def outputs() -> list[str]:
    words = [f"{seed},{rank}" for seed, rank, _ in PROCESSES]
    command = [sys.executable, "-c", DRAWS, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def draws(seed: int, rank: int, again: int = 0) -> tuple[dict, dict, list[bool], list[int]]:
    unseeded, seeded, kinds, numbered = json.loads(outputs()[PROCESSES.index((seed, rank, again))])
    return unseeded, seeded, kinds, numbered


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers() -> None:
    assert draws(1, 0) == draws(1, 0, again=1)


@pytest.mark.slow
def test_another_seed_gives_others_everywhere() -> None:
    for one, other in zip(draws(1, 0)[:2], draws(2, 0)[:2], strict=True):
        assert [name for name in one if one[name] == other[name]] == []


@pytest.mark.slow
def test_no_rank_or_step_has_the_numbers_of_another_in_the_next_trial() -> None:
    """As ``seed + rank`` would be that of rank 0 one trial later, if a shift were by 1."""
    one, other = draws(1, 0)[3], draws(2, 0)[3]
    assert len(set(one)) == 53 and not set(one) & set(other)


@pytest.mark.slow
def test_what_the_script_seeds_is_alike_on_all_ranks_and_nothing_else_is() -> None:
    unseeded, seeded, *_ = draws(1, 0)
    elsewhere, seeded_elsewhere, *_ = draws(1, 1)
    assert seeded == seeded_elsewhere
    assert [name for name in unseeded if unseeded[name] == elsewhere[name]] == []


@pytest.mark.slow
def test_a_seed_may_be_given_by_its_name() -> None:
    seeded = draws(1, 0)[1]
    assert seeded["named"] == seeded["positional"]


@pytest.mark.slow
def test_generators_are_still_what_they_are() -> None:
    assert all(draws(1, 0)[2])
