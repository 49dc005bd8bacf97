"""Unwraps errors from the exception groups that nurseries put around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

from swarmllm.errors import SwarmLLMError

T = TypeVar("T")


@asynccontextmanager
async def unwrapped(running: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """What is raised inside the context comes out as it is, and so does a single error of our tree that keeps
    `running` from starting; unless something else fails at the same time."""
    inside: list[BaseException] = []
    try:
        async with running as entered:
            try:
                yield entered
            except BaseException as error:
                inside.append(error)
                raise
    except BaseExceptionGroup as group:
        # A dozen nurseries of ours and the library's each put a wrapping around it.
        leaves = list(_leaves(group))
        if (inside and leaves == inside) or (len(leaves) == 1 and isinstance(leaves[0], SwarmLLMError)):
            raise leaves[0] from None
        raise


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
