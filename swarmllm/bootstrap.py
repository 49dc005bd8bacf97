"""Make `.venv` and install SwarmLLM into it: what `make run` and `make test` do first.

    python3 -I swarmllm/bootstrap.py [--extra test]

Why not plain `pip install`: one dependency, llama-cpp-python, is compiled from source and takes minutes in
which pip shows nothing; another, fastecdsa, needs headers that a bare Debian lacks and fails with a page of
compiler output. So this script looks for what will be missing *before* anything is built, reads pip's verbose
output and turns it into one line with a bar, a rate and the time left, and keeps the full text in
`.venv/install.log`, whose tail is shown when something fails.

It runs before anything is installed: standard library only, isolated (`-I`: its folder holds modules named
like others'), in a syntax old enough for the `python3` of an old distribution, which then looks for a newer
one. A stamp in `.venv` (fingerprint of what was installed, and the extras) makes the second run instant.

With wheels that were built before (`make wheel`, in `dist`, or where SWARMLLM_WHEELS says) nothing of others
is compiled, and their headers are not asked for.

Rejected: a requirements file of wheels (the package index has none of llama-cpp-python), and asking for a
password in the middle of `make` (only root or a passwordless sudo installs system packages; everyone else is
shown the line to run).

Wart: pip's log is not an interface. Where a later pip words a line differently the bar is poorer, the
installation is not.

Exit codes: 0 done, 1 the installation failed, 2 something is missing that only the user can supply, 130
interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, NoReturn

MINIMUM_PYTHON = (3, 11)
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
LOG = VENV / "install.log"
STAMP = VENV / "swarmllm-install.json"
RAW_PROGRESS_PIP = (24, 1)  # the first pip that can print `Progress 1 of 2` lines
LOG_TAIL_LINES = 25
INSTALLED_FROM = (
    "pyproject.toml",
    "setup.py",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("workers/**/*.[ch]")),
)
"""What decides how the installation turns out; Python files are used where they lie."""
LOG_NOISE = "Link requires a different Python"
QUIET_INTERVAL_S = 15.0
MEMORY_PER_COMPILER_BYTES = 1_500_000_000


class BootstrapError(Exception):
    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Screen:
    """Lines that stay, and one that is overwritten; without a terminal it appears every 15 seconds."""

    def __init__(self) -> None:
        self.is_live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.has_color = self.is_live and "NO_COLOR" not in os.environ
        self._last_s = time.monotonic()

    def keep(self, mark: str, text: str) -> None:
        clear = "\r\x1b[K" if self.is_live else ""
        colors = {"✓": "32", "✗": "31", "→": "36"}
        shown = f"\x1b[{colors[mark]}m{mark}\x1b[0m" if self.has_color and mark in colors else mark
        print(f"{clear}  {shown} {text}", flush=True)
        self._last_s = time.monotonic()

    def show(self, text: str) -> None:
        now_s = time.monotonic()
        if self.is_live and now_s - self._last_s >= 0.1:
            spinner = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"[int(now_s * 10) % 10]
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{f'  {spinner} {text}'[:width]}", end="", flush=True)
            self._last_s = now_s
        elif not self.is_live and now_s - self._last_s >= QUIET_INTERVAL_S:
            print(f"    {text}", flush=True)
            self._last_s = now_s

    def clear(self) -> None:
        if self.is_live:
            print("\r\x1b[K", end="", flush=True)


def run_logged(
    command: list[str],
    on_line: Callable[[str], None],
    on_tick: Callable[[], None],
    env: dict[str, str] | None = None,
) -> int:
    """Run `command`, its output in the log; `on_line` gets each line, `on_tick` runs ten times a second."""
    with LOG.open("ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=ROOT,
        ) as process:
            try:
                assert process.stdout is not None
                _pump(process.stdout, log, on_line, on_tick)
                return process.wait()
            except KeyboardInterrupt:
                process.terminate()
                raise


def _pump(
    pipe: IO[bytes], log: IO[bytes], on_line: Callable[[str], None], on_tick: Callable[[], None]
) -> None:
    pending = b""
    while True:
        if select.select([pipe], [], [], 0.1)[0]:
            data = os.read(pipe.fileno(), 65536)
            if not data:
                return
            log.write(data)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                on_line(line.decode("utf-8", "replace"))
        on_tick()


def compiles(source: str, suffix: str, compilers: list[str]) -> bool:
    """Whether one of the compilers turns `source` into an object file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"probe{suffix}"
        path.write_text(source)
        for compiler in compilers:
            if not compiler or not shutil.which(compiler.split()[0]):
                continue
            command = [*compiler.split(), "-c", str(path), "-o", str(path.with_suffix(".o"))]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return True
    return False


def ignore(line: str) -> None:
    """For commands whose output only the log wants."""


def missing_parts(spared: Collection[str] = ()) -> dict[str, str]:
    """What the build will need and this system lacks: {what it is: the Debian package that brings it}.
    `spared`: the packages that need not be compiled."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    cc = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    cxx = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    missing = {}
    if importlib.util.find_spec("ensurepip") is None and not VENV_PYTHON.exists():
        missing["the venv module"] = f"{version}-venv"
    if not compiles("#include <stdio.h>\nint main(void) { return 0; }\n", ".c", cc):
        missing["a C compiler with the C library's headers"] = "gcc libc6-dev"
    if "llama_cpp_python" not in spared and not compiles(
        "#include <string>\nint main() { return std::string().size(); }\n", ".cpp", cxx
    ):
        missing["a C++ compiler"] = "g++"
    if "fastecdsa" in spared:
        return missing
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing["the Python headers"] = f"{version}-dev"
    if not compiles("#include <gmp.h>\nmpz_t number;\n", ".c", cc) and not any(
        Path("/usr/include").rglob("gmp.h")
    ):
        missing["the GMP headers"] = "libgmp-dev"
    return missing


def can_sudo() -> bool:
    """Whether sudo works here without asking for anything."""
    return (
        bool(shutil.which("sudo"))
        and not subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode
    )


def install_system_packages(missing: dict[str, str], spared: Collection[str], screen: Screen) -> None:
    names = " and ".join(", ".join(missing).rsplit(", ", 1))
    packages = " ".join(missing.values()).split()
    by_hand = f"\n\n    sudo apt-get update && sudo apt-get install -y {' '.join(packages)}\n"
    if not shutil.which("apt-get"):
        raise BootstrapError(
            f"This system lacks {names}. Install them with its package manager and run the command again.\n"
            f"(Debian and Ubuntu call the packages: {' '.join(packages)})",
            exit_code=2,
        )
    if os.geteuid() != 0 and not can_sudo():
        raise BootstrapError(f"This system lacks {names}. Run this line, then the command again:{by_hand}", 2)
    screen.keep("→", f"missing {names}: installing {' '.join(packages)} with apt")
    prefix = [
        *([] if os.geteuid() == 0 else ["sudo", "-n"]),
        "env",
        "DEBIAN_FRONTEND=noninteractive",
        "apt-get",
    ]
    # A failed update is no reason to stop: the lists at hand may do. A failed install is.
    run_logged([*prefix, "update"], ignore, lambda: screen.show("apt-get update ..."))
    install = [*prefix, "install", "-y", "--no-install-recommends", *packages]
    if run_logged(install, ignore, lambda: screen.show("apt-get install ...")):
        raise BootstrapError(f"apt-get could not install {names}. The line to run by hand:{by_hand}", 2)
    if still := missing_parts(spared):
        raise BootstrapError(f"Installed {' '.join(packages)}, and still missing: {', '.join(still)}", 2)


def ask_venv(code: str) -> str | None:
    """What the environment's Python prints when it runs `code`; None where it cannot."""
    if not VENV_PYTHON.exists():
        return None
    answer = subprocess.run([str(VENV_PYTHON), "-Ic", code], capture_output=True, text=True, check=False)
    return None if answer.returncode else answer.stdout.strip()


def pip_version() -> tuple[int, ...]:
    """The version of the environment's pip; () where it has none."""
    return tuple(
        int(part) for part in re.findall(r"\d+", ask_venv("import pip; print(pip.__version__)") or "")[:2]
    )


def make_venv(screen: Screen) -> None:
    version = ask_venv(
        f"import sys; assert sys.version_info >= {MINIMUM_PYTHON}; print(sys.version.split()[0])"
    )
    if version is None:
        if (VENV / "pyvenv.cfg").exists():
            shutil.rmtree(VENV)  # its interpreter is gone or too old: that cannot be mended
            VENV.mkdir()
        version = sys.version.split()[0]
        command = [sys.executable, "-m", "venv", str(VENV)]
    else:
        command = [str(VENV_PYTHON), "-m", "ensurepip"]  # made by a tool that leaves pip out
    pip = pip_version()
    if not pip:
        if run_logged(command, ignore, lambda: screen.show("creating .venv ...")):
            raise BootstrapError(f"{' '.join(command)} failed")
        pip = pip_version()
    if pip < RAW_PROGRESS_PIP:
        command = [str(VENV_PYTHON), "-m", "pip", "install", "--no-input", "--upgrade", "pip"]
        run_logged(command, ignore, lambda: screen.show("updating pip ..."))
        # Asked rather than believed: without a network pip finds itself good enough and says so with 0.
        if pip_version() < RAW_PROGRESS_PIP:
            raise BootstrapError("pip could not update itself; is the network reachable?")
    screen.keep("✓", f"virtual environment {VENV.relative_to(ROOT)}, Python {version}")


def fingerprint() -> str:
    digest = hashlib.sha256()
    for name in INSTALLED_FROM:
        digest.update((ROOT / name).read_bytes())
    digest.update(f"{VENV} {VENV_PYTHON.resolve()}".encode())
    return digest.hexdigest()


def installed_extras() -> set[str] | None:
    """The extras installed from the present files; None where an installation is due."""
    try:
        stamp = json.loads(STAMP.read_text())
        current = stamp["fingerprint"] == fingerprint() and VENV_PYTHON.exists()
        return set(stamp["extras"]) if current else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_stamp(extras: set[str]) -> None:
    STAMP.write_text(json.dumps({"fingerprint": fingerprint(), "extras": sorted(extras)}))


def build_environment() -> dict[str, str]:
    """ninja rather than make (its output can be followed), and no more compilers than the memory holds."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    n_jobs = max(1, min(os.cpu_count() or 1, int(memory_bytes // MEMORY_PER_COMPILER_BYTES)))
    return {"SKBUILD_NINJA_MAKE_FALLBACK": "0", "CMAKE_BUILD_PARALLEL_LEVEL": str(n_jobs), **os.environ}


def install(extras: set[str], wheels: list[str], screen: Screen) -> None:
    from swarmllm.pip_progress import PipProgress, duration

    started_s = time.monotonic()
    progress = PipProgress(started_s)
    site_packages = next((VENV / "lib").glob("python*/site-packages"))
    n_before = len(list(site_packages.glob("*.dist-info")))
    announced: set[str] = set()

    def on_line(line: str) -> None:
        kept = progress.feed(line, time.monotonic())
        if kept:
            screen.keep("✗" if "failed" in kept else "✓", kept)
        elif progress.label == "building llama-cpp-python" and progress.label not in announced:
            announced.add(progress.label)
            screen.keep("→", "compiling llama-cpp-python: a few minutes, once (pip keeps the result)")

    def on_tick() -> None:
        if progress.label.startswith("installing"):
            progress.done = len(list(site_packages.glob("*.dist-info"))) - n_before
            progress.total = progress.n_to_install
        screen.show(progress.line(time.monotonic()))

    target = f"{ROOT}[{','.join(sorted(extras))}]" if extras else str(ROOT)
    options = ["--no-input", "--no-color", "--disable-pip-version-check", "--progress-bar", "raw", "-v"]
    options += [f"--find-links={place}" for place in wheels]
    command = [str(VENV_PYTHON), "-m", "pip", "install", *options, "--editable", target]
    if run_logged(command, on_line, on_tick, build_environment()):
        raise BootstrapError("pip could not install SwarmLLM")
    write_stamp(extras)
    screen.keep("✓", f"SwarmLLM installed in {duration(time.monotonic() - started_s)}")


def needed(spared: Collection[str]) -> str:
    """What this system has, and what it need not have."""
    parts = ["C compiler" if "llama_cpp_python" in spared else "C and C++ compiler"]
    parts += [] if "fastecdsa" in spared else ["Python headers", "GMP headers"]
    return ", ".join(parts) + (f"; wheels of {' and '.join(sorted(spared))}" if spared else "")


def run_under_newer_python() -> NoReturn:
    """Replace this process by the same script under a Python that is new enough, if the system has one."""
    for minor in range(20, MINIMUM_PYTHON[1] - 1, -1):
        python = shutil.which(f"python3.{minor}")
        if python:
            os.execv(python, [python, "-I", *sys.argv])
    wanted = ".".join(map(str, MINIMUM_PYTHON))
    sys.exit(
        f"SwarmLLM needs Python {wanted} or later; {sys.executable} is {sys.version.split()[0]} and the PATH "
        f"has no newer one.\nInstall one (Debian 12, Ubuntu 24.04 and later: sudo apt-get install python3), "
        f"then run this again, or name it: make PYTHON=/path/to/python{wanted}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Create .venv and install SwarmLLM into it.")
    parser.add_argument("--extra", action="append", default=[], help="an optional extra of pyproject.toml")
    wanted = set(parser.parse_args().extra)
    if sys.version_info < MINIMUM_PYTHON:
        run_under_newer_python()
    have = installed_extras()
    if have is not None and wanted <= have:
        return 0
    # Imported late: an old Python must get as far as looking for a newer one. Appended, so that nothing in
    # the project's folder can stand in for a module of the standard library.
    sys.path.append(str(ROOT))
    from swarmllm import local_wheels

    screen = Screen()
    print("Setting up SwarmLLM", flush=True)
    try:
        try:
            wheels = local_wheels.places(ROOT, os.environ)
        except ValueError as error:
            raise BootstrapError(str(error), 2) from None
        pins = local_wheels.pinned((ROOT / "pyproject.toml").read_text("utf-8"))
        spared = local_wheels.spared(wheels, pins)
        VENV.mkdir(exist_ok=True)
        missing = missing_parts(spared)
        if missing:
            install_system_packages(missing, spared, screen)
        screen.keep("✓", needed(spared))
        make_venv(screen)
        install(wanted | (have or set()), wheels, screen)
        return 0
    except BootstrapError as error:
        screen.keep("✗", str(error))
        if error.exit_code == 1:
            lines = LOG.read_text(errors="replace").splitlines()
            tail = [line for line in lines if not line.lstrip().startswith(LOG_NOISE)][-LOG_TAIL_LINES:]
            print("\n".join(["", *(f"    {line[:160]}" for line in tail), "", f"The full log is in {LOG}"]))
        return error.exit_code
    except KeyboardInterrupt:
        screen.clear()
        print("Interrupted. Run the same command again to go on; what was built is kept.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
