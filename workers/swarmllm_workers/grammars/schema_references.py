"""Resolves the references of a JSON schema inside the schema itself.

Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

WALKED_MAX: Final = 200_000
_DATA: Final = frozenset(("const", "enum", "default", "examples", "example"))
"""Keywords whose values are no schemas, whatever they look like."""


class Unsupported(Exception):
    """The schema asks for what cannot be enforced here, or is none; the text begins with the place."""


class References:
    def __init__(self, root: object) -> None:
        self._root = root
        self._id = root.get("$id", "") if isinstance(root, dict) else ""

    def target(self, place: object, path: str) -> Any:
        """The schema that `place`, a `$ref` at `path`, leads to. Raises Unsupported."""
        if not isinstance(place, str):
            raise Unsupported(f"{path}/$ref is not a text")
        inside = place
        if isinstance(self._id, str) and self._id and place.startswith(self._id.rstrip("#")):
            inside = place[len(self._id.rstrip("#")) :] or "#"
        if not inside.startswith("#"):
            raise Unsupported(f"{path}/$ref leads out of the schema: {place[:100]}")
        if inside != "#" and not inside.startswith("#/"):
            return self._anchor(inside[1:], path)
        found: Any = self._root
        for part in inside[2:].split("/") if inside != "#" else ():
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isascii() and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise Unsupported(f"{path}/$ref leads nowhere: {place[:100]}")
            if isinstance(found, dict):
                self.refuse_other_base(found, place)
        return found

    def refuse_other_base(self, schema: dict[str, Any], path: str) -> None:
        """References below an `$id` are relative to it."""
        if schema is self._root or not isinstance(schema.get("$id"), str):
            return
        if any("$ref" in part or "$dynamicRef" in part for part in _parts(schema)):
            raise Unsupported(f"{path}/$id is not supported above references")

    def refuse_dynamic(self, place: object, path: str) -> None:
        """A `$dynamicRef` is a `$ref` where the schema has one document and the anchor one place."""
        n_documents = sum("$id" in part for part in _parts(self._root))
        if n_documents > 1 or not isinstance(place, str):
            raise Unsupported(f"{path}/$dynamicRef is not supported in a schema of several documents")

    def _anchor(self, name: str, path: str) -> Any:
        found = [
            part for part in _parts(self._root) if name in (part.get("$anchor"), part.get("$dynamicAnchor"))
        ]
        if len(found) != 1:
            raise Unsupported(f"{path}/$ref: there are {len(found)} anchors {name[:100]!r}")
        return found[0]


def _parts(schema: object) -> Iterator[dict[str, Any]]:
    """Every object in it that may be a schema."""
    waiting = [schema]
    for _ in range(WALKED_MAX):
        if not waiting:
            return
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += [value for key, value in part.items() if key not in _DATA]
        elif isinstance(part, list):
            waiting += part
    raise Unsupported("the schema has too many parts")
