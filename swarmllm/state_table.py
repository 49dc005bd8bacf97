"""State tables: states x events -> state, as data that code, tests and diagrams share.

An event passes its table before it has any effect. A pair that is not in the table is a defect of this
program and raises. Events that another node can cause have to be in the table, if only as a pair that leads
back to its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Generic, TypeVar

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class UnknownTransition(RuntimeError):
    """An event that its state cannot have: a defect of this program, never of its input."""


class StateTable(Generic[S, E]):
    """`rows`: per state the next state of each event. `ignored`: per state the events that change nothing."""

    def __init__(self, first: S, rows: Mapping[S, Mapping[E, S]], ignored: Mapping[S, Iterable[E]]) -> None:
        """Raises ValueError for a pair that is given twice."""
        self.first = first
        self.rows: dict[S, dict[E, S]] = {state: dict(row) for state, row in rows.items()}
        for state, events in ignored.items():
            row = self.rows.setdefault(state, {})
            for event in events:
                if event in row:
                    raise ValueError(f"{state.name} has {event.name} twice")
                row[event] = state

    def after(self, state: S, event: E) -> S:
        """Raises UnknownTransition."""
        try:
            return self.rows[state][event]
        except KeyError:
            raise UnknownTransition(f"{event.name} is impossible in {state.name}") from None

    def diagram(self, *, without: Iterable[E] = ()) -> str:
        """As a Mermaid state diagram, without these events and what leads back to its own state. Several
        events with the same effect share an edge."""
        left_out = frozenset(without)
        lines = ["stateDiagram-v2", f"    [*] --> {self.first.name}"]
        for state, row in self.rows.items():
            edges: dict[S, list[str]] = {}
            for event, after in row.items():
                if after is not state and event not in left_out:
                    edges.setdefault(after, []).append(event.value)
            lines += [f"    {state.name} --> {after.name}: {' / '.join(e)}" for after, e in edges.items()]
            if not edges:
                lines.append(f"    {state.name} --> [*]")
        return "\n".join(lines)
