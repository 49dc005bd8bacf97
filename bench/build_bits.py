"""Whether other builds of libllama give the same bits: logits of the guide in several types.

    python -m bench.build_bits [PYTHON ...]

PYTHON is the interpreter of an environment with another build, such as the wheels of `make wheel`. Of a
portable build each variant that this processor can run is tried alone. Prints a table: each build with its
kernel class and, for each type, "equal" or the distance of its logits from those of this environment, root
mean square, in percent of their spread. One thread; 96 tokens in one batch, then 16 one by one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.common.uncut import keep_from_amx
from swarmllm.guide import GUIDE_PATH

N_PROMPT: Final = 96
N_STEPS: Final = 16
TYPES: Final = ("F16", "Q8_0", "Q4_K_M", "Q6_K", "Q4_0")
BUNDLED: Final = "llama_cpp_python.libs/*"
"""Libraries of the building system, beside the package."""
TEXT: Final = Path(__file__).resolve().parents[1] / "README.md"


def quantise(folder: Path) -> None:
    """The guide in all types, as folder/TYPE.gguf."""
    import llama_cpp

    for name in TYPES:
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
        settings.allow_requantize = True
        made = str(folder / f"{name}.gguf").encode()
        if llama_cpp.llama_model_quantize(str(GUIDE_PATH).encode(), made, ctypes.byref(settings)) != 0:
            raise RuntimeError(f"the guide cannot be made {name}")


def compute(models: Path, out: Path) -> dict[str, Any]:
    """In the environment to be tried: writes out/TYPE.npy, f32 [N_PROMPT + N_STEPS, n_vocab]."""
    keep_from_amx()
    from llama_cpp import Llama

    from swarmllm_workers.build_info import build_info
    from swarmllm_workers.engine.engine_settings import EngineSettings
    from swarmllm_workers.engine.kernel_class import kernel_class
    from swarmllm_workers.gguf_file import GgufFile

    text = TEXT.read_bytes()
    classes = {}
    for name in TYPES:
        path = models / f"{name}.gguf"
        model = Llama(str(path), n_ctx=256, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)
        tokens = model.tokenize(text)[: N_PROMPT + N_STEPS]
        model.eval(tokens[:N_PROMPT])
        for token in tokens[N_PROMPT:]:
            model.eval([token])
        np.save(out / f"{name}.npy", model.scores[: len(tokens)])
        model.close()
        classes[name] = kernel_class(GgufFile(path), EngineSettings())
    built = build_info()
    return {"variant": built["cpu_variant"], "features": built["features"], "classes": classes}


def library_folder(python: str) -> Path:
    code = "import importlib.util as u; print(u.find_spec('llama_cpp').submodule_search_locations[0])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()) / "lib"


def variants(libraries: Path, folder: Path) -> dict[str, Path]:
    """Folders with all libraries of a build, but one variant only; {} for a build without variants."""
    found = {}
    for variant in sorted(libraries.glob("libggml-cpu-*.so")):
        alone = folder / variant.stem.removeprefix("libggml-cpu-")
        shutil.copytree(libraries, alone, ignore=shutil.ignore_patterns("libggml-cpu-*"))
        for library in (variant, *libraries.parents[1].glob(BUNDLED)):
            shutil.copy(library, alone)
        found[alone.name] = alone
    return found


def ask(python: str, models: Path, out: Path, libraries: Path | None = None) -> dict[str, Any] | None:
    """None: this variant does not run here."""
    out.mkdir()
    environment = os.environ | ({"LLAMA_CPP_LIB_PATH": str(libraries)} if libraries else {})
    command = [python, "-m", "bench.build_bits", "--compute", str(models), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0 and libraries is None:
        raise SystemExit(f"{python} computes nothing (exit status {done.returncode}): {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else None


def distance(rows: np.ndarray, reference: np.ndarray) -> str:
    if np.array_equal(rows.view(np.uint32), reference.view(np.uint32)):
        return "equal"
    rms = float(np.sqrt(np.mean((rows - reference) ** 2)))
    return f"{100 * rms / float(reference.std()):.2g} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", nargs="*", help="interpreters of environments with other builds")
    parser.add_argument("--compute", nargs=2, metavar=("MODELS", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compute:
        print(json.dumps(compute(*map(Path, options.compute))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = folder / "models"
        models.mkdir()
        quantise(models)
        builds: dict[str, tuple[str, Path | None]] = {"this environment": (sys.executable, None)}
        for n, python in enumerate(options.python):
            alone = variants(library_folder(python), folder / f"build-{n}")
            builds[f"build {n + 1}"] = (python, None)
            builds |= {f"build {n + 1}, {variant}": (python, path) for variant, path in alone.items()}
        print(f"| build | variant | kernel class (Q8_0) | {' | '.join(TYPES)} |")
        print(f"|{'---|' * (3 + len(TYPES))}")
        for n, (label, (python, libraries)) in enumerate(builds.items()):
            told = ask(python, models, folder / f"rows-{n}", libraries)
            if told is None:
                print(f"| {label} | does not run here |")
                continue
            cells = [
                distance(
                    np.load(folder / f"rows-{n}" / f"{each}.npy"), np.load(folder / "rows-0" / f"{each}.npy")
                )
                for each in TYPES
            ]
            row = [label, told["variant"] or "-", told["classes"]["Q8_0"] or "none", *cells]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
