"""Masks command lines before they are stored or shown: all that is not known to be harmless.

A mask is ``***`` and six digits of a keyed digest of the hidden text, so that equal lines are
recognized, and nobody without the key can test guesses. docs/security.md states the guarantees.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import re
import secrets
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hvd_autosync.launch.horovodrun_options import BINDING, MPI, is_option

HIDDEN = "***"
_MARK = re.compile(r"\*{3}[0-9a-f]{6}")
#: Harmless words. If all parts of a name are among them, its plain values are shown.
_KNOWN = frozenset(
    "accum accumulation activation adam adamw algorithm alpha amp arch architecture attention "
    "author autosync augment backend base batch batches beta betas bf16 bool cache cfg channels "
    "checkpoint checkpoints checkpointing ckpt class classes clip compile config corpus count cpu "
    "cpus cuda cycle data dataloader dataset datasets debug decay depth deterministic dev device "
    "devices dim dims dir dirs directory dist distributed download dropout dtype embed embedding "
    "end env epoch epochs eps eval evaluate every exp experiment factor features file files fit "
    "float fold folder format fp16 fp32 frac freq frequency gamma gloo gpu gpus grad gradient "
    "gradients group groups head heads height hidden horovod host hosts image images imagenet in "
    "index init input inputs int interval iter iteration iterations iters kernel kind label labels "
    "lamb lambda lang layer layers len length level limit linear list local log logging logs loss "
    "lr main master mask max memory metric min mini mixed mlp mnist mode model models momentum mpi "
    "mtype n name names nccl nesterov net network nheads no node nodes noise norm np num number "
    "nthreads omp opt optim optimizer options order out output outputs parallel param params patch "
    "path patience period perplexity port precision predict prefix print profile proc processes "
    "python quiet random range rank ranks rate ratio recipe reduce resnet resume root run samples "
    "save scale schedule scheduler seed seq sequence sgd shape shuffle size sizes slots smoothing "
    "source split start step steps stride strategy suffix sync target task temperature test text "
    "thread threads threshold time timeline tokenizer tokens top train trainer training trials "
    "type val valid validate validation value verbose version visible vocab wait warmup weight "
    "weights width worker workers world".split()
)
#: A name is a secret's if a part of it is not among the harmless words and contains one of these.
_SECRET = re.compile(
    "access|auth|bearer|code|cookie|cred|hash|jwt|key|licen|login|nonce|otp|pass|phrase|pin|private|"
    "pwd|salt|sas|secret|session|sig|token|user"
)
#: Pseudo name of an option whose value is a line for a shell.
_LINE = "line"
#: Short options with a secret: ``mysql -pX``, ``-p X``, ``curl -u X``.
_SECRET_LETTERS = frozenset("pPu")
_NUMBER = re.compile(
    r"[-+]?\d{1,10}(\.\d{0,10})?(e[-+]?\d{1,3})?([kmgsh%]|[kmg]b|ms)?(,[-+]?\d{1,10}){0,16}", re.I
)
_FEW_DIGITS = re.compile(r"\d{1,4}")
_BOOLEAN = re.compile(r"true|false|yes|no|on|off|none|null|auto", re.I)
#: A reference to a variable, not its value; punctuation of a shell.
_REFERENCE = re.compile(r"\$\{?\w+\}?|[{}!$\[\]]{1,2}|--?|[0-9]?>&[0-9]")
_PLAIN = re.compile(r"[\w./,+~-]{1,200}")
_LAUNCHER_PLAIN = re.compile(r"[\w./,+~:@%=-]{1,1000}")
_PART = r"(?:[a-z]{1,20}|[A-Z]{1,20}|[A-Z][a-z]{1,19})\d{0,3}"
_NAME = re.compile(rf"(?=.{{1,60}}$)_?{_PART}(?:[a-z]*[A-Z][a-z]+\d{{0,3}})*(?:[._-]+{_PART})*")
_SEGMENT = rf"[._]*{_PART}(?:[._+-]+(?:{_PART}|\d{{1,4}}))*"
_PATH = re.compile(rf"(?:~|\.{{1,2}})?(?:/(?:{_SEGMENT}|\.\.?))+/?|/|\.\.?/?")
_SCRIPT = re.compile(r"[\w./+ -]+\.(py|sh|ipynb|pickle)")
_PROGRAM = re.compile(r"[\w./+-]+")
_MODULE = re.compile(rf"{_PART}(?:[._]{_PART})*")
_PYTHON = re.compile(r"([\w./+-]*/)?python[\d.]*")
_PROGRAMS = re.compile(r"python[\d.]*|env|exec|export|cd|torchrun|accelerate")
_SHELLS = re.compile(r"(.*/)?(ba|da|k|z|a)?sh")
_ASSIGNED = re.compile(r"([+~-]*)([^=\s:/?{\[\"']+)(=|:(?!//)\s*)(?!=*$)(.+)", re.DOTALL)
_URL = re.compile(
    r"([a-z][a-z0-9+.-]{0,20}://)(?:([^/@?#]*)@)?([^/?#@]*)([^?#]*)(\?[^#]*)?(#.*)?", re.I
)
_AUTHORITY = re.compile(rf"(?:{_SEGMENT}|[\d.]{{1,15}})?(?::\d{{1,5}})?")
_TOKENS = re.compile(r"""\s+|[;&|<>()]+|(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s;&|<>()'"\\])+""")
_PARTS = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z])")


def redact(words: Sequence[str]) -> tuple[str, ...]:
    """Mask a command, except its program, scripts, names of options and harmless words."""
    return tuple(_masked(words, strict=False))


def redact_launcher(options: Sequence[str]) -> tuple[str, ...]:
    """Mask, among options of ``horovodrun``, only command lines for other programs."""
    shown = []
    for word in options:
        name, equals, value = word.partition("=")
        if _LAUNCHER_PLAIN.fullmatch(word) and not (equals and is_option(word, BINDING, MPI)):
            shown.append(word)
        elif equals and name.startswith("--") and _NAME.fullmatch(name[2:]):
            shown.append(f"{name}={_line(value)}")
        else:
            shown.append(_line(word))
    return tuple(shown)


def without_digests(words: Sequence[str]) -> tuple[str, ...]:
    """Return masked ``words`` without the digests, which depend on the user's key."""
    return tuple(_MARK.sub(HIDDEN, word) for word in words)


def _masked(words: Sequence[str], *, strict: bool) -> Iterator[str]:
    """Mask the words of one command; ``strict``: it is a part of a line for a shell."""
    name, program = "", ""  # the option whose value may follow; the program that takes options
    for word in words:
        assigned = _ASSIGNED.fullmatch(word)
        secret = _is_secret(name) and name != _LINE
        if name == _LINE:
            name = ""
            yield _line(word)
        elif _is_option(word, program) and (word.startswith("--") or not secret or len(name) == 1):
            name = _value_name(word, program)
            yield word
        elif assigned and not secret:
            name = ""
            yield _assignment(assigned)
        elif not name and _is_program(word, first=not program, strict=strict):
            program = word
            yield word
        else:
            name, before = "", name
            module = before == "m" and _PYTHON.fullmatch(program) and _MODULE.fullmatch(word)
            program = word if module else program or word
            yield word if module else _value(before, word)


def _value_name(option: str, program: str) -> str:
    """Return the name of the value that follows ``option``."""
    if _SHELLS.fullmatch(program) and option.endswith("c"):
        return _LINE
    short = not option.startswith("--")
    if _PYTHON.fullmatch(program) and short and option not in ("-c", "-m"):
        return ""  # without a value, as -u
    return option.lstrip("-")


def _is_option(word: str, program: str) -> bool:
    if not word.startswith("-"):
        return False
    if word.startswith("--"):
        return word == "--" or bool(_NAME.fullmatch(word[2:]))
    letters = word[1:]
    if _SHELLS.fullmatch(program) and re.fullmatch("[a-z]{0,3}c", letters):
        return True
    return (len(letters) == 1 and letters.isalpha()) or letters in _KNOWN


def _is_program(word: str, *, first: bool, strict: bool) -> bool:
    """Return whether ``word`` is a program: a known one, a script, or the first word."""
    if any(each.fullmatch(word) for each in (_PROGRAMS, _SHELLS, _SCRIPT)):
        return True
    if strict:
        return first and bool(_MODULE.fullmatch(word) or _PATH.fullmatch(word))
    return first and bool(_PROGRAM.fullmatch(word))


def _assignment(found: re.Match[str]) -> str:
    """Mask ``NAME=VALUE``, ``--name=VALUE``, ``NAME:VALUE`` or ``Name: VALUE``."""
    prefix, name, sign, value = found.groups()
    if not _NAME.fullmatch(name):
        return _mask(found[0])
    return f"{prefix}{name}{sign}{_value(name, value)}"


def _value(name: str, text: str) -> str:
    """Mask the value of a name, or a word without one."""
    if _is_secret(name):
        return _mask(text)
    if _NUMBER.fullmatch(text) or _BOOLEAN.fullmatch(text) or _REFERENCE.fullmatch(text):
        return text
    if _SCRIPT.fullmatch(text) or _PATH.fullmatch(text):
        return text
    if found := _URL.fullmatch(text):
        return _url(found)
    if found := _ASSIGNED.fullmatch(text):
        return _assignment(found)
    parts = _parts(text)
    if _PLAIN.fullmatch(text) and (
        all(part in _KNOWN or _FEW_DIGITS.fullmatch(part) for part in parts)
        or (name and all(part in _KNOWN for part in _parts(name)))
    ):
        return text
    return _mask(text)


def _is_secret(name: str) -> bool:
    if len(name) == 1:
        return name in _SECRET_LETTERS
    return any(part not in _KNOWN and _SECRET.search(part) for part in _parts(name))


def _parts(text: str) -> list[str]:
    """Split a name into lower-case parts, without numbers at their ends."""
    parts = [part.lower() for part in _PARTS.split(text) if part]
    return [part if part in _KNOWN else part.rstrip("0123456789") or part for part in parts]


def _url(found: re.Match[str]) -> str:
    """Mask a URL except its scheme, host and plain path; user and query are always masked."""
    scheme, user, host, path, query, fragment = found.groups()
    host = host if _AUTHORITY.fullmatch(host) else _mask(host)
    user = f"{_mask(user)}@" if user is not None else ""
    path = path if not path or _PATH.fullmatch(path) else f"/{_mask(path)}"
    query = f"?{_mask(query)}" if query else ""
    return f"{scheme}{user}{host}{path}{query}{f'#{_mask(fragment)}' if fragment else ''}"


def _line(text: str) -> str:
    """Mask a line for a shell word by word, or as a whole if it has more than simple commands."""
    tokens = _TOKENS.findall(text)
    if "".join(tokens) != text or "<<" in text or "`" in text:
        return _mask(text)
    shown: list[str] = []
    command: list[int] = []  # places of its words in ``shown``

    def finish() -> None:
        words = [_unquoted(shown[place]) for place in command]
        for place, before, after in zip(command, words, _masked(words, strict=True), strict=True):
            if after != before:
                shown[place] = after
        command.clear()

    for token in tokens:
        if set(token) & set(";&|(\n") and not set(token) - set(";&|<>() \t\n"):
            finish()
        elif not token.isspace() and set(token) - set("<>)"):
            command.append(len(shown))
        shown.append(token)
    finish()
    return "".join(shown)


def _unquoted(token: str) -> str:
    try:
        return "".join(shlex.split(token))
    except ValueError:
        return token


def _mask(text: str) -> str:
    return f"{HIDDEN}{keyed_digest(text.encode(errors='surrogatepass'))[:6]}"


def keyed_digest(content: bytes) -> str:
    """Return a hexadecimal digest of ``content`` under this user's key."""
    return hmac.new(_key(), content, hashlib.sha256).hexdigest()


@functools.cache
def _key() -> bytes:
    """Return the user's key, drawn at the first use; if it cannot be stored, for this process."""
    from hvd_autosync.errors import StoreError
    from hvd_autosync.traces.location import data_folder

    drawn = secrets.token_bytes(32)
    with suppress(OSError, StoreError):
        path = data_folder() / "key"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            return _read(path)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # readable by the user alone
        try:
            with open(descriptor, "wb") as file:
                file.write(drawn)
            with suppress(FileExistsError):  # another process was faster
                _name(temporary, path)
        finally:
            os.unlink(temporary)
        return _read(path)
    return drawn


def _name(temporary: str, path: Path) -> None:
    """Give a whole file its name, unless that is taken.

    Raises:
        FileExistsError: It is taken.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, as of volumes that are mounted by SMB
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(Path(temporary).read_bytes())


def _read(path: Path) -> bytes:
    key = path.read_bytes()
    if len(key) < 32:
        raise OSError(f"{path} is not a key")
    return key
