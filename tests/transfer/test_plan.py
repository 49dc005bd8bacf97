"""The bookkeeping of a fetch, without a network: whoever fails, everything that somebody has arrives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmllm.models import TensorEntry
from swarmllm.transfer.fetch_plan import FetchPlan

HOLDERS = ("a", "b", "c")


def tensor(index: int) -> TensorEntry:
    return TensorEntry(
        name=f"t{index}", ggml_type=0, shape=(8,), offset=32 * index, size_bytes=32, blake3="0" * 64
    )


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
    plan = FetchPlan(tensors, has)
    arrived: list[str] = []
    on_their_way = []
    for _ in range(10_000):
        if plan.is_done or plan.is_stuck:
            break
        node_id = dice.choice(HOLDERS)  # type: ignore[attr-defined]
        task = plan.take(node_id)
        if task is not None:
            on_their_way.append((task, node_id))
        if on_their_way and (task is None or dice.random() < 0.5):  # type: ignore[attr-defined]
            task, node_id = on_their_way.pop(dice.randrange(len(on_their_way)))  # type: ignore[attr-defined]
            if int(task.tensor.name[1:]) not in has[node_id]:
                plan.absent(task, node_id)
            elif node_id in liars:
                plan.lied(task, node_id)
            else:
                task.sources.add(node_id)
                plan.arrived(task)
                arrived.append(task.tensor.name)
    assert plan.is_done or plan.is_stuck
    assert len(arrived) == len(set(arrived))
    assert sorted(arrived) + sorted(t.name for t in plan.left) != [] or not tensors
    assert {*arrived, *(t.name for t in plan.left)} == {t.name for t in tensors}
    honest = {index for node_id in has if node_id not in liars for index in has[node_id]}
    assert {f"t{index}" for index in honest if index < n_tensors} <= set(arrived)
    assert plan.liars <= liars


def test_what_a_liar_began_goes_on_at_another_and_the_liar_is_not_asked_again() -> None:
    plan = FetchPlan([tensor(0), tensor(1)], ["a", "b"])
    task = plan.take("a")
    assert task is not None
    task.sources.add("a")
    plan.lied(task, "a")
    assert plan.liars == {"a"}
    assert plan.take("a") is None
    assert plan.take("b") is task
    assert plan.holders == {"b"}


def test_a_holder_that_fails_too_often_in_a_row_is_not_asked_again() -> None:
    plan = FetchPlan([tensor(0), tensor(1)], ["a"])
    for n_failures in range(3):
        task = plan.take("a")
        assert task is not None, n_failures
        plan.failed(task, "a", max_failures=3)
    assert plan.take("a") is None
    assert plan.is_stuck
