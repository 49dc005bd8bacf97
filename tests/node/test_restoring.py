"""At the start what was loaded by hand comes back, and what cannot does not keep the rest from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from deadlines import DEADLINE_S

from swarmllm.errors import BadModel, ModelNotFound, NodeUnreachable, WorkerError
from swarmllm.models import LayerRange, merge
from swarmllm.node.remembered_loads import RETRY_S, LoadRestorer, RememberedLoad, RememberedLoads
from swarmllm.workerpool import AS_CONFIGURED, LoadOptions

WHOLE = LayerRange(0, 12)
SMALL = LoadOptions(n_ctx=512)


class Stand:
    """Models "a", "b" ... of twelve layers, remembered whole; what loads them does as `faults` say."""

    def __init__(self, names: Iterable[str], options: LoadOptions = AS_CONFIGURED) -> None:
        self.remembered = RememberedLoads(
            None, [RememberedLoad(name, f"model-{name}", (WHOLE,), options) for name in names]
        )
        self.held: dict[str, tuple[LayerRange, ...]] = {}
        self.holds: list[tuple[str, str, LoadOptions]] = []
        self.faults: dict[str, Exception] = {}
        self.unknown: set[str] = set()
        self.n_patient = 0
        self.stuck: dict[str, trio.Event] = {}
        """Set once a model hangs that is in here."""
        self.restoring = LoadRestorer(self.remembered, self, self)  # type: ignore[arg-type]

    def loaded(self, model_id: str) -> tuple[LayerRange, ...]:
        return self.held.get(model_id, ())

    async def find(self, model_id: str) -> Any:
        await trio.lowlevel.checkpoint()
        if model_id in self.unknown:
            raise ModelNotFound("no such model")
        return SimpleNamespace(model_id=model_id)

    async def hold(self, entry: Any, layers: LayerRange, *, options: LoadOptions) -> None:
        self.holds.append((entry.model_id, str(layers), options))
        if entry.model_id in self.stuck:
            self.stuck[entry.model_id].set()
            await trio.sleep_forever()
        if entry.model_id in self.faults:
            raise self.faults[entry.model_id]
        self.held[entry.model_id] = merge([*self.loaded(entry.model_id), layers])

    async def retry(self, act: Callable[[], Awaitable[None]]) -> None:
        self.n_patient += 1
        await act()

    async def run(self) -> None:
        await self.restoring.run(self.retry)


@pytest.mark.parametrize("failure", [BadModel("its file is gone"), RuntimeError("its file is gone")])
async def test_a_model_that_cannot_be_loaded_is_named_and_the_others_come_back(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    stand = Stand("abc")
    stand.faults["b"] = failure
    await stand.run()
    assert set(stand.held) == {"a", "c"}
    reason = stand.restoring.missing()
    assert "model-b 0:12" in reason
    assert "its file is gone" in reason
    assert "swarmllm models unload model-b" in reason
    assert "model-b 0:12" in caplog.text
    assert [load.model_id for load in stand.remembered.all()] == ["a", "b", "c"], "the next start tries again"
    stand.held["b"] = (WHOLE,)
    assert not stand.restoring.missing()
    stand.held.clear()
    assert await stand.remembered.forget("b", "model-b", WHOLE)
    assert not stand.restoring.missing()


async def test_who_needs_others_waits_for_them_after_all_else(caplog: pytest.LogCaptureFixture) -> None:
    stand = Stand("abc")
    stand.unknown.add("a")
    stand.faults["b"] = NodeUnreachable("nobody has it")
    await stand.run()
    assert stand.n_patient == 2
    assert list(stand.held) == ["c"]
    assert "model-b 0:12, which was loaded before, is not: nobody has it" in stand.restoring.missing()
    assert "model-a 0:12 was loaded before, and is forgotten" in caplog.text
    assert [load.model_id for load in stand.remembered.all()] == ["b", "c"]


async def test_what_was_missing_is_loaded_as_soon_as_it_is_there(
    caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    stand = Stand("abcd")
    stand.faults = {
        "a": BadModel("its disk is not mounted"),
        "b": NodeUnreachable("nobody has it"),
        "c": WorkerError("out_of_memory: it does not fit"),
    }
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stand.restoring.keep_trying)
        await trio.testing.wait_all_tasks_blocked()
        await stand.run()
        await trio.sleep(2.5 * RETRY_S)
        assert set(stand.held) == {"d"}
        assert caplog.text.count("its disk is not mounted") == 1, "said once, not at each try"
        n_holds = len(stand.holds)
        del stand.faults["a"]
        stand.unknown.add("b")
        await trio.sleep(RETRY_S)
        assert set(stand.held) == {"a", "d"}
        assert [load.model_id for load in stand.remembered.all()] == ["a", "c", "d"]
        assert [held[0] for held in stand.holds[n_holds:]] == ["a"], "what did not fit is left alone"
    assert "model-c" in stand.restoring.missing(), "and nothing is tried any more"


async def test_layers_that_the_configuration_has_loaded_keep_its_options() -> None:
    stand = Stand("ab", SMALL)
    stand.held["a"] = (LayerRange(4, 8),)
    await stand.run()
    assert stand.holds == [("a", "0:4", AS_CONFIGURED), ("a", "8:12", AS_CONFIGURED), ("b", "0:12", SMALL)]


async def test_what_is_unloaded_while_it_comes_back_does_not() -> None:
    stand = Stand("abc")
    for name in "ab":
        stand.stuck[name] = trio.Event()
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stand.run)
            await stand.stuck["a"].wait()
            assert await stand.remembered.forget("a", "model-a", WHOLE)
            await stand.stuck["b"].wait()
            del stand.stuck["b"]
            assert await stand.remembered.forget("b", "model-b", LayerRange(0, 4))
    assert stand.held == {"b": (LayerRange(4, 12),), "c": (WHOLE,)}


async def test_the_end_of_the_daemon_is_not_taken_for_a_failure() -> None:
    stand = Stand("a")
    stand.stuck["a"] = trio.Event()
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stand.run)
            await stand.stuck["a"].wait()
            nursery.cancel_scope.cancel()
    assert not stand.restoring.missing()
    assert stand.remembered.get("a") is not None
