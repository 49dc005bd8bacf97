"""The bookkeeping of a fetch, without a network: whoever fails, everything that somebody has arrives."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm.models import TensorEntry
from swarmllm.travel.plan import UNKNOWN, Plan

HOLDERS = ("a", "b", "c")


def tensor(index: int) -> TensorEntry:
    return TensorEntry(
        name=f"t{index}", ggml_type=0, shape=(8,), offset=32 * index, size_bytes=32, blake3="0" * 64
    )


@settings(deadline=None)
@given(
    n_tensors=st.integers(0, 12),
    has=st.dictionaries(st.sampled_from(HOLDERS), st.frozensets(st.integers(0, 11))),
    liars=st.frozensets(st.sampled_from(HOLDERS)),
    dice=st.randoms(use_true_random=False),
)
def test_all_that_an_honest_holder_has_arrives_once_and_the_rest_is_named(
    n_tensors: int,
    has: dict[str, frozenset[int]],
    liars: frozenset[str],
    dice: object,
) -> None:
    tensors = [tensor(index) for index in range(n_tensors)]
    plan = Plan(tensors, has)
    arrived: list[str] = []
    on_their_way = []
    for _ in range(10_000):
        if plan.is_done or plan.is_stuck:
            break
        node_id = dice.choice(HOLDERS)  # type: ignore[attr-defined]
        task = plan.take(node_id)
        if task is not None:
            if task.begins_anew(node_id):
                task.sources.clear()
            on_their_way.append((task, node_id))
        if on_their_way and (task is None or dice.random() < 0.5):  # type: ignore[attr-defined]
            task, node_id = on_their_way.pop(dice.randrange(len(on_their_way)))  # type: ignore[attr-defined]
            if int(task.tensor.name[1:]) not in has[node_id]:
                plan.absent(task, node_id)
            else:
                task.sources.add(node_id)
                right = not task.sources & liars
                if plan.arrived(task, right=right) == "right":
                    arrived.append(task.tensor.name)
    assert plan.is_done or plan.is_stuck
    assert len(arrived) == len(set(arrived))
    assert sorted(arrived) + sorted(t.name for t in plan.left) != [] or not tensors
    assert {*arrived, *(t.name for t in plan.left)} == {t.name for t in tensors}
    honest = {index for node_id in has if node_id not in liars for index in has[node_id]}
    assert {f"t{index}" for index in honest if index < n_tensors} <= set(arrived)
    assert plan.liars <= liars


def test_a_mixture_that_is_wrong_blames_nobody_and_then_has_one_source() -> None:
    plan = Plan([tensor(0)], ["a", "b"])
    task = plan.take("a")
    assert task is not None
    task.sources.add("a")
    plan.failed(task, "a", max_failures=3)
    assert plan.take("b") is task
    assert not task.begins_anew("b")
    task.sources.add("b")
    assert plan.arrived(task, right=False) == "mixed"
    assert plan.liars == set()
    assert plan.take("a") is task
    task.sources.add("a")
    plan.failed(task, "a", max_failures=3)
    assert plan.take("b") is task
    assert task.begins_anew("b")


def test_bytes_of_an_earlier_run_are_held_against_nobody() -> None:
    plan = Plan([tensor(0)], ["a"])
    task = plan.take("a")
    assert task is not None
    task.sources |= {UNKNOWN}
    assert plan.arrived(task, right=False) == "mixed"
    assert plan.take("a") is task
    task.sources.add("a")
    assert plan.arrived(task, right=False) == "lie"
    assert plan.liars == {"a"}
    assert plan.is_stuck


def test_a_holder_that_fails_too_often_in_a_row_is_not_asked_again() -> None:
    plan = Plan([tensor(0), tensor(1)], ["a"])
    for n_failures in range(3):
        task = plan.take("a")
        assert task is not None, n_failures
        plan.failed(task, "a", max_failures=3)
    assert plan.take("a") is None
    assert plan.is_stuck
