"""Draws the generated part of docs/architecture.md from the source: `python docs/draw_architecture.py`.

Packages, their modules and what imports what are read from the code (parsed, never imported), so the page
cannot describe what is not there; tests/test_docs.py compares. What no parser can know, why it is
so, is written by hand above the marker.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
MARKER = "<!-- From here on drawn from the source by docs/draw_architecture.py. -->"
PACKAGES = {
    "swarmllm": ROOT / "swarmllm",
    "swarmllm_workers": ROOT / "workers" / "swarmllm_workers",
    "swarmllm_proto": ROOT / "proto" / "swarmllm_proto",
}
TOP_DOWN = (
    "swarmllm.cli",
    "swarmllm.daemon",
    "swarmllm.reloading",
    "swarmllm.api",
    "swarmllm.node",
    "swarmllm.pipeline",
    "swarmllm.workerpool",
    "swarmllm.downloads",
    "swarmllm.transfer",
    "swarmllm.swarm",
    "swarmllm.scheduling",
    "swarmllm.models",
    "swarmllm.guide",
    "swarmllm.config_reference",
    "swarmllm.config_sources",
    "swarmllm.config",
    "swarmllm.keys",
    "swarmllm.sd_notify",
    "swarmllm.memory_info",
    "swarmllm.process_use",
    "swarmllm.private_files",
    "swarmllm.errors",
    "swarmllm_workers",
    "swarmllm_proto",
)
"""The packages in reading order; one that is missing here is drawn last."""


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module, packages under their own name."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *(part for part in parts if part != "__init__"))), path


def package_of(name: str) -> str:
    """`swarmllm.api.openai.chat` belongs to `swarmllm.api`; the worker and the wire are one entry each."""
    return ".".join(name.split(".")[:2]) if name.startswith("swarmllm.") else name.split(".")[0]


def first_sentence(tree: ast.Module) -> str:
    """The first paragraph's first line of thought, up to a full stop or colon that ends one."""
    paragraph = " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".:") or "-"


def imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def in_reading_order(packages: set[str]) -> list[str]:
    return sorted(
        packages, key=lambda each: (TOP_DOWN.index(each) if each in TOP_DOWN else len(TOP_DOWN), each)
    )


@cache
def drawing() -> str:
    """Everything below the marker."""
    trees = {name: (path, ast.parse(path.read_text("utf-8"))) for name, path in modules()}
    arrows: dict[str, set[str]] = {package_of(name): set() for name in trees}
    for name, (_, tree) in trees.items():
        arrows[package_of(name)] |= {package_of(target) for target in imported_modules(tree)} & arrows.keys()
    lines = [
        "## Who imports whom",
        "",
        "Late imports (made when a command or function runs) count too.",
        "",
        "```",
    ]
    for package in in_reading_order(set(arrows)):
        below = in_reading_order(arrows[package] - {package, "swarmllm"})
        if package != "swarmllm" and below:
            lines.append(
                f"{package:<22} -> {', '.join(target.removeprefix('swarmllm.') for target in below)}"
            )
    lines += ["```", "", "## Packages and their modules"]
    for package in in_reading_order(set(arrows)):
        inside = {name: value for name, value in trees.items() if package_of(name) == package}
        lines += ["", f"### {package}", "", "| module | what it is |", "|---|---|"]
        for name, (path, tree) in inside.items():
            what = first_sentence(tree).replace("|", "\\|")
            lines.append(f"| [`{name}`](../{path.relative_to(ROOT)}) | {what} |")
    return "\n".join(lines) + "\n"


def page_with_drawing() -> str:
    by_hand, marker, _ = PAGE.read_text("utf-8").partition(MARKER)
    assert marker, f"{PAGE} has lost its marker"
    return f"{by_hand}{MARKER}\n\n{drawing()}"


if __name__ == "__main__":
    PAGE.write_text(page_with_drawing(), "utf-8")
