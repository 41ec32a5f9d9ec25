"""Long options of ``horovodrun``, which its parser also takes abbreviated."""

from __future__ import annotations

from collections.abc import Sequence

#: The folder of the ranks' outputs.
OUTPUT = "--output-filename"
HOSTFILE = "--hostfile"
#: Options for ``mpirun``.
BINDING, MPI = "--binding-args", "--mpi-args"
#: Each of them makes a job elastic.
ELASTIC = ("--host-discovery-script", "--min-np", "--min-num-proc")
#: The shortest words that argparse takes for them.
_SHORTEST = {
    OUTPUT: "--o",
    HOSTFILE: "--hostf",
    BINDING: "--bi",
    MPI: "--mpi-a",
    "--host-discovery-script": "--host-",
    "--min-np": "--mi",
    "--min-num-proc": "--mi",
}


def is_option(word: str, *options: str) -> bool:
    """Return whether a word is one of some options, with or without a value in the same word."""
    name = word.partition("=")[0]
    name = f"-{name}" if name.startswith("-hostf") else name  # Horovod also takes it with one dash
    return any(each.startswith(name) and name.startswith(_SHORTEST[each]) for each in options)


def without_option(words: Sequence[str], option: str) -> tuple[str, ...]:
    """Return options of ``horovodrun`` without one that has a value."""
    kept: list[str] = []
    left = iter(words)
    for word in left:
        if not is_option(word, option):
            kept.append(word)
        elif "=" not in word:
            next(left, None)
    return tuple(kept)
