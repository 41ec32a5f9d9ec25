"""Prints the lowest versions that ``setup.cfg`` promises, as requirements: ``pandas==2.0``."""

import configparser
import re
from pathlib import Path


def oldest_versions() -> list[str]:
    """One requirement for each library that the package needs."""
    parser = configparser.ConfigParser()
    parser.read(Path(__file__).parents[1] / "setup.cfg")
    promised = parser["options"]["install_requires"].split("\n")
    lines = [line for line in promised if line and not line.startswith("#")]
    return [re.sub(r">=\s*", "==", line) for line in lines]


if __name__ == "__main__":
    print("\n".join(oldest_versions()))
