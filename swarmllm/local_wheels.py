"""Finds wheels that were built beforehand (`make wheel`), and says what need not be compiled with them.

Part of the bootstrap, so standard library only. pip decides by itself which wheel it takes; here the names
are read before pip is there, because they decide which system packages an installation needs.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

VARIABLE = "SWARMLLM_WHEELS"
COMPILED = ("llama_cpp_python", "fastecdsa")
"""What the package index has as sources only, with C or C++ in it."""
WHEEL = re.compile(r"([\w.]+)-([\w.+!]+)(?:-\d\w*)?-([\w.]+)-([\w.]+)-([\w.]+)\.whl")


def places(root: Path, environment: Mapping[str, str]) -> list[str]:
    """What pip is to look at: folders or URLs of pages with links. `dist` of the project, and what the
    variable names, separated by spaces. Raises ValueError for a folder that does not exist."""
    named = environment.get(VARIABLE, "").split()
    for place in named:
        if "://" not in place and not Path(place).is_dir():
            raise ValueError(f"{VARIABLE} names {place}, which is neither a folder nor a URL")
    built = [str(root / "dist")] if any((root / "dist").glob("*.whl")) else []
    return [*built, *named]


def spared(folders: Iterable[str], pins: Mapping[str, str]) -> set[str]:
    """Of COMPILED, what need not be compiled here: there is a wheel that fits. `pins`: name -> the version
    that it has to be. What lies behind a URL is not known."""
    found = set()
    for folder in folders:
        for path in Path(folder).glob("*.whl") if "://" not in folder else ():
            named = WHEEL.fullmatch(path.name)
            if named is None or named[1] not in COMPILED:
                continue
            release = named[2].partition("+")[0]
            if pins.get(named[1], release) == release and fits(path.name, *this_system()):
                found.add(named[1])
    return found


def pinned(pyproject: str) -> dict[str, str]:
    """Name -> version, of the dependencies that are pinned exactly, with the names as wheels have them."""
    pins = re.findall(r'^  "([\w-]+)==([\w.]+)",$', pyproject, re.MULTILINE)
    return {name.replace("-", "_"): version for name, version in pins}


def this_system() -> tuple[str, str, tuple[int, int]]:
    """The Python, the processor and the version of the C library; (0, 0) where it is not glibc."""
    library, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    numbers = re.match(r"(\d+)\.(\d+)", version) if library == "glibc" else None
    glibc = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    return f"cp{sys.version_info[0]}{sys.version_info[1]}", platform.machine(), glibc


def fits(wheel: str, python: str, machine: str, glibc: tuple[int, int]) -> bool:
    """Whether a wheel of this name can be installed on such a system."""
    named = WHEEL.fullmatch(wheel)
    if named is None or not {python, "py3"} & set(named[3].split(".")):
        return False
    for tag in named[5].split("."):
        wanted = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", tag)
        if tag == "any" or (wanted and wanted[3] == machine and (int(wanted[1]), int(wanted[2])) <= glibc):
            return True
    return False
