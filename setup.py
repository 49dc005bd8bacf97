"""What pyproject.toml cannot say: the worker's pieces of C, and the addresses in what an index shows.

The pieces of C are plain shared libraries and optional, not extension modules: they include no Python header
and are loaded with ctypes, so one wheel is for every version of Python. Without a compiler the build
goes on without them: the worker answers the tap's callback and takes rows in Python, more slowly, and small
batches and fused attention are computed as ggml has it. Sampling uses numpy.

An index shows README.md, whose links lead to other files of the repository. SWARMLLM_PROJECT_URL is the
repository's address: with it links lead to the files at the tag of this version, without it they are text. A
source distribution keeps the address, so a wheel that is built from one says the same.
"""

import os
import re
from email.parser import HeaderParser
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

HERE = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
"""Of Markdown, to another file."""


def project_url() -> str:
    """Empty where nobody says."""
    said = os.environ.get("SWARMLLM_PROJECT_URL", "")
    metadata = HERE / "PKG-INFO"
    if not said and metadata.exists():
        for line in HeaderParser().parsestr(metadata.read_text("utf-8")).get_all("Project-URL", []):
            name, _, url = line.partition(", ")
            said = url if name == "Source" else said
    return said.rstrip("/")


def version() -> str:
    (found,) = re.findall(r'^version = "(.*)"$', (HERE / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    return str(found)


def urls(base: str) -> dict[str, str]:
    if not base:
        return {}
    files = f"{base}/blob/v{version()}"
    documentation, changes = f"{files}/docs/README.md", f"{files}/CHANGELOG.md"
    return {"Source": base, "Documentation": documentation, "Changelog": changes}


def description(base: str) -> str:
    """README.md as it can be shown elsewhere."""

    def elsewhere(link: re.Match[str]) -> str:
        is_picture, text, target = link.groups()
        if base:
            kind = "raw" if is_picture else "blob"
            return f"{is_picture}[{text}]({base}/{kind}/v{version()}/{target})"
        return "" if is_picture else text

    return LINK.sub(elsewhere, (HERE / "README.md").read_text("utf-8"))


class AnyPythonWheel(bdist_wheel):
    """For this platform and every Python: no library in it knows of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"bdist_wheel": AnyPythonWheel},
    long_description=description(project_url()),
    long_description_content_type="text/markdown",
    project_urls=urls(project_url()),
    ext_modules=[
        Extension(
            f"swarmllm_workers._{name}",
            [f"workers/swarmllm_workers/native/{source}.c" for source in (name, *others)],
            depends=[
                f"workers/swarmllm_workers/native/{header}.h"
                for header in (
                    "k_quants",
                    "blocks",
                    "blocks_32",
                    "experts",
                    "ggml_tensor",
                    "own_functions",
                    "neon",
                    "neon_blocks_32",
                    "neon_blocks_32_rows",
                    "neon_k_quants_rows",
                    "pairs_32",
                    "panels",
                    "panels_body",
                    "row_attention_avx2",
                    "row_attention_avx512",
                    "weights",
                    "weights_body",
                )
            ],
            # Nothing fused that the source does not fuse: rows that are rounded have the same bits on every
            # processor, and attention has ggml's.
            extra_compile_args=[
                "-O2",
                *(("-ffp-contract=off",) if name in ("row_codec", "row_attention") else ()),
            ],
            libraries=["m"] if name == "row_attention" and os.name == "posix" else [],
            optional=True,
        )
        for name, *others in (
            ("tap",),
            (
                "small_batches",
                "k_quants",
                "blocks_32",
                "pairs_32",
                "panels",
                "panels_32",
                "panels_avx2",
                "panels_few",
                "experts",
                "left_weights",
                "quantise",
                "neon",
                "neon_blocks_32",
                "neon_k_quants",
            ),
            ("row_attention", "row_attention_avx2"),
            ("amx",),
            ("memory_calls",),
            ("lone_row",),
            ("weights", "draw"),
            ("row_codec",),
        )
    ],
)
