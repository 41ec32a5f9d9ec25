"""Jobs as given: hosts, keys, secrets."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch import masking
from hvd_autosync.launch.job import Job, assign_hosts
from hvd_autosync.launch.masking import redact, without_digests
from hvd_autosync.search_space import Host


def test_hosts_are_filled_in_order() -> None:
    assert assign_hosts("a:2,b:4,c:1", 3) == (Host("a", 2), Host("b", 1))


def test_slots_of_a_host_that_is_named_line_by_line_are_added_up() -> None:
    assert assign_hosts("a:1,a:2,b:1", 4) == (Host("a", 3), Host("b", 1))
    assert assign_hosts("a:2,a:2", 2, exact=False) == (Host("a", 2),)
    with pytest.raises(ConfigurationError, match="a appears twice"):
        assign_hosts("a:1,b:1,a:1", 3)


@pytest.mark.parametrize(
    "option", [("--hostfile", "h"), ("-hostfile", "h"), ("--hostfile=h",), ("--hostf", "h")]
)
def test_a_part_of_the_hosts_of_a_file_is_given_without_the_file(option: tuple[str, ...]) -> None:
    whole = Job((*option, "-np", "4", "--hosts-x"), ("python",), (Host("a", 2), Host("b", 2)))
    part = whole.on((Host("b", 2),))
    assert part.options == ("-np", "4", "--hosts-x", "-np", "2", "-H", "b:2")


@pytest.mark.parametrize(
    ("options", "elastic"),
    [
        (("--min-np", "2"), True),
        (("--host-disc=x.sh",), True),
        (("--min-num-proc=2",), True),
        (("--mi", "2"), True),
        (("--hostfile", "h", "--mpi", "-H", "a:1"), False),
        (("--output-filename", "min-np"), False),
    ],
)
def test_what_makes_a_job_elastic(options: tuple[str, ...], elastic: bool) -> None:
    assert Job(options, ("python",), (Host("a", 2),)).elastic is elastic


def test_localhost_is_another_host_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(job(tmp_path), hosts=(Host("localhost", 2),))
    named, before = job(tmp_path).key, here.key
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    assert here.key != before
    assert job(tmp_path).key == named


def test_more_ranks_than_slots_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigurationError, match=r"-np 4 .* the 3 slots of 'a:2,b:1'"):
        assign_hosts("a:2,b:1", 4)


def test_empty_slots_are_refused_where_horovod_would_fill_them() -> None:
    with pytest.raises(ConfigurationError, match=r"leaves 2 slots .*\n  Write -H a:2,b:1,"):
        assign_hosts("a:2,b:3", 3, exact=True)


@pytest.mark.parametrize(
    "hosts",
    [
        *("a", "a:x", "a:0", "a:²", "a:" + "9" * 5000, ":2", "a:1,,b:1", "::1:1"),
        *("a..b:1", ".a:1", "a b:1", "a;b:1", "a" * 64 + ":1"),
    ],
)
def test_unreadable_hosts_are_named(hosts: str) -> None:
    with pytest.raises(ConfigurationError, match="name:slots"):
        assign_hosts(hosts, 1)


def job(tmp_path: Path) -> Job:
    script = tmp_path / "train.py"
    script.write_text("one")
    return Job(("-np", "2"), ("python", str(script)), (Host("a", 2),))


def test_the_key_follows_the_script_and_the_layout(tmp_path: Path) -> None:
    first = job(tmp_path)
    before = first.key
    assert replace(first, options=("2", "-np")).key == before
    assert replace(first, options=("-np", "2", "--network-interfaces", "ib0")).key != before
    assert replace(first, hosts=(Host("z", 2),)).key != before
    assert replace(first, hosts=(Host("a", 1), Host("b", 1))).key != before
    assert replace(first, held=(("cycle_time_ms", 2.0),)).key != before
    (tmp_path / "train.py").write_text("two")
    assert replace(first, digests=()).key != before


def test_a_job_keeps_its_key_when_its_script_is_edited(tmp_path: Path) -> None:
    """Its ranks have loaded the script, also where another process reads the job later."""
    first = job(tmp_path)
    before, told = first.key, json.loads(json.dumps(first.to_json()))
    (tmp_path / "train.py").write_text("two")
    edited = Job(first.options, first.command, first.hosts)
    assert first.key == Job.from_json(told).key == before != edited.key
    assert first.on((Host("a", 1),)).digests == first.digests
    del told["digests"]  # as an earlier version wrote it
    assert Job.from_json(told).key == edited.key


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (("python", "-m", "package.module"), "package/module.py"),
        (("python3", "-u", "-m", "package.module", "--lr", "1"), "package/module.py"),
        (("/usr/bin/python", "-Bm", "package"), "package/__main__.py"),
        (("LR=1", "python", "-W", "error", "-mpackage.module"), "package/module.py"),
        (("python", "-m", "alone"), "alone.py"),
        (("python", "-m", "elsewhere.module"), "sources/elsewhere/module.py"),
    ],
)
def test_the_key_follows_the_file_of_a_module(
    words: tuple[str, ...], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"absent:{tmp_path}/sources")
    for name in (
        "alone.py",
        "alone/__main__.py",  # no package, which the module precedes
        "package.py",  # preceded by the package
        "package/__init__.py",
        "package/__main__.py",
        "package/module.py",
        "sources/elsewhere/module.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("raise SystemExit('imported')")

    def key() -> str:
        return Job(("-np", "2"), words, (Host("a", 2),)).key

    changed, before = set(), key()
    for path in tmp_path.rglob("*.py"):
        path.write_text("edited")
        if key() != before:
            changed.add(str(path.relative_to(tmp_path)))
        before = key()
    assert changed == {file}


def test_the_key_knows_no_difference_between_a_path_and_a_link_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "link").symlink_to(home)
    for name in ("train.py", "python", "other"):
        (home / name).write_text("")
    (home / "newest.py").symlink_to("train.py")
    monkeypatch.chdir(home)
    first = Job(("-np", "2"), ("python", "train.py", "--data", "other"), (Host("a", 2),))

    def key(*command: str) -> str:
        return replace(first, command=command, digests=()).key

    scripts = ["./train.py", f"{home}/train.py", f"{tmp_path}/link/train.py", "newest.py"]
    assert {key("python", script, "--data", "other") for script in scripts} == {first.key}
    assert key("python", "train.py", "--data", "./other") != first.key
    assert key(f"{tmp_path}/link/python", "train.py") == key(f"{home}/python", "train.py")
    monkeypatch.chdir(tmp_path / "link")
    assert first.key == key("python", "../link/train.py", "--data", "other")
    monkeypatch.chdir(tmp_path)
    assert first.key != key("python", "home/train.py", "--data", "other")


def test_a_python_that_is_a_link_itself_belongs_to_the_environment_of_the_link(
    tmp_path: Path,
) -> None:
    first = job(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "python").symlink_to("/bin/sh")
    keys = {
        replace(first, command=(f"{tmp_path}/{name}/python", first.command[1]), digests=()).key
        for name in ("one", "two")
    }
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--api-key", "s3cret", "--lr", "1"], ("--api-key", "***", "--lr", "1")),
        (["--wandb-token=s3cret"], ("--wandb-token=***",)),
        (["PASSWORD=s3cret", "python"], ("PASSWORD=***", "python")),
        (["train.py", "--autosync", "--author=me"], ("train.py", "--autosync", "--author=me")),
        (["--use-token", "--epochs", "3"], ("--use-token", "--epochs", "3")),
        (["--max-tokens", "9", "--tokenizer=gpt2"], ("--max-tokens", "9", "--tokenizer=gpt2")),
        (["--apiKey", "s3cret"], ("--apiKey", "***")),
        (["WANDB_API_KEY=s3cret"], ("WANDB_API_KEY=***",)),
        (["s3://me:s3cret@host/data"], ("s3://***@host/data",)),
        (["sh", "-c", "train --token s3cret --lr 1"], ("sh", "-c", "train --token *** --lr 1")),
        (["sh", "-c", "A=1;TOKEN=abc python t.py"], ("sh", "-c", "A=1;TOKEN=*** python t.py")),
        (["--env=WANDB_API_KEY=abc"], ("--env=WANDB_API_KEY=***",)),
        (["sh", "-c", "t --password 'my s' --lr 1"], ("sh", "-c", "t --password *** --lr 1")),
        (["sh", "-c", "export TOKEN='a b' && go"], ("sh", "-c", "export TOKEN=*** && go")),
        (["--header", "Authorization: Bearer x"], ("--header", "Authorization: ***")),
    ],
)
def test_secrets_are_hidden(words: list[str], shown: tuple[str, ...]) -> None:
    assert without_digests(redact(words)) == shown


def test_the_key_does_not_tell_a_value_to_who_has_not_the_users_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same line is the same job for one user; another's, or a guess, has another key."""
    plain = job(tmp_path)

    def with_token(value: str) -> Job:
        return replace(plain, command=(*plain.command, "--token", value), digests=())

    secret = with_token("hunter2")
    keys = {plain.key, secret.key, with_token("x").key}
    assert len(keys) == 3 and secret.key in keys
    monkeypatch.setattr(masking, "_key", lambda: b"another")
    assert secret.key not in keys and plain.key in keys


@pytest.mark.parametrize(
    "command",
    [
        ("python", "train.py", "--epochs", "3", "--model", "resnet50"),
        ("python", "-c", "0", "-m", "own"),
        ("python", "-m", "torch.distributed.run", "train.py"),
        ("python", "-m"),
        ("python",),
        (),
    ],
)
def test_a_job_without_a_masked_word_or_own_module_has_the_key_that_it_always_had(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    Path("train.py").write_text("one")
    Path("own.py").write_text("")
    own = Job(("-np", "2", "--gloo"), command, (Host("a", 2),), "gloo")
    digests = [hashlib.sha256(b"one").hexdigest() if w == "train.py" else "" for w in command]
    identity = [
        list(command),
        digests,
        [("a", 2)],
        ["--gloo", "-np", "2"],
        "gloo",
        {},
        str(tmp_path),
        [],
    ]
    text = json.dumps(identity, sort_keys=True)
    assert own.key == hashlib.sha256(text.encode()).hexdigest()[:12]


def test_a_job_comes_back_from_json_without_what_ssh_needs() -> None:
    held = (("cache_capacity", 0), ("cycle_time_ms", 2.5), ("torus_allreduce", True))
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),), "gloo", held, (22, "key"))
    written = json.dumps(job.to_json())
    assert "key" not in written
    assert Job.from_json(json.loads(written)) == replace(job, ssh=(None, None))
    with pytest.raises(ValueError, match=r"hosts\[0\]\.slots: 'two' is wrong"):
        Job.from_json(job.to_json() | {"hosts": [{"name": "a", "slots": "two"}]})
