"""A file of each architecture that llama.cpp's own test program writes: the cuts that the table allows are
exact in all of them, and what the others allow when they are tried is what it was.

`make compliance` takes `tests/test-llama-archs.cpp` from llama-cpp-python's source distribution; it is
compiled here against the libllama that is installed, with eight layers where it would write two.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import llama_cpp
import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PROGRAM: Final = Path(__file__).parent / "llamacpp" / "try_cuts.py"
LIBRARIES: Final = Path(llama_cpp.__file__).parent / "lib"
N_FILES_MIN: Final = 120
TIMEOUT_S: Final = 600
ENDED: Final = "ends the process"

UNLISTED: Final[dict[str, int | str]] = {
    **dict.fromkeys(("deepseek32", "glm-dsa", "hy_v3", "jais2", "minimax-m3", "mistral4", "nanbeige"), 1),
    "pockettts": 1,
    **dict.fromkeys(("cohere2moe", "exaone-moe", "granite_swa", "laguna", "maple", "mimo2", "spark2_5"), 4),
    **dict.fromkeys(("dots3note", "glm5-next", "kimi-k3", "minimax-01", "plamo2", "qwen4exp"), ENDED),
}
"""What trying finds of architectures that are not in the table: layers per part. Those that are not named run
whole. Where libllama ends the process, the daemon tries coarser parts, each in a worker of its own."""


def sources() -> Path:
    pattern = "llama_cpp_python-*/vendor/llama.cpp"
    suite = Path(os.environ.get("LLAMACPP_SUITE", ROOT / ".venv-compliance" / "suite"))
    found = [each for each in sorted(suite.glob(pattern)) if (each / "tests/test-llama-archs.cpp").is_file()]
    if not found:
        pytest.skip("llama.cpp's tests are not here: make compliance fetches them")
    return found[-1]


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that writes files."""
    llamacpp, folder = sources(), tmp_path_factory.mktemp("writer")
    text, n_changed = re.subn(
        r"uint32_t n_layer = 2;",
        "uint32_t n_layer = 8;",
        (llamacpp / "tests/test-llama-archs.cpp").read_text(),
    )
    assert n_changed == 1
    text = text.replace('"../src/', '"')
    (folder / "archs.cpp").write_text(text)
    inputs = [folder / "archs.cpp", *(llamacpp / f"common/{name}.cpp" for name in ("log", "common", "json"))]
    includes = [f"-I{llamacpp / name}" for name in ("include", "ggml/include", "common", "src", "vendor")]
    command = ["g++", "-std=c++17", "-O1", "-ffunction-sections", *includes, *map(str, inputs)]
    command += ["-o", str(folder / "archs"), "-Wl,--gc-sections", f"-L{LIBRARIES}", f"-Wl,-rpath,{LIBRARIES}"]
    command += ["-lllama", "-lggml", "-lggml-base", "-lggml-cpu"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert built.returncode == 0, built.stderr[-2000:]
    return folder / "archs"


def architectures() -> list[str]:
    table = re.search(
        r"LLM_ARCH_NAMES = \{(.*?)\n\};", (sources() / "src/llama-arch.cpp").read_text(), re.DOTALL
    )
    assert table is not None
    return re.findall(r'"([^"]+)"', table[1])


def tried(path: Path) -> dict[str, Any] | None:
    """None: it ended the process."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(path)], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode < 0:
        return None
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_every_architecture_is_cut_as_the_table_or_a_trial_says(writer: Path, tmp_path: Path) -> None:
    n_files, wrong = 0, []
    for name in architectures():
        subprocess.run(
            [writer, "-s", "1", "-a", name, "-o", tmp_path],
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )  # it cannot write all
        for path in sorted(tmp_path.glob("*.gguf")):
            n_files += 1
            found = tried(path)
            path.unlink()
            if found is None:
                is_right = UNLISTED.get(name) == ENDED
            elif found["listed"]:
                is_right = found["tried"] == found["table"]
            else:
                is_right = found["tried"] == UNLISTED.get(name, 0)
            if not is_right:
                wrong.append(f"{path.name}: {found}")
    assert not wrong
    assert n_files >= N_FILES_MIN
