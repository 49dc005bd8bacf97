"""Rows that stand on a grid or see each other, in one worker: beside other requests, rewound, shared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from vision_models import text_model

from swarmllm_proto import ipc
from swarmllm_proto.picture_runs import PictureRun
from swarmllm_proto.tensors import decode_tensor, encode_tensor
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.ranges import Route
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.errors import CallError

from .client import Worker

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(1)
ON_GRID = (PictureRun(3, 24, 6),)
SEEING = (PictureRun(3, 40, is_causal=False),)
EDGES = (0, 3), (3, 43), (43, 50)


def rows(n: int, n_embd: int) -> np.ndarray:
    return RNG.standard_normal((n, n_embd)).astype(np.float32)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("grid")
    engine = Engine(
        text_model(folder, "qwen2vl"), folder / "segments", EngineSettings(n_ctx=256, n_slots=4, n_threads=1)
    )
    engine.layers.load(0, 2)
    yield engine
    engine.close()


@pytest.fixture
def route(engine: Engine) -> Iterator[Route]:
    yield engine.route("a", 0, 2)
    for request_id in ("a", "b"):
        engine.release(request_id)


def test_rows_on_a_grid_and_plain_ones_of_another_request_share_a_batch(engine: Engine, route: Route) -> None:
    picture, plain = rows(27, engine.n_embd), rows(20, engine.n_embd)
    a, b = engine.take_slot("a"), engine.take_slot("b")
    spans = [Span(a, 0, picture, "hidden", ON_GRID), Span(b, 0, plain, "hidden")]
    together = [each.copy() for each in engine.run(route, spans)]
    for span, of_both in zip(spans, together, strict=True):
        (alone,) = engine.run(route, [span])
        np.testing.assert_allclose(of_both, alone, rtol=0, atol=2e-3)
    (otherwise,) = engine.run(route, [Span(a, 0, picture, "hidden")])
    assert np.abs(otherwise - together[0]).max() > 0.02


def test_a_grid_is_forgotten_as_a_whole_and_computed_again(engine: Engine, route: Route) -> None:
    slot, data = engine.take_slot("a"), rows(40, engine.n_embd)

    def run(first: int, end: int) -> np.ndarray:
        return engine.run(route, [Span(slot, first, data[first:end], "hidden", ON_GRID)])[0].copy()

    run(0, 3)
    first, rest, behind = run(3, 20), run(20, 27), run(27, 40)
    for row in (4, 20, 26):
        with pytest.raises(CallError, match="is within a picture"):
            engine.rewind(route, Span(slot, row, data[row:], "hidden", ON_GRID))
    assert np.array_equal(run(27, 40), behind)
    assert np.array_equal(run(3, 20), first)
    assert np.array_equal(run(20, 27), rest)
    engine.empty("a", 10)
    assert engine.n_rows("a", 0, 2) == 3, "of ten rows those that are no part of the grid"
    assert np.array_equal(run(3, 20), first)


def test_what_is_shared_ends_before_a_grid_or_behind_it(engine: Engine, route: Route) -> None:
    (segment,) = route.segments
    a, b = engine.take_slot("a"), engine.take_slot("b")
    data = rows(40, engine.n_embd)
    engine.run(route, [Span(a, 0, data, "hidden", ON_GRID)])
    tail = engine.run(route, [Span(a, 34, data[34:], "hidden", ON_GRID)])[0].copy()
    assert segment.share(a, b, 20) == 3
    segment.truncate(b, 0)
    assert segment.share(a, b, 34) == 34
    assert np.array_equal(engine.run(route, [Span(b, 34, data[34:], "hidden")])[0], tail)


def test_rows_that_see_each_other_never_run_in_parts_or_beside_others(engine: Engine, route: Route) -> None:
    data = rows(43, engine.n_embd)
    a, b = engine.take_slot("a"), engine.take_slot("b")
    engine.run(route, [Span(a, 0, data[:3], "hidden", SEEING)])
    whole = Span(a, 3, data[3:], "hidden", SEEING)
    for spans in ([whole._replace(data=data[3:20])], [whole, Span(b, 0, data[:3], "hidden")]):
        with pytest.raises(CallError, match="do not run by themselves"):
            engine.run(route, spans)
    engine.run(route, [whole])


def test_prompts_of_others_get_batches_of_their_own(worker: Worker, tmp_path: Path) -> None:
    worker.open(text_model(tmp_path, "gemma3"), (0, 6), n_ctx=256, n_slots=4)
    picture, plain = rows(50, 96), rows(60, 96)
    of_a = {"request_id": "a", "start": 0, "end": 6, "picture_runs": SEEING}
    of_b = {"request_id": "b", "start": 0, "end": 6, "position": 0}
    pieces = [worker.hidden(picture[first:end], position=first, **of_a) for first, end in EDGES]
    alone = worker.hidden(plain, **of_b)
    worker.hidden(picture[:3], position=0, **of_a)
    # All of it at once, while another prompt waits for a batch.
    calls = [
        worker.send(ipc.Forward, encode_tensor(plain), want="hidden", **of_b),
        worker.send(ipc.Forward, encode_tensor(picture), want="hidden", position=0, **of_a),
    ]
    answers = [worker.receive_any() for _ in calls]
    found = {answer.message.id: decode_tensor(answer.payload) for answer in answers}
    # The first three rows may share a batch with the others', which rounds otherwise.
    np.testing.assert_allclose(found[calls[0]], alone, rtol=0, atol=2e-3)
    np.testing.assert_allclose(found[calls[1]], np.concatenate(pieces), rtol=0, atol=2e-3)
