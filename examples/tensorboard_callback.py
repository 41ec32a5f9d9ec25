"""Shows a tuning in TensorBoard, while it runs or afterwards.

    import hvd_autosync
    from tensorboard_callback import TensorBoard

    hvd_autosync.tune("python train.py", np=2, on_trial_end=TensorBoard("runs/autosync"))

As a program it writes a study that has ended, by its id, the file of its trace, or ``last``:

    python examples/tensorboard_callback.py last runs/autosync
    tensorboard --logdir runs
"""

import argparse
import math

from torch.utils.tensorboard import SummaryWriter

from hvd_autosync import Study
from hvd_autosync.traces import TrialRecord


class TensorBoard:
    """What ``on_trial_end`` calls: a step per trial, and its strategy as text.

    Args:
        folder: Where TensorBoard's event files go.
    """

    def __init__(self, folder: str) -> None:
        self._writer = SummaryWriter(folder)
        self._fastest_s = math.inf

    def __call__(self, study: Study, trial: TrialRecord) -> None:
        """Write down one trial that has ended."""
        knobs = ", ".join(f"{name}={value}" for name, value in trial.strategy.items())
        self._writer.add_text("autosync/strategy", f"{trial.kind}: {knobs}", trial.number)
        step_time = trial.step_time
        if step_time is not None:  # a strategy that failed has none
            self._fastest_s = min(self._fastest_s, step_time.mean_s)
            self._writer.add_scalar("autosync/step_ms", 1e3 * step_time.mean_s, trial.number)
            self._writer.add_scalar("autosync/fastest_ms", 1e3 * self._fastest_s, trial.number)
        self._writer.flush()


def main() -> None:
    """Writes a study that has ended."""
    parser = argparse.ArgumentParser(description="Write a study for TensorBoard.")
    parser.add_argument("study", nargs="?", default="last", help="id, trace file, or last")
    parser.add_argument("folder", nargs="?", default="runs/autosync", help="for TensorBoard")
    args = parser.parse_args()
    study, log = Study.load(args.study), TensorBoard(args.folder)
    for trial in study.history:
        log(study, trial)
    print(f"{len(study.history)} trials of study {study.study_id} are in {args.folder}")


if __name__ == "__main__":
    main()
