"""Names of models: which are allowed, and aliases in the catalogue.

A model has one name that is shown and any number that lead to it as well: the same content, added from two
places under two names, is one model (see `Catalogue.add`). The functions work inside the catalogue's
transactions.
"""

from __future__ import annotations

import difflib
import re
import sqlite3

from swarmllm.errors import InvalidRequest
from swarmllm_proto.identifiers import ModelId

MAX_NAME_LENGTH = 100

TABLE = """
CREATE TABLE IF NOT EXISTS further_names (
    name TEXT PRIMARY KEY,
    model_id TEXT NOT NULL
) STRICT
"""


def normalise_name(text: str) -> str:
    """What people type: lower case letters, digits, dot, underscore, hyphen."""
    name = re.sub(r"[^a-z0-9._]+", "-", text.lower())[:MAX_NAME_LENGTH].strip("-._")
    return name or "model"


def check_name(name: str) -> None:
    """Raises InvalidRequest for a name that `normalise_name` would change."""
    if name != normalise_name(name) or not name:
        raise InvalidRequest(
            f"a model's name is at most {MAX_NAME_LENGTH} lower case letters, digits, '.', '_' and '-';"
            f" for example {normalise_name(name)}",
            field="name",
        )


def not_found(wanted: str, names: list[str]) -> str:
    shown = wanted[:80]
    close = difflib.get_close_matches(shown.lower(), names, n=1)
    if close:
        return f"model {shown!r} is not known here; did you mean {close[0]}?"
    known = ", ".join(names[:10]) or "none"
    return f"model {shown!r} is not known here (known: {known}); add it with: swarmllm models add PATH"


def owner_of(database: sqlite3.Connection, name: str) -> str | None:
    """The id of the model that has `name` as a further one."""
    row = database.execute("SELECT model_id FROM further_names WHERE name = ?", (name,)).fetchone()
    return row[0] if row else None


def further_names(database: sqlite3.Connection, model_id: ModelId) -> tuple[str, ...]:
    """Besides the one that is shown, in order."""
    rows = database.execute("SELECT name FROM further_names WHERE model_id = ? ORDER BY name", (model_id,))
    return tuple(name for (name,) in rows)


def give_name(database: sqlite3.Connection, name: str, model_id: ModelId) -> None:
    database.execute("INSERT OR REPLACE INTO further_names VALUES (?, ?)", (name, model_id))


def drop_name(database: sqlite3.Connection, name: str) -> None:
    database.execute("DELETE FROM further_names WHERE name = ?", (name,))


def drop_names(database: sqlite3.Connection, model_id: ModelId) -> None:
    database.execute("DELETE FROM further_names WHERE model_id = ?", (model_id,))
