"""Operations that take long, in parts: a generator runs where the decode steps run, and yields what need not.

What stands between two `yield`s may touch contexts, their KV and everything else that steps use, because no
step runs meanwhile. What is yielded is called somewhere else, maybe beside steps: it makes files, models and
contexts that nobody knows yet, reads what does not change, or closes what nobody uses any more. Its result,
or what it raises, comes back at the `yield`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

Operation: TypeAlias = Generator[Callable[[], Any], Any, T]


def complete(operation: Operation[T]) -> T:
    """Run the whole operation here and now."""
    try:
        part = next(operation)
        while True:
            try:
                result = part()
            except Exception as error:
                part = operation.throw(error)
            else:
                part = operation.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
