"""What is left of command lines when they are stored: nothing that may be a secret."""

from __future__ import annotations

import errno
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_autosync.launch import masking
from hvd_autosync.launch.masking import keyed_digest, redact, redact_launcher, without_digests

#: Values of many looks; each form below is tried with each.
SECRETS = (
    "hunter",
    "hunter2",
    "Tr0ub4dor&3",
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "123456",
    "c2VjcmV0aHVudGVy==",
)
#: Words behind ``python train.py``; X stands for the secret.
WORDS = (
    ["--password", "X"],
    ["--password=X"],
    ["--passwd", "X"],
    ["--pass", "X"],
    ["--token", "X"],
    ["--auth-token=X"],
    ["--authtoken", "X"],
    ["--accesskey", "X"],
    ["--access-key", "X"],
    ["--accessKey", "X"],
    ["--apikey=X"],
    ["--api_key", "X"],
    ["--API-KEY", "X"],
    ["-p", "X"],
    ["-u", "X"],
    ["--secret", "X"],
    ["--client-secret=X"],
    ["--private-key", "X"],
    ["--jwt", "X"],
    ["--session", "X"],
    ["--cookie", "X"],
    ["--credentials", "X"],
    ["--login", "me:X"],
    ["--user=me:X"],
    ["--pin", "X"],
    ["--otp=X"],
    ["--license", "X"],
    ["--sas", "X"],
    ["MYTOKEN=X"],
    ["PGPASSWORD=X"],
    ["WANDB_API_KEY=X"],
    ["AWS_SECRET_ACCESS_KEY=X"],
    ["--env", "HF_TOKEN:X"],
    ["--env", "HF_TOKEN=X"],
    ["--env=HF_TOKEN=X"],
    ["-e", "TOKEN=X"],
    ["--header", "Authorization: Bearer X"],
    ["-H", "X-Api-Key: X"],
    ["--set", "db.password=X"],
    ["db.password=X"],
    ["+wandb.api_key=X"],
    ["~auth.token=X"],
    ["token:X"],
    ["password: X"],
    ['{"token": "X"}'],
    ["{token: X}"],
    ["--config", '{"token": "X"}'],
    ["--config={'token':'X'}"],
    ["[X]"],
    ["--kv=[token,X]"],
    ["https://host.org/a?sig=X"],
    ["https://host.org/a?x=1&token=X"],
    ["https://me:X@host.org/a"],
    ["https://X@host.org/a"],
    ["s3://me:X@bucket/data"],
    ["postgresql://u:X@db:5432/d"],
    ["--url=https://host.org/#access_token=X"],
    ["--data", "https://host.org/a?sig=X"],
    ["--password=a X"],
    ["--password", "a X"],
    ["--token-file-content", "X"],
    ["--my.token", "X"],
    ["a b X"],
    ["--note=say X"],
    ["--slack-webhook", "https://hooks.host.org/services/T0A/B0B?X"],
    ["--passphrase", "X"],
)
#: Forms where a value begins with a dash, or is glued to its option.
DASHED = (["--password", "-X"], ["--token", "-X"], ["-pX"], ["-uX"])
#: A number without a name, which is taken for harmless.
NAMELESS = (["X"], ["--", "X"], ["run", "X"], ["--frob", "X"], ["frob=X"])
#: Lines for a shell.
SHELL = (
    "python train.py --password X",
    "python train.py --password=X",
    "TOKEN=X python train.py",
    "export TOKEN=X && python train.py",
    "export TOKEN='X'; python train.py --lr 1",
    'python train.py --token "X"',
    "echo X | login --password-stdin && python train.py",
    "python train.py --password 'a X'",
    "cat <<END\nX\nEND",
    "login $(echo X)",
    "python train.py & curl -u me:X https://host.org/",
    "curl -H 'Authorization: Bearer X' host",
    "cd /data; (A=1 MYTOKEN=X python train.py)",
    "python -c \"login('X')\"",
    "login `echo X`",
    "echo a\\ X",
    "echo 'frob'=X",
    'python train.py \'{"token": "X"}\'',
)


@pytest.fixture(autouse=True)
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data folder of the test's own, and no key that is kept in memory."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    masking._key.cache_clear()
    yield tmp_path / "data" / "hvd-autosync" / "key"
    masking._key.cache_clear()


@pytest.mark.parametrize("secret", SECRETS)
def test_no_form_leaves_the_value(secret: str) -> None:
    named = (*WORDS, *DASHED, *(() if secret.isdigit() else NAMELESS))
    forms = [["python", "train.py", *words] for words in named]
    forms += [
        [*words, "python", "train.py"]
        for words in WORDS
        if "=" in words[0] and not words[0].startswith(("-", "+", "~"))
    ]
    forms += [["env", "A=1", *words, "python"] for words in WORDS if words[0].isupper()]
    for line in (line for line in SHELL if not (secret.isdigit() and "echo" in line)):
        for shell in (["sh", "-c"], ["/bin/bash", "-lc"], ["env", "A=1", "bash", "-c"]):
            forms.append([*shell, line])
    assert len(forms) >= 60
    left = []
    for form in forms:
        words = [re.sub(r"\bX(?!-)", lambda _: secret, word) for word in form]
        words = [re.sub(r"(?<=-[puy])X", lambda _: secret, word) for word in words]
        assert any(secret in word for word in words), form
        if any(secret in word for word in redact(words)):
            left.append(form)
    assert not left


def test_no_option_before_the_script_leaves_a_value_that_looks_like_a_number() -> None:
    words = ("python", "--epochs=3", "--HF-APIKEY", "549622947e21", "train.py")
    assert not any("549622947e21" in word for word in redact(words))


@pytest.mark.parametrize(
    "words",
    [
        "python train.py --epochs 3 --lr 1e-4 --model resnet50 --data /data/imagenet",
        "python -u -m pkg.train --batch-size 32 --optimizer adam --output-dir runs/one",
        "OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=0,1 python train.py --config conf/base.yaml",
        "python3.11 ./train.py trainer.max_epochs=3 +model=big --no-cuda --use-fp16 --seed=7",
        "/opt/venv/bin/python -X importtime /home/me/train_big.py --resume ../ckpt/last.pt -b 32",
        "bash run.sh --dataset cifar10 --max-tokens 4096 --tokenizer=gpt2 --use-token --fp16",
        "python train.py --data s3://bucket/imagenet --backend nccl -j 8 --workers 4 -- train",
    ],
)
def test_what_is_known_to_be_harmless_stays(words: str) -> None:
    expected = words.replace("importtime", "***")
    assert without_digests(redact(words.split())) == tuple(expected.split())


def test_a_line_for_a_shell_keeps_its_form() -> None:
    line = "A=1; export TOKEN='a b' && cd /data && exec python t.py --lr 1 --data $DATA 2>&1"
    shown = "A=1; export TOKEN=*** && cd /data && exec python t.py --lr 1 --data $DATA 2>&1"
    assert without_digests(redact(["sh", "-c", line])) == ("sh", "-c", shown)


def test_options_of_horovodrun_stay_but_for_lines_for_mpi() -> None:
    options = [
        "-np",
        "4",
        "-H",
        "a:2,b:2",
        "--network-interfaces",
        "eth0",
        "-p",
        "2222",
        "-i",
        "/home/me/.ssh/id_ed25519",
        "--cycle-time-ms=3",
        "--gloo",
    ]
    assert redact_launcher(options) == tuple(options)
    (shown,) = without_digests(redact_launcher(["--mpi-args=-x TOKEN=hunter2 --oversubscribe"]))
    assert shown == "--mpi-args=-x TOKEN=*** --oversubscribe"
    (shown,) = without_digests(redact_launcher(["--mpi-arg=--env=TOKEN=hunter2"]))
    assert shown == "--mpi-arg=--env=TOKEN=***"


def test_the_same_value_has_the_same_mask_and_another_value_another() -> None:
    one, other = (redact(["python", "t.py", "--token", word])[3] for word in ("one", "other"))
    assert one == redact(["python", "t.py", "--token", "one"])[3] != other


def test_the_key_is_kept_for_the_user_alone(key: Path) -> None:
    first = keyed_digest(b"value")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and len(key.read_bytes()) == 32
    program = "from hvd_autosync.launch.masking import keyed_digest; print(keyed_digest(b'value'))"
    again = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert again.stdout.strip() == first
    masking._key.cache_clear()
    key.unlink()
    assert keyed_digest(b"value") != first
    assert list(key.parent.iterdir()) == [key]


def test_without_a_place_for_the_key_there_is_one_for_this_process(
    key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key.parent.parent.write_text("no folder")
    assert keyed_digest(b"value") == keyed_digest(b"value")
    masking._key.cache_clear()


def test_without_hard_links_the_key_is_kept_as_well(
    key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", link)
    first = keyed_digest(b"value")
    masking._key.cache_clear()
    assert keyed_digest(b"value") == first
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and list(key.parent.iterdir()) == [key]
