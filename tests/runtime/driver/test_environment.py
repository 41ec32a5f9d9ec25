"""What a driver says to its workers in their environment."""

from hvd_autosync.runtime.driver.environment import spec_from_environment, worker_environment
from hvd_autosync.search_space import Host, Strategy, TrialSpec

#: Linux allows no longer variable (MAX_ARG_STRLEN); Gloo's launcher puts all into one line.
MAX_BYTES = 128 * 1024


def test_a_trial_arrives_as_it_was_sent() -> None:
    spec = TrialSpec("name", Strategy({"buckets": 2}), probe=(Host("a", 2),))
    assert spec_from_environment(worker_environment(spec)) == spec
    assert spec_from_environment({}) is None


def test_thousands_of_names_leave_room_for_the_users_variables() -> None:
    layers = [f"transformer.encoder.layers.{i}.{j}" for i in range(500) for j in "abcdefgh"]
    names = tuple(f"{layer}.attention.query.weight" for layer in layers)
    spec = TrialSpec("name", Strategy({"large_slices": 2}), classes={"large": names})
    environment = worker_environment(spec)
    assert sum(map(len, environment.values())) < MAX_BYTES / 4
    assert spec_from_environment(environment) == spec
