"""What do lossless codes of real gradients save, and what do they cost?

Each model trains for some steps, in float32 and under bfloat16 autocast. Then its gradients, as one
tensor, are coded and decoded in this process, on one thread, whose processor time is measured. The
first table is of whole codes, the second of entropy coders for the upper bytes of elements that are
not zeros: the one that we use, and others at their fastest levels. MB are those of the tensor in
the first table, of the upper bytes in the second.

    python benchmarks/lossless.py
    python benchmarks/lossless.py --models bert --steps 50 --output lossless.csv
"""

from __future__ import annotations

import csv
import statistics
import sys
import zlib
from collections.abc import Callable, Iterator
from time import thread_time
from typing import Any, TypeVar

import lz4.block
import numpy as np
import torch
import zstandard
from command_line import add_table, check_names, new_parser, open_table, parse
from rich.console import Console
from rich.table import Table

from hvd_autosync.runtime.exchange.lossless import decode, encode, header_of
from hvd_autosync.runtime.measure.repeated_bits import bits_of, find_form, upper_bytes

_COLUMNS = (
    "model",
    "autocast",
    "tensor_bytes",
    "zeros",
    "halves",
    "coder",
    "form",
    "share",
    "search_s",
    "encode_s",
    "decode_s",
    "bytes",
)
#: Times are medians of this many runs.
_RUNS = 15
_Result = TypeVar("_Result")
_WHOLE = "whole code"
#: Name -> encoder, and decoder of a code and the number of bytes that it encodes.
CODERS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes, int], bytes]]] = {
    "zlib 1": (lambda data: zlib.compress(data, 1), lambda code, _: zlib.decompress(code)),
    "zlib 1, Huffman only": (
        lambda data: _huffman(data),
        lambda code, size: zlib.decompress(code, bufsize=size),
    ),
    "zstd 1": (
        lambda data: zstandard.ZstdCompressor(level=1).compress(data),
        lambda code, size: zstandard.ZstdDecompressor().decompress(code, max_output_size=size),
    ),
    "zstd -1": (
        lambda data: zstandard.ZstdCompressor(level=-1).compress(data),
        lambda code, size: zstandard.ZstdDecompressor().decompress(code, max_output_size=size),
    ),
    "lz4": (
        lambda data: lz4.block.compress(data, store_size=False),
        lambda code, size: lz4.block.decompress(code, uncompressed_size=size),
    ),
}


def _huffman(data: bytes) -> bytes:
    coder = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data) + coder.flush()


def gradients(model: str, steps: int, *, autocast: bool) -> torch.Tensor:
    """All gradients of a model after some steps of training, one after the other."""
    import horovod.torch as hvd
    from exchanged.models import MODELS

    hvd.init()
    network, losses = MODELS[model].make()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = next(losses)
        loss.backward()
        optimizer.step()
    found = [p.grad for p in network.parameters() if p.grad is not None]
    return torch.cat([gradient.reshape(-1) for gradient in found])


def timed(call: Callable[[], _Result]) -> tuple[_Result, float]:
    """The result of a call, and its seconds of this thread's processor time: it never waits."""
    seconds = []
    for _ in range(_RUNS):
        begin = thread_time()
        result = call()
        seconds.append(thread_time() - begin)
    return result, statistics.median(seconds)


def measure(model: str, steps: int, *, autocast: bool) -> Iterator[dict[str, Any]]:
    """Rows of the file for one model."""
    tensor = gradients(model, steps, autocast=autocast)
    bits = bits_of(tensor)
    common = {
        "model": model,
        "autocast": autocast,
        "tensor_bytes": bits.nbytes,
        "zeros": float(np.mean(bits == 0)),
        "halves": float(np.mean(bits & 0xFFFF == 0)),
    }
    _, search_s = timed(lambda: find_form(bits))
    code, encode_s = timed(lambda: encode(tensor))
    again, decode_s = timed(lambda: decode(code))
    assert np.array_equal(bits_of(again), bits)
    form = header_of(code).form
    words = [form.words] if form.words != "whole" else []
    parts = ["zeros"] * form.zeros + words + ["planes"] * form.planes
    yield common | {
        "coder": _WHOLE,
        "form": " + ".join(parts) or "as it is",
        "share": len(code) / bits.nbytes,
        "search_s": search_s,
        "encode_s": encode_s,
        "decode_s": decode_s,
        "bytes": bits.nbytes,
    }
    plane = upper_bytes(bits[bits != 0]).tobytes()
    for name, (shorten, restore) in CODERS.items():
        coded, encode_s = timed(lambda: shorten(plane))  # noqa: B023
        same, decode_s = timed(lambda: restore(coded, len(plane)))  # noqa: B023
        assert same == plane
        yield common | {
            "coder": name,
            "share": len(coded) / len(plane),
            "encode_s": encode_s,
            "decode_s": decode_s,
            "bytes": len(plane),
        }


def show(output: str) -> None:
    """Print the tables of a file of measurements."""
    with open(output) as file:
        rows = list(csv.DictReader(file))
    whole = Table(title="lossless codes of all gradients, one thread", title_justify="left")
    for column in ("model", "autocast", "form"):
        whole.add_column(column)
    for column in ("MB", "zeros", "16 bits", "share", "search ms", "in MB/s", "out MB/s"):
        whole.add_column(column, justify="right")
    coders = Table(title="coders of the upper bytes, one thread", title_justify="left")
    for column in ("model", "autocast", "coder"):
        coders.add_column(column)
    for column in ("share", "in MB/s", "out MB/s"):
        coders.add_column(column, justify="right")
    for row in rows:
        size = float(row["bytes"]) / 1e6
        speeds = [f"{size / float(row[each]):.0f}" for each in ("encode_s", "decode_s")]
        begin = (row["model"], "bfloat16" if row["autocast"] == "True" else "")
        share = f"{float(row['share']):.3f}"
        if row["coder"] != _WHOLE:
            coders.add_row(*begin, row["coder"], share, *speeds)
            continue
        coders.add_section()
        counts = [f"{100 * float(row[each]):.0f} %" for each in ("zeros", "halves")]
        search = f"{1e3 * float(row['search_s']):.2f}"
        whole.add_row(*begin, row["form"], f"{size:.1f}", *counts, share, search, *speeds)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(whole)
    console.print(coders)


def main() -> None:
    """Run the benchmark."""
    parser = new_parser(__doc__)
    known = ("ncf", "vgg", "resnet", "bert")
    parser.add_argument(
        "--models", default=",".join(known), metavar="M,...", help="(default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=10, help="of training (default: %(default)s)")
    add_table(parser, "lossless.csv", "every measurement")
    args = parse(parser, show)
    torch.set_num_threads(1)
    models = check_names(parser, "models", args.models, known)
    output = open_table(parser, args, _COLUMNS)
    for model in models:
        for autocast in (False, True):
            with open(output, "a", newline="") as file:
                csv.DictWriter(file, _COLUMNS).writerows(
                    measure(model, args.steps, autocast=autocast)
                )
    show(output)


if __name__ == "__main__":
    main()
