"""What is trained: the project's examples, made small enough for a slow link and two cores.

A step of any of them takes at most 0.3 s between two hosts at 100 Mbit/s. They would train for
hours; each run ends after the steps that it is asked for.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True)
class Workload:
    """A training job.

    Attributes:
        help: What it asks of the network.
        script: File name in ``examples/``.
        arguments: Its arguments.
    """

    help: str
    script: str
    arguments: str

    @property
    def command(self) -> list[str]:
        """The command as ``horovodrun`` gets it."""
        return [sys.executable, str(_EXAMPLES / self.script), *self.arguments.split()]


_SYNTHETIC = "synthetic_benchmark.py"
_FLOAT32 = {
    "vgg": Workload(
        "12 tensors, 2.3 MB, half of it in one",
        _SYNTHETIC,
        "--model vgg --width 6 --depth 3 --size 16 --batch-size 8 --steps 1000000",
    ),
    "resnet": Workload(
        "101 small tensors, 0.6 MB",
        _SYNTHETIC,
        "--model resnet --width 8 --depth 15 --size 16 --batch-size 8 --steps 1000000",
    ),
    "bert": Workload(
        "52 tensors, 2 MB, most of it a tied embedding",
        _SYNTHETIC,
        "--model bert --width 48 --depth 4 --size 32 --batch-size 4 --steps 1000000",
    ),
    "digits": Workload(
        "13 tensors, 1.2 MB; trains a CNN on real images",
        "train_digits.py",
        "--hidden 256 --epochs 1000000",
    ),
    "ncf": Workload(
        "10 tensors, 1.3 MB, nearly all embeddings; trains on real data",
        "train_ncf.py",
        "--factors 8 --batch-size 256 --epochs 1000000",
    ),
    "lm": Workload(
        "28 tensors, 0.5 MB; trains a transformer on text of this machine",
        "train_lm.py",
        "--width 64 --depth 2 --heads 2 --context 32 --batch-size 4 --epochs 1000000",
    ),
}
#: Name -> job; each whose script can also compute in bfloat16.
WORKLOADS = _FLOAT32 | {
    f"{name}-autocast": Workload(
        f"{name} in bfloat16, where torch.autocast does so",
        each.script,
        f"--autocast {each.arguments}",
    )
    for name, each in _FLOAT32.items()
    if name != "digits"
}
