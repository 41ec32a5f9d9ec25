"""Prints the lowest versions that ``setup.cfg`` promises, as constraints for pip: ``pandas==2.0``.

Arguments are extras whose lowest versions are printed too.
"""

from __future__ import annotations

import configparser
import re
import sys
from collections.abc import Sequence
from pathlib import Path


def oldest_versions(extras: Sequence[str] = ()) -> list[str]:
    """One constraint for each library that the package and these extras of it need."""
    parser = configparser.ConfigParser()
    parser.read(Path(__file__).parents[1] / "setup.cfg")
    promised = [parser["options"]["install_requires"]]
    promised += [parser["options.extras_require"][extra] for extra in extras]
    lines = [line for part in promised for line in part.split("\n")]
    return [re.sub(r">=\s*", "==", line) for line in lines if line]


if __name__ == "__main__":
    print("\n".join(oldest_versions(sys.argv[1:])))
