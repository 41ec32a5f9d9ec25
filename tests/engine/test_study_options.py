"""Which studies belong to a job."""

from hvd_autosync.engine.options import Options
from hvd_autosync.engine.study_options import tuning_key, tuning_keys
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Host


def test_a_study_is_reused_whatever_its_settings_but_not_for_other_knobs() -> None:
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    key = tuning_key(job, Options(), {})
    assert tuning_key(job, Options(trials=5, minutes=1, steps=9, warmup=3, seed=7), {}) == key
    assert tuning_key(job, Options(allow=("codec",)), {}) != key
    assert tuning_key(job, Options(), {"exclude": ["buckets"]}) != key


def test_a_job_knows_under_which_keys_it_was_tuned() -> None:
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    keys = tuning_keys(job)
    assert tuning_key(job, Options(), {}) in keys
    assert tuning_key(job, Options(allow=("codec", "schedule")), {}) in keys
    assert tuning_key(job, Options(), {"exclude": ["buckets"]}) not in keys
