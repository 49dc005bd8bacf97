"""Routes of an API without what makes URLs of them.

Werkzeug compiles two functions for that with each route, and nobody here asks for a URL. They take a tenth of
a second of processor time for each API that a test starts.
"""

from __future__ import annotations

from typing import Any

from werkzeug.routing import Rule


def leave_out_url_builders() -> None:
    """In this process. A URL that is asked for all the same fails loudly."""
    assert hasattr(Rule, "_compile_builder")
    Rule._compile_builder = _compile_no_builder  # type: ignore[assignment, method-assign]


def _compile_no_builder(rule: Rule, append_unknown: bool = True) -> Any:
    def build(rule: Rule, **values: Any) -> Any:
        raise AssertionError(f"a URL of {rule.rule} was asked for: let routes compile their builders")

    return build
