"""Which wheels an installation takes, and what it need not compile with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from swarmllm import bootstrap, local_wheels

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = "llama_cpp_python-0.3.36+swarmllm.portable-py3-none-manylinux_2_34_x86_64.whl"
SIGNING = "fastecdsa-2.3.2-cp311-cp311-manylinux_2_34_x86_64.whl"
HERE = ("cp311", "x86_64", (2, 36))
PINS = {"llama_cpp_python": "0.3.36"}


@pytest.mark.parametrize(
    ("wheel", "fits"),
    [
        (RUNTIME, True),
        (SIGNING, True),
        ("trio-0.30.0-py3-none-any.whl", True),
        ("six-1.17.0-py2.py3-none-any.whl", True),
        (RUNTIME.replace("_2_34_", "_2_36_"), True),
        (RUNTIME.replace("_2_34_", "_2_37_"), False),
        (RUNTIME.replace("x86_64", "aarch64"), False),
        (RUNTIME.replace("manylinux_2_34_x86_64", "manylinux_2_40_x86_64.manylinux_2_17_x86_64"), True),
        (SIGNING.replace("cp311-cp311", "cp312-cp312"), False),
        (SIGNING.removesuffix(".whl"), False),
        ("notes.txt", False),
    ],
)
def test_a_wheel_fits_the_python_the_processor_and_the_c_library(wheel: str, fits: bool) -> None:
    assert local_wheels.fits(wheel, *HERE) is fits


def test_on_a_system_without_glibc_nothing_compiled_fits() -> None:
    assert not local_wheels.fits(RUNTIME, "cp311", "x86_64", (0, 0))


def test_what_has_a_wheel_here_need_not_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_wheels, "this_system", lambda: HERE)
    (tmp_path / RUNTIME).touch()
    (tmp_path / SIGNING.replace("cp311", "cp312")).touch()
    folders = [str(tmp_path), "https://wheels.example/swarmllm"]
    assert local_wheels.spared(folders, PINS) == {"llama_cpp_python"}
    (tmp_path / SIGNING).touch()
    assert local_wheels.spared(folders, PINS) == {"llama_cpp_python", "fastecdsa"}
    assert local_wheels.spared(folders, {"llama_cpp_python": "0.3.37"}) == {"fastecdsa"}


def test_pins_are_read_as_pyproject_has_them() -> None:
    pins = local_wheels.pinned((ROOT / "pyproject.toml").read_text("utf-8"))
    assert {"llama_cpp_python", "libp2p", "gguf"} <= pins.keys()


def test_wheels_are_looked_for_in_dist_and_where_the_variable_says(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    said = {local_wheels.VARIABLE: f"{elsewhere} https://wheels.example/swarmllm"}
    assert local_wheels.places(tmp_path, {}) == []
    assert local_wheels.places(tmp_path, said) == said[local_wheels.VARIABLE].split()
    (tmp_path / "dist").mkdir()
    assert local_wheels.places(tmp_path, {}) == []
    (tmp_path / "dist" / RUNTIME).touch()
    assert local_wheels.places(tmp_path, said)[0] == str(tmp_path / "dist")
    with pytest.raises(ValueError, match="SWARMLLM_WHEELS names nowhere"):
        local_wheels.places(tmp_path, {local_wheels.VARIABLE: "nowhere"})


@pytest.mark.parametrize(
    ("spared", "missing"),
    [
        (set(), {"gcc libc6-dev", "g++", "python3-dev", "libgmp-dev"}),
        ({"llama_cpp_python"}, {"gcc libc6-dev", "python3-dev", "libgmp-dev"}),
        ({"llama_cpp_python", "fastecdsa"}, {"gcc libc6-dev"}),
    ],
)
def test_a_bare_system_needs_less_with_wheels(
    spared: set[str], missing: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bootstrap, "compiles", lambda *_: False)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(Path, "rglob", lambda *_: iter(()))
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    found = {each.replace(version, "python3") for each in bootstrap.missing_parts(spared).values()}
    assert found - {"python3-venv"} == missing


def test_a_folder_that_does_not_exist_ends_the_installation(tmp_path: Path) -> None:
    copied = tmp_path / "swarmllm"
    copied.mkdir()
    for name in ("__init__.py", "bootstrap.py", "local_wheels.py", "pip_progress.py"):
        (copied / name).write_bytes((ROOT / "swarmllm" / name).read_bytes())
    for name in ("pyproject.toml", "setup.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-I", copied / "bootstrap.py"],
        env={local_wheels.VARIABLE: "/nowhere/wheels"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "names /nowhere/wheels, which is neither" in done.stdout) == (2, True)
    assert not (tmp_path / ".venv").exists()
