"""What this archerfish was built from, and what it computes with here."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from functools import cache
from pathlib import Path

from archerfish import __version__
from archerfish.kernels.select import native_error

PACKAGE = Path(__file__).parents[1]


@cache
def build_info() -> dict[str, str]:
    """Version, commit, instructions of the native kernels, torch, Python, system; what is unknown or missing is
    empty."""
    return {
        "version": __version__,
        "commit": commit(PACKAGE),
        "instructions": instructions(),
        "torch": package_version("torch"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit(package: Path) -> str:
    """The git commit that a package was built from; in a clone the one that is there now, with -dirty after changes."""
    written = package / "commit.txt"  # by CMakeLists.txt
    if written.is_file():
        return written.read_text(encoding="utf-8").strip()
    if not (package.parent / ".git").exists():
        return ""
    command = ["git", "-C", str(package.parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # without git, or not allowed to read it
        return ""


def instructions() -> str:
    """The instruction set that the native kernels use here, and those that they could."""
    if native_error():
        return ""
    from archerfish.kernels.native._native import levels

    return f"{levels()[-1]} of {', '.join(levels())}"


def package_version(name: str) -> str:
    """The version of an installed package; empty: it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def requirements() -> list[tuple[str, str]]:
    """Packages that archerfish requires, and the extra that needs each; "": always. Those of tests are left out."""
    try:
        required = importlib.metadata.requires("archerfish") or []
    except importlib.metadata.PackageNotFoundError:  # only on PYTHONPATH
        return []
    found = []
    for requirement in required:
        name, _, marker = requirement.partition(";")
        extra = re.search(r"extra == ['\"](\w+)['\"]", marker)
        found.append((re.split(r"[^\w.-]", name.strip(), maxsplit=1)[0], extra[1] if extra else ""))
    return [(name, extra) for name, extra in found if extra != "test"]
