"""Keeps a tuning in MLflow, while it runs or afterwards: one run with a step per trial.

    import hvd_autosync
    import mlflow
    from mlflow_callback import log_trial

    with mlflow.start_run(run_name="autosync"):
        hvd_autosync.tune("python train.py", np=2, on_trial_end=log_trial)

As a program it writes a study that has ended, by its id, the file of its trace, or ``last``, to
where MLflow writes (``MLFLOW_TRACKING_URI``):

    python examples/mlflow_callback.py last
"""

import argparse

import mlflow

from hvd_autosync import Study
from hvd_autosync.traces import TrialRecord


def log_trial(study: Study, trial: TrialRecord) -> None:
    """Write down one trial that has ended, in the run that is active."""
    if trial.number == 0:
        command = " ".join(study.record.command)
        mlflow.set_tags({"autosync.study": study.study_id, "autosync.command": command})
    step_time = trial.step_time
    if step_time is not None:  # a strategy that failed has none
        mlflow.log_metric("step_ms", 1e3 * step_time.mean_s, step=trial.number)
    knobs = ", ".join(f"{name}={value}" for name, value in trial.strategy.items())
    mlflow.set_tag(f"autosync.trial.{trial.number:03d}", f"{trial.kind}: {knobs}")


def main() -> None:
    """Writes a study that has ended."""
    parser = argparse.ArgumentParser(description="Write a study for MLflow.")
    parser.add_argument("study", nargs="?", default="last", help="id, trace file, or last")
    args = parser.parse_args()
    study = Study.load(args.study)
    with mlflow.start_run(run_name=f"autosync {study.study_id}") as run:
        for trial in study.history:
            log_trial(study, trial)
    print(f"{len(study.history)} trials of study {study.study_id} are in run {run.info.run_id}")


if __name__ == "__main__":
    main()
