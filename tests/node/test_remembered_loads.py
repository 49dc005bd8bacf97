"""What was loaded by hand is there after a restart, whatever has become of the file that says so."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm.models import LayerRange
from swarmllm.node.remembered_loads import (
    FILE_NAME,
    MAX_FILE_BYTES,
    RememberedLoad,
    RememberedLoads,
    open_remembered_loads,
)
from swarmllm.workerpool import AS_CONFIGURED, LoadOptions

A, B = "aa" * 32, "bb" * 32
FULL = {"model_id": A, "name": "a", "layers": ["0:4"]}


def layers(text: str) -> LayerRange:
    return LayerRange.parse(text)


async def remember(
    loads: RememberedLoads,
    model_id: str,
    text: str,
    *,
    name: str = "",
    beside_others: bool = False,
    **options: int,
) -> None:
    await loads.remember(
        model_id, name or model_id[0], layers(text), LoadOptions(**options), beside_others=beside_others
    )


def told(loads: RememberedLoads) -> list[str]:
    return [str(load) for load in loads.all()]


async def test_a_later_run_knows_what_was_loaded_and_how(tmp_path: Path) -> None:
    loads = open_remembered_loads(tmp_path)
    await remember(loads, A, "0:4", n_ctx=512)
    await remember(loads, A, "4:8", beside_others=True, n_threads=2)
    await remember(loads, B, "2:3")
    later = open_remembered_loads(tmp_path)
    assert later.all() == (
        RememberedLoad(A, "a", (layers("0:8"),), LoadOptions(n_ctx=512, n_threads=2)),
        RememberedLoad(B, "b", (layers("2:3"),), AS_CONFIGURED),
    )
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600


async def test_what_is_unloaded_is_forgotten_layer_by_layer(tmp_path: Path) -> None:
    loads = open_remembered_loads(tmp_path)
    await remember(loads, A, "0:12")
    await remember(loads, B, "0:2")
    assert await loads.forget(A, "a", layers("4:8"))
    assert told(open_remembered_loads(tmp_path)) == ["a 0:4, 8:12", "b 0:2"]
    assert not await loads.forget(A, "a", layers("4:8")), "it was forgotten before"
    assert await loads.forget(A, "a", layers("0:12"))
    assert told(open_remembered_loads(tmp_path)) == ["b 0:2"]


async def test_options_count_as_long_as_layers_that_have_them(tmp_path: Path) -> None:
    loads = RememberedLoads()
    await remember(loads, A, "0:4", n_ctx=512)
    await remember(loads, A, "4:8")
    assert loads.all()[0].options == AS_CONFIGURED


async def test_a_name_is_that_of_the_model_that_had_it_last(tmp_path: Path) -> None:
    loads = RememberedLoads()
    await remember(loads, A, "0:4", name="same")
    await remember(loads, B, "4:8", name="same")
    assert [load.model_id for load in loads.all()] == [B]
    await remember(loads, A, "0:4", name="other")
    assert await loads.forget("cc" * 32, "other", layers("0:4")), "the file was replaced and added again"
    assert told(loads) == ["same 4:8"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from([A, B]), st.integers(0, 11), st.integers(1, 12)).filter(
            lambda act: act[2] < act[3]
        ),
        max_size=12,
    )
)
def test_the_layers_are_those_remembered_and_not_forgotten_since(
    acts: list[tuple[bool, str, int, int]],
) -> None:
    expected: dict[str, set[int]] = {A: set(), B: set()}
    loads = RememberedLoads()

    async def play() -> None:
        for adds, model_id, start, end in acts:
            wanted = set(range(start, end))
            if adds:
                await remember(loads, model_id, f"{start}:{end}", beside_others=True)
                expected[model_id] |= wanted
            else:
                knew = bool(expected[model_id] & wanted)
                assert await loads.forget(model_id, model_id[0], LayerRange(start, end)) == knew
                expected[model_id] -= wanted

    trio.run(play)
    assert {model_id: held for model_id, held in expected.items() if held} == {
        load.model_id: {i for each in load.layers for i in range(each.start, each.end)}
        for load in loads.all()
    }


DAMAGED: tuple[object, ...] = (
    "",
    "{",
    "[]",
    {"version": 1},
    {"version": "1", "models": []},
    {"version": 1, "models": [FULL | {"model_id": "../../etc"}]},
    {"version": 1, "models": [FULL | {"layers": []}]},
    {"version": 1, "models": [FULL | {"layers": ["4:0"]}]},
    {"version": 1, "models": [FULL | {"layers": ["0:99999"]}]},
    {"version": 1, "models": [FULL | {"name": "n" * 201}]},
    {"version": 1, "models": [FULL | {"options": {"n_ctx": -5}}]},
    {"version": 1, "models": [FULL | {"options": {"kv_type": "q1"}}]},
    {"version": 1, "models": [FULL] * (MAX_FILE_BYTES // 60)},
)


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: str(content)[:60])
async def test_a_damaged_file_is_ignored_and_named_and_then_replaced(
    tmp_path: Path, content: object, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / FILE_NAME
    file.write_bytes(content.encode() if isinstance(content, str) else msgspec.json.encode(content))
    loads = open_remembered_loads(tmp_path)
    assert loads.all() == ()
    assert f"{file} is ignored" in caplog.text
    await remember(loads, A, "0:4")
    caplog.clear()
    assert told(open_remembered_loads(tmp_path)) == ["a 0:4"]
    assert not caplog.messages


def test_a_file_of_another_version_is_said_to_be_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(b'{"version": 2, "loads": {}}')
    assert open_remembered_loads(tmp_path).all() == ()
    assert "another version of swarmllm (2, this one reads 1)" in caplog.text


async def test_what_cannot_be_written_down_is_said_and_changes_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).mkdir()
    loads = open_remembered_loads(tmp_path)
    assert f"{tmp_path / FILE_NAME} is ignored" in caplog.text
    await remember(loads, A, "0:4")
    assert told(loads) == ["a 0:4"]
    assert "the next start will not know" in caplog.text
