"""The bootstrap: reads pip's output rightly, runs where nothing is installed, and says what is missing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from swarmllm import bootstrap
from swarmllm.bootstrap import BootstrapError, Screen, compiles, install_system_packages
from swarmllm.pip_progress import PipProgress, duration

ROOT = Path(__file__).resolve().parents[2]

COMPILE = "  [64/193] /usr/bin/g++ -DGGML_SHARED -O3 -MF x.o.d -o x.o -c /tmp/build/src/models/gemma2.cpp"
MAKE = "  [ 12%] Building CXX object vendor/llama.cpp/src/CMakeFiles/llama.dir/llama-batch.cpp.o"


def test_a_compilation_has_a_bar_a_file_and_the_time_left() -> None:
    progress = PipProgress(0.0)
    progress.feed("  Building wheel for llama-cpp-python (pyproject.toml): started", 100.0)
    progress.feed("  [0/1] Re-running CMake...", 101.0)
    assert progress.total == 0, "a step of another count is not progress"
    progress.feed(COMPILE, 164.0)
    line = progress.line(164.0)
    for expected in ("33 %", "64/193", "2:09 min left", "building llama-cpp-python: gemma2.cpp", "███░░░"):
        assert expected in line
    done = progress.feed(
        "  Building wheel for llama-cpp-python (pyproject.toml): finished with status 'done'", 310.0
    )
    assert done == "built llama-cpp-python in 3:30 min"


def test_makes_percentages_are_progress_too() -> None:
    progress = PipProgress(0.0)
    progress.feed("  Building wheel for llama-cpp-python (pyproject.toml): started", 0.0)
    progress.feed(MAKE, 10.0)
    assert "12 %" in progress.line(10.0)
    assert "llama-batch.cpp" in progress.line(10.0)


def test_the_first_line_counts_from_its_own_start() -> None:
    """The clock may have started long ago, with the machine."""
    assert PipProgress(11_000.0).line(11_002.5) == "starting pip ... 2 s"


def test_a_failed_build_is_said_to_have_failed() -> None:
    progress = PipProgress(0.0)
    progress.feed("  Building wheel for fastecdsa (pyproject.toml): started", 0.0)
    failed = progress.feed(
        "  Building wheel for fastecdsa (pyproject.toml): finished with status 'error'", 2.0
    )
    assert failed == "building fastecdsa failed after 2 s"


def test_only_a_big_download_stays_on_the_screen() -> None:
    progress = PipProgress(0.0)
    progress.feed("Collecting numpy>=2.0", 0.0)
    assert "resolving numpy" in progress.line(0.0)
    progress.feed("  Downloading numpy-2.4.6.whl.metadata (62 kB)", 0.0)
    assert "resolving numpy" in progress.line(0.0)
    progress.feed("  Downloading small-1.0.whl (62 kB)", 0.0)
    assert progress.feed("Progress 62000 of 62000", 0.0) is None
    progress.feed("  Downloading llama_cpp_python-0.3.36.tar.gz (76.6 MB)", 1.0)
    progress.feed("Progress 38294625 of 76589250", 5.0)
    assert "38.3 MB of 76.6 MB  4 s left" in progress.line(5.0)
    assert progress.feed("Progress 76589250 of 76589250", 9.0) == (
        "downloaded llama_cpp_python-0.3.36.tar.gz (76.6 MB) in 8 s"
    )


def test_installing_counts_the_packages() -> None:
    progress = PipProgress(0.0)
    progress.feed("Installing collected packages: a, b, c", 0.0)
    assert (progress.n_to_install, "installing 3 packages" in progress.line(2.0)) == (3, True)


@pytest.mark.parametrize(
    "line", ["", "  ", "[/]", "[1/0] x", "Progress x of y", "Building wheel for", "Collecting "]
)
def test_unexpected_lines_do_no_harm(line: str) -> None:
    progress = PipProgress(0.0)
    assert progress.feed(line, 0.0) is None
    assert progress.line(1.0)


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.9, 60, 3723)] == ["0 s", "59 s", "1:00 min", "62:03 min"]


def test_an_old_python_can_read_the_script() -> None:
    """Old enough to run it and to be told, or to find a newer one."""
    ast.parse((ROOT / "swarmllm" / "bootstrap.py").read_text(), feature_version=(3, 8))


def test_it_needs_nothing_that_is_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "swarmllm" / "bootstrap.py"), "--help"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "--extra" in done.stdout) == (0, True)


def test_a_compiler_that_is_not_there_does_not_compile() -> None:
    assert not compiles("int x;", ".c", ["", "no-such-compiler"])


def test_a_header_that_is_not_there_does_not_compile() -> None:
    assert compiles("#include <stdio.h>\n", ".c", ["cc"])
    assert not compiles("#include <no/such/header.h>\n", ".c", ["cc"])


def programs(folder: Path, **scripts: str) -> str:
    """A PATH with nothing but these shell scripts."""
    folder.mkdir()
    for name, script in scripts.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    return str(folder)


MISSING = {"a C++ compiler": "g++", "the GMP headers": "libgmp-dev"}


@pytest.mark.parametrize("sudo", [{}, {"sudo": "exit 1"}], ids=["no sudo", "sudo wants a password"])
def test_who_cannot_install_is_shown_the_line_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sudo: dict[str, str]
) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", apt_get="exit 99", **sudo))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(BootstrapError) as error:
        install_system_packages(MISSING, (), Screen())
    assert error.value.exit_code == 2
    assert "lacks a C++ compiler and the GMP headers" in str(error.value)
    assert "sudo apt-get update && sudo apt-get install -y g++ libgmp-dev" in str(error.value)


def test_a_system_without_apt_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "bin"))
    with pytest.raises(BootstrapError) as error:
        install_system_packages(MISSING, (), Screen())
    assert error.value.exit_code == 2
    assert "the GMP headers" in str(error.value)


def test_who_can_install_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    path = programs(
        tmp_path / "bin",
        apt_get=f'echo "apt-get $*" >> {calls}',
        sudo='[ "$1" = -n ] && shift; exec "$@"',
        env='shift; exec "$@"',
        true="exit 0",
    )
    monkeypatch.setenv("PATH", path)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(bootstrap, "LOG", tmp_path / "install.log")
    monkeypatch.setattr(bootstrap, "missing_parts", dict)
    install_system_packages(MISSING, (), Screen())
    assert calls.read_text().splitlines() == [
        "apt-get update",
        "apt-get install -y --no-install-recommends g++ libgmp-dev",
    ]


def test_a_stamp_counts_only_for_the_same_files_and_a_living_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / "v"
    python = venv / "bin" / "python"
    paths = {"ROOT": tmp_path, "VENV": venv, "STAMP": venv / "stamp.json", "VENV_PYTHON": python}
    for name, path in paths.items():
        monkeypatch.setattr(bootstrap, name, path)
    python.parent.mkdir(parents=True)
    python.touch()
    for name in bootstrap.INSTALLED_FROM:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    assert bootstrap.installed_extras() is None
    bootstrap.write_stamp({"test"})
    assert bootstrap.installed_extras() == {"test"}
    (tmp_path / bootstrap.INSTALLED_FROM[0]).write_text("two")
    assert bootstrap.installed_extras() is None
    bootstrap.write_stamp({"test"})
    python.unlink()
    assert bootstrap.installed_extras() is None
    bootstrap.STAMP.write_text("[]")
    assert bootstrap.installed_extras() is None


def test_every_file_that_is_compiled_decides_whether_an_installation_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = sorted(path.relative_to(bootstrap.ROOT) for path in bootstrap.ROOT.glob("workers/**/*.[ch]"))
    assert len(compiled) >= 4
    for name in bootstrap.INSTALLED_FROM:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    seen = {bootstrap.fingerprint()}
    for path in (*compiled, Path("setup.py"), Path("pyproject.toml")):
        (tmp_path / path).write_text("two")
        seen.add(bootstrap.fingerprint())
    assert len(seen) == 1 + len(compiled) + 2


@pytest.mark.parametrize(
    ("script", "version"),
    [("echo 26.3", (26, 3)), ("echo 23.2.1", (23, 2)), ("exit 1", ()), ("echo nothing", ())],
)
def test_the_version_of_the_environments_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, version: tuple[int, ...]
) -> None:
    programs(tmp_path / "bin", python=script)
    monkeypatch.setattr(bootstrap, "VENV_PYTHON", tmp_path / "bin" / "python")
    assert bootstrap.pip_version() == version


def test_a_pip_that_stays_old_without_a_network_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with 0: "Requirement already satisfied"."""
    programs(
        tmp_path / "bin", python='case "$*" in *install*) exit 0;; *sys*) echo 3.11.2;; *) echo 23.0.1;; esac'
    )
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    monkeypatch.setattr(bootstrap, "LOG", tmp_path / "install.log")
    monkeypatch.setattr(bootstrap, "VENV_PYTHON", tmp_path / "bin" / "python")
    with pytest.raises(BootstrapError, match="is the network reachable"):
        bootstrap.make_venv(Screen())
