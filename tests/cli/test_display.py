"""Text from other machines cannot steer the terminal; numbers come with units."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from swarmllm.cli.chat.stream import Finished, ShownStage
from swarmllm.cli.display import duration, make_console, route_table, safe, size, summary, table


@given(st.text())
def test_nothing_safe_can_steer_a_terminal(text: str) -> None:
    shown = safe(text)
    assert not [char for char in shown if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


@given(st.text(st.characters(categories=("L", "N", "P", "S"))))
def test_harmless_text_is_shown_as_it_is(text: str) -> None:
    assert safe(text) == text


def test_line_ends_are_kept_only_where_asked() -> None:
    assert safe("a\n\tb\x1b[2J", newlines=True) == "a\n\tb\\x1b[2J"
    assert safe("a\nb") == "a\\nb"


def test_units() -> None:
    assert [size(n) for n in (0, 999, 1000, 2_500_000, 7.1e9, 2e12)] == [
        "0 B", "999 B", "1.0 kB", "2.5 MB", "7.1 GB", "2.0 TB",
    ]  # fmt: skip
    assert [duration(s) for s in (0.0123, 4.25, 3725)] == ["12.3 ms", "4.2 s", "1:02:05"]


def rendered(renderable: object) -> str:
    console = make_console()
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_a_table_shows_markup_as_text() -> None:
    assert "[red]kitchen[/red]" in rendered(table(("name",), [("[red]kitchen[/red]",)]))


STAGES = (
    ShownStage("12D3KooWaaaaAAAAAAAA", "node-1", "0:4", 0.5, 0.125, 0.25, 3.0, 3584),
    ShownStage("12D3KooWbbbbBBBBBBBB", "", "4:8", None, None, None, None, None),
)


def test_the_route_names_node_layers_and_times() -> None:
    lines = rendered(route_table(Finished("stop", STAGES, 12.4, None, 34, 56, {}))).splitlines()
    assert lines[0].split() == [
        "node", "id", "layers",
        "compute", "ms/token", "node", "ms/token", "network", "ms/token", "bytes/token", "prefill", "ms",
    ]  # fmt: skip
    assert lines[1].split() == ["node-1", "…AAAAAAAA", "0:4", "0.50", "0.12", "0.25", "3,584", "3.00"]
    assert len(lines) == 3
    assert lines[2].split() == ["-", "…BBBBBBBB", "4:8", "-", "-", "-", "-", "-"]


def test_the_summary_says_how_fast_and_over_how_many_nodes() -> None:
    finished = Finished("length", STAGES, 12.4, 321.7, 34, 56, {})
    assert summary(finished) == (
        "56 tokens · 322 tokens/s · prefill of 34 tokens 12 ms · 2 nodes · cut off at max_tokens"
    )


def test_the_summary_says_how_many_guesses_were_right() -> None:
    for guesses, shown in (({"checked": 9, "right": 7}, "7 of 9 guesses right · "), ({"checked": 0}, "")):
        finished = Finished("stop", STAGES, 12.4, None, 34, 56, {"guesses": guesses})
        assert summary(finished) == f"56 tokens · prefill of 34 tokens 12 ms · {shown}2 nodes"
        last_line = rendered(route_table(finished)).splitlines()[-1].strip()
        assert ("guesses" in last_line) is bool(shown)
        assert last_line.startswith(shown.removesuffix(" · "))
