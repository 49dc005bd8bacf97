"""In how many requests each way of cheating is found, and how honest nodes that are unlike each other fare.

    python -m bench.cheats [MODEL.gguf]

Computes texts with the layers of a middle stage and of a last stage (of the guide by default), as honest
nodes and cheats would, and judges them as a check does. Then it plays requests of a stage that cheats in
every request, or in every tenth, until it gets no more work. It begins as a stranger, is the only stage that
is drawn, and the auditor has its layers.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio
from gguf import GGMLQuantizationType, GGUFReader

from bench.checked_rows import (
    N_PROMPT,
    N_ROWS,
    QUANTISATIONS,
    Bench,
    distances,
    single_rows,
)
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.check.recompute import batches
from swarmllm.pipeline.check.sampling import CHECKED_TOKENS, DRAWN_TOKENS, STRETCH_ROWS, draw_tokens, rate
from swarmllm.pipeline.check.tallies import Tallies
from swarmllm.pipeline.check.verdict import (
    TOLERANCE,
    Sampled,
    TokenEvidence,
    Verdict,
    judge_tokens,
)
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.tensors import Tensor

NODE, AUDITOR = node_id_named("node"), node_id_named("auditor")
N_PLAYS: Final = 400
N_REQUESTS: Final = 2000
N_ANSWERS, N_QUESTION, N_ANSWER = 48, 48, 32
CHECK_RATE: Final = 1 / 16
"""The default of `inference.check_rate`."""
RISES: Final = 0.01
"""Of the way to full trust, for a request that was served and for a check that was right."""
TEMPERATURE: Final = 1.0
PLAIN: Final[Mapping[str, Any]] = {"flash_attention": "off"}
NO_ROWS: Final = np.zeros((1, 1), np.float32)
Check = Callable[[random.Random], bool]
"""Whether a check of a request in which it cheated, or was honest, is what takes its work away."""


@dataclass
class Answer:
    """Of a last stage."""

    told: list[int]
    again: list[Sampled]
    is_ended: bool = False


def requests_until_out(check: Check, generator: random.Random, every: int = 1) -> int:
    """A stranger's, who cheats in every so manieth; N_REQUESTS: it is never out."""
    score = NEUTRAL
    for number in range(1, N_REQUESTS):
        score += RISES * (1 - score)
        if generator.random() >= rate(score, CHECK_RATE):
            continue
        if number % every == 0 and check(generator):
            return number
        score += RISES * (1 - score)
    return N_REQUESTS


def found(make: Callable[[], Check], every: int) -> str:
    generator = random.Random(7)
    counts = sorted(requests_until_out(make(), generator, every) for _ in range(N_PLAYS))
    middle, most = counts[N_PLAYS // 2], counts[N_PLAYS * 95 // 100]
    if middle >= N_REQUESTS:
        n_found = sum(count < N_REQUESTS for count in counts)
        return "never" if not n_found else f"{n_found} of {N_PLAYS} within {N_REQUESTS}"
    return f"{middle} ({most})" if most < N_REQUESTS else f"{middle} (more than {N_REQUESTS})"


def row(where: str, what: str, figure: str, make: Callable[[], Check]) -> None:
    print(f"| {where} | {what} | {figure} | {found(make, 1)} | {found(make, 10)} |", flush=True)


def of_rows(measured: Sequence[float]) -> Callable[[], Check]:
    return lambda: lambda generator: generator.choice(measured) > TOLERANCE


def of_tokens(answers: Sequence[Answer], temperature: float) -> Callable[[], Check]:
    def make() -> Check:
        tallies = Tallies()

        def check(generator: random.Random) -> bool:
            answer = generator.choice(answers)
            n_wanted = DRAWN_TOKENS if temperature else CHECKED_TOKENS
            drawn = draw_tokens(
                0, len(answer.told), 1, 4, generator.random, n_wanted=n_wanted, is_ended=answer.is_ended
            )
            assert drawn is not None
            told = tuple(answer.told[drawn.position : drawn.end])
            is_ended = answer.is_ended and drawn.end == len(answer.told)
            evidence = TokenEvidence(NO_ROWS, drawn.position, (), told, True, is_ended)
            sampled = answer.again[drawn.position : drawn.end]
            verdict, _ = judge_tokens(evidence, sampled, greedy=not temperature)
            if verdict is Verdict.WRONG:
                return True
            return bool(temperature and tallies.add(NODE, AUDITOR, evidence, sampled))

        return check

    return make


def fine_tuned(path: Path, to: Path, part: float) -> Path:
    """Every Q8_0 block's scale is changed by about so much."""
    to.write_bytes(path.read_bytes())
    drawn = np.random.default_rng(3)
    reader = GGUFReader(to, "r+")
    for tensor in reader.tensors:
        if tensor.tensor_type is GGMLQuantizationType.Q8_0:
            blocks = tensor.data.reshape(-1, 34)
            scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
            changed = scales * (1 + part * drawn.standard_normal(scales.shape).astype(np.float32))
            blocks[:, :2] = changed.astype(np.float16).view(np.uint8)
    reader.data.flush()
    return to


def sent_instead(base: Sequence[Tensor], came_in: Sequence[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    drawn = np.random.default_rng(1)
    yield "zeros", [np.zeros_like(rows) for rows in base]
    yield "passed through unchanged", list(came_in)
    yield "the row before instead of each row", [np.roll(rows, 1, axis=0) for rows in base]
    for part in (0.05, 0.01, 0.001):
        noisy = [rows * (1 + part * drawn.standard_normal(rows.shape)) for rows in base]
        yield f"noise of {100 * part:g} %", [rows.astype(np.float32) for rows in noisy]


async def middle_stage(bench: Bench, path: Path, folder: Path, layers: LayerRange) -> None:
    as_checked = list(batches(N_ROWS, N_PROMPT, 128))
    came_in = await bench.computed(await bench.tokens(), [LayerRange(0, layers.start)], single_rows())
    base = await bench.computed(came_in, [layers], single_rows())

    def show(what: str, other: Sequence[Tensor]) -> None:
        measured = distances(base, other, came_in)
        row("middle", what, f"{min(measured):.3f} to {max(measured):.3f}", of_rows(measured))

    for what, rows in sent_instead(base, came_in):
        show(what, rows)
    each = [LayerRange(at, at + 1) for at in range(layers.start, layers.end)]
    show("one of four layers left out", await bench.computed(came_in, [each[0], *each[2:]], as_checked))
    show("the last two of four left out", await bench.computed(came_in, each[:-2], as_checked))
    prompts = [*came_in[1:], came_in[0]]
    mixed = [
        np.concatenate((prompt[:N_PROMPT], rows[N_PROMPT:]))
        for prompt, rows in zip(prompts, came_in, strict=True)
    ]
    measured = distances(base, await bench.computed(mixed, [layers], as_checked), came_in)
    n_stretches, n_of_prompt = N_ROWS // STRETCH_ROWS, N_PROMPT // STRETCH_ROWS
    of_answer = [each for at, each in enumerate(measured) if at % n_stretches >= n_of_prompt]
    figure = f"{min(of_answer):.3f} to {max(of_answer):.3f}"
    row("middle", "KV of another prompt (rows of the answer)", figure, of_rows(of_answer))
    for what, kind in QUANTISATIONS.items():
        show(
            f"{what} instead of Q8_0",
            await bench.computed(came_in, [layers], as_checked, bench.quantised(path, what, kind)),
        )
    for part in (0.05, 0.2):
        tuned = fine_tuned(path, folder / f"tuned{part:g}.gguf", part)
        show(
            f"weights {100 * part:g} % off (another fine-tune)",
            await bench.computed(came_in, [layers], as_checked, tuned),
        )


class Head:
    """A worker with the layers of a last stage."""

    def __init__(
        self, bench: Bench, folder: Path, layers: LayerRange, path: Path | None, **settings: Any
    ) -> None:
        entry = bench.entry if path is None else bench._catalogue.ensure(path, path.stem.lower())
        self.model, self.layers = ModelFile(entry.model_id, entry.path), layers
        options = WorkerSettings(cache_dir=folder / "cache", n_ctx=512, n_slots=2, **settings)
        self.pool = WorkerPool(options, folder / f"head{random.randrange(10**9)}")

    async def forward(
        self,
        request_id: str,
        position: int,
        rows: Tensor,
        want: Any,
        sampling: Sampling | None,
        layers: LayerRange | None = None,
    ) -> Any:
        return await self.pool.forward(
            self.model,
            request_id=request_id,
            layers=layers or self.layers,
            position=position,
            tensor=rows,
            want=want,
            sampling=sampling if want == "token" else None,
            n_prompt_tokens=N_QUESTION,
        )


def asked(temperature: float, seed: int, *, ends: bool = False) -> Sampling:
    return Sampling(
        temperature=temperature,
        seed=seed,
        max_tokens=N_ANSWER,
        ignore_eos=not ends,
        logprobs=True,
        top_logprobs=20,
    )


async def answered(
    honest: Head,
    before: LayerRange,
    head: Head,
    prompt: Tensor,
    stated: Sampling,
    used: Sampling,
    other: Tensor | None,
) -> Answer:
    """The answer of `head`, which samples as `used` says, and what `honest` makes of the same rows."""
    answer, tokens, position = Answer([], []), prompt, 0
    for index in range(N_ANSWER):
        first = index == 0
        hidden = np.array((await honest.forward("before", position, tokens, "hidden", None, before)).tensor)
        own = hidden
        if first and other is not None:
            own = np.array((await honest.forward("other", 0, other, "hidden", None, before)).tensor)
            await honest.pool.cancel(honest.model.model_id, "other")
        told = (await head.forward("told", position, own, "token", used if first else None)).token
        again = (await honest.forward("again", position, hidden, "token", stated if first else None)).token
        likeliest = tuple((each.token, each.logprob) for each in again.logprobs[1:])
        answer.told.append(told.token)
        answer.again.append(Sampled(again.token, likeliest, again.finish_reason == "stop"))
        if told.finish_reason is not None or again.finish_reason is not None:
            answer.is_ended = told.finish_reason == "stop"
            break
        position, tokens = position + len(tokens), np.array([told.token], np.int32)
    for pool, model, name in (
        (honest.pool, honest.model, "before"),
        (head.pool, head.model, "told"),
        (honest.pool, honest.model, "again"),
    ):
        await pool.cancel(model.model_id, name)
    return answer


@dataclass
class LastStage:
    bench: Bench
    folder: Path
    layers: LayerRange
    honest: Head
    prompts: Sequence[Tensor]

    async def measured(
        self,
        temperature: float,
        path: Path | None = None,
        *,
        used: float | None = None,
        seed: int = 0,
        of_other: bool = False,
        ends: bool = False,
        **settings: Any,
    ) -> list[Answer]:
        """With the layers of `path` where it is given; `used`: another temperature; `of_other`: with the KV
        of another prompt."""
        head = Head(self.bench, self.folder, self.layers, path, **settings)
        before, answers = LayerRange(0, self.layers.start), []
        async with head.pool.running():
            await head.pool.load(head.model, self.layers)
            for number, prompt in enumerate(self.prompts):
                stated = asked(temperature, number, ends=ends)
                lies = asked(temperature if used is None else used, seed + number, ends=ends)
                strange = self.prompts[number - 1] if of_other else None
                answers.append(await answered(self.honest, before, head, prompt, stated, lies, strange))
        return answers


def show_answers(what: str, temperature: float, answers: Sequence[Answer]) -> None:
    ranks = [_rise(*pair) for answer in answers for pair in zip(answer.told, answer.again, strict=True)]
    n_other = sum(a != b.token for x in answers for a, b in zip(x.told, x.again, strict=True))
    figure = (
        f"{100 * n_other / len(ranks):.1f} % of {len(ranks)} tokens differ, {sum(r > 0 for r in ranks)} are "
        f"likelier, {sum(r < 0 for r in ranks)} less likely"
    )
    how = f"temperature {temperature:g}" if temperature else "greedy"
    row(f"last, {how}", what, figure, of_tokens(answers, temperature))


async def honest_answers(stage: LastStage) -> tuple[dict[float, list[Answer]], int]:
    """By temperature, and a token that ends texts."""
    plain: dict[float, list[Answer]] = {}
    for temperature in (0.0, TEMPERATURE):
        plain[temperature] = await stage.measured(temperature)
        show_answers("honest: the same settings", temperature, plain[temperature])
        for what, settings in {"KV in Q8_0": {"kv_type": "q8_0"}, "plain attention": PLAIN}.items():
            show_answers(f"honest: {what}", temperature, await stage.measured(temperature, **settings))
    ending = await stage.measured(TEMPERATURE, ends=True, kv_type="q8_0")
    show_answers("honest: KV in Q8_0, answers that end", TEMPERATURE, ending)
    ends = (each.token for answer in ending for each in answer.again if each.is_end)
    return plain, next(ends)


async def last_stage(bench: Bench, path: Path, folder: Path, layers: LayerRange) -> None:
    tokens = np.concatenate(await bench.tokens())
    prompts = [tokens[at : at + N_QUESTION] for at in range(0, N_ANSWERS * 20, 20)]
    honest = Head(bench, folder, layers, None)
    async with honest.pool.running():
        for held in (LayerRange(0, layers.start), layers):
            await honest.pool.load(honest.model, held)
        stage = LastStage(bench, folder, layers, honest, prompts)
        plain, end = await honest_answers(stage)
        coarser = {name: bench.quantised(path, name, QUANTISATIONS[name]) for name in ("Q4_0", "Q6_K")}
        for temperature, answers in plain.items():
            others = [Answer([t + 1 for t in a.told], a.again) for a in answers]
            show_answers("another token for each", temperature, others)
            tenth = [Answer([t + (i % 10 == 9) for i, t in enumerate(a.told)], a.again) for a in answers]
            show_answers("another token for every tenth", temperature, tenth)
            early = [Answer([*a.told[:8], end], a.again[:9], is_ended=True) for a in answers]
            show_answers("ends after 8 tokens", temperature, early)
            mixed = await stage.measured(temperature, of_other=True)
            show_answers("KV of another prompt", temperature, mixed)
            for name, made in coarser.items():
                found = await stage.measured(temperature, made)
                show_answers(f"{name} instead of Q8_0", temperature, found)
        for temperature, what in {
            0.0: "the likeliest token",
            TEMPERATURE / 2: "half the temperature",
        }.items():
            show_answers(what, TEMPERATURE, await stage.measured(TEMPERATURE, used=temperature))
        show_answers("another seed", TEMPERATURE, await stage.measured(TEMPERATURE, seed=1000))


def _rise(told: int, again: Sampled) -> int:
    """Above 0: what was told is likelier than what was sampled again."""
    order = [token for token, _ in again.likeliest]
    return (order.index(again.token) if again.token in order else len(order)) - (
        order.index(told) if told in order else len(order)
    )


async def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench = Bench(path, folder)
        n_layers = bench.entry.manifest.n_layers
        print(f"{path.name}; requests until out: median (95 of 100) of {N_PLAYS} strangers\n")
        print(
            "| stage | instead of its work | measured | every request | every tenth |\n|---|---|---|---|---|"
        )
        await middle_stage(bench, path, folder, LayerRange(n_layers // 3, 2 * n_layers // 3))
        await last_stage(bench, path, folder, LayerRange(2 * n_layers // 3, n_layers))


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]) if len(sys.argv) > 1 else GUIDE_PATH)
