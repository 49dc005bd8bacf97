"""Tokens/s of one stream over a cut model when the nodes are far from each other, with guesses and without.

    python -m bench.wan_decode --nodes 2 4 --rtt-ms 0 20 80 200 --rounds 3

Daemons on loopback; whatever goes from one to another passes a proxy in user space that delays it by half the
round trip. A token goes once around: by as many such ways as there are nodes. "Bound" is that, and what the
same chain computes for a token where nothing is delayed: no chain without guesses is faster.

Three texts. "repetitive": the 0.5B shape with layers that add nothing and few embeddings, which costs what
any model of the shape costs, and says the same 30 tokens again and again. "free": the same shape with random
layers, which never repeats itself: what trying costs. "guide": the bundled model answers questions, to the
end of its answers, and its draft guesses. No prompt comes twice in four rounds. The bench fails if a text is
another with guesses than without.

With --llama-server, llama.cpp's server takes its turns, with part of the layers on RPC servers behind the
same proxy (see bench.common.llama_rpc). Its ratio is to our chain without guesses.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Final

from bench.common.figures import Figure, publish, ratios
from bench.common.llama_rpc import NAME as RPC
from bench.common.llama_rpc import llama_over_rpc
from bench.common.llama_server import add_option
from bench.common.shapes import HALF_BILLION, build
from bench.common.swarm_nodes import Answer, ask_chat, swarm_of_all
from bench.speculation import silence_layers
from swarmllm.guide import GUIDE_PATH

PLAIN, OURS = "one token a trip", "guesses"
GUIDE_LAYERS: Final = 12
SPEED = "tokens/s"
TEXTS: Final = ("repetitive", "free", "guide")
QUESTIONS: Final = (
    "What is a pipeline?",
    "How do I load a model on two nodes?",
    "What does the scheduler do?",
    "What is a hidden state?",
    "How does a node join a swarm?",
    "What happens when a node dies?",
    "What is the prefix cache?",
    "How do I see the peers of my node?",
    "What is a layer?",
    "What is gossip used for?",
)
QUESTIONS_PER_ROUND: Final = 2
N_CTX: Final = 1024
SETTLED_S: Final = 0.5
"""Stages free the rows of an answer a moment after its end. The next answer has other bits where that happens
while it runs: its cells are in another order then."""

Ask = Callable[[str, bool], Answer]
"""A prompt, and whether the answer goes on behind its end."""


@contextmanager
def contestants(
    ggufs: dict[str, tuple[Path, int]], n_nodes: int, rtt_s: float, arguments: argparse.Namespace
) -> Iterator[dict[tuple[str, str], Ask]]:
    """By text and way."""
    found: dict[tuple[str, str], Ask] = {}
    with ExitStack() as stack:
        for way in (PLAIN, OURS):
            of = swarm_of_all(
                n_nodes,
                dict(ggufs.values()),
                rtt_s / 2,
                n_threads=arguments.threads,
                n_ctx=N_CTX,
                ngram_lookup_enabled=way == OURS,
                speculative_decoding=way == OURS,
                guess_from_prompt="on",
            )
            for text, swarm in zip(ggufs, stack.enter_context(of), strict=True):
                found[text, way] = _asked(swarm.client.api_url, swarm.model, arguments.tokens)
        if arguments.llama_server:
            for text, (gguf, n_layers) in ggufs.items():
                of_rpc = llama_over_rpc(
                    *(arguments.llama_server, gguf, n_layers, n_nodes, rtt_s / 2),
                    n_threads=arguments.threads,
                    n_ctx=N_CTX,
                )
                endpoint = stack.enter_context(of_rpc)
                found[text, RPC] = _asked(endpoint.api_url, endpoint.model, arguments.tokens)
        yield found


def _asked(api_url: str, model: str, n_tokens: int) -> Ask:
    return lambda prompt, goes_on: ask_chat(api_url, model, prompt, n_tokens, ignore_eos=goes_on)


def prompts(text: str, index: int) -> tuple[str, ...]:
    """Of a round: others than of those before."""
    if text != "guide":
        letters = "abcdefghij"
        return (letters[index % len(letters) :] + letters[: index % len(letters)],)
    first = QUESTIONS_PER_ROUND * index
    return tuple(QUESTIONS[(first + i) % len(QUESTIONS)] for i in range(QUESTIONS_PER_ROUND))


def ask(way: Ask, text: str, index: int, settled_s: float) -> list[Answer]:
    """All prompts of a round, one after the other."""
    answers = []
    for prompt in prompts(text, index):
        time.sleep(settled_s)
        answers.append(way(prompt, text != "guide"))
    return answers


def decode_speed(answers: Sequence[Answer]) -> float:
    """Tokens/s from the first token on."""
    return sum(each.n_tokens - 1 for each in answers) / sum(each.decode_s for each in answers)


def compare_texts(plain: Sequence[Answer], guessed: Sequence[Answer], where: str) -> None:
    """Raises RuntimeError where the text is another one with guesses."""
    for one, other in zip(plain, guessed, strict=True):
        if one.text == other.text:
            continue
        n_alike = next((i for i, (a, b) in enumerate(zip(one.text, other.text, strict=False)) if a != b), -1)
        raise RuntimeError(
            f"{where}: another text with guesses after {n_alike} characters of {len(one.text)}; prompts of "
            f"{one.n_prompt_tokens} tokens, {one.n_cached} of them kept and {other.n_cached} with guesses "
            f"({other.n_right} right, {other.n_wrong} wrong)"
        )


def measure(
    ggufs: dict[str, tuple[Path, int]], n_nodes: int, rtt_ms: float, arguments: argparse.Namespace
) -> dict[tuple[str, str], Figure]:
    figures: dict[tuple[str, str], Figure] = {}
    n_right: Counter[str] = Counter()
    n_guessed: Counter[str] = Counter()
    with contestants(ggufs, n_nodes, rtt_ms / 1e3, arguments) as found:
        for index in range(arguments.rounds + 1):
            said: dict[tuple[str, str], list[Answer]] = {}
            turns = list(found.items())
            for (text, way), asked in turns[:: -1 if index % 2 else 1]:
                answers = said[text, way] = ask(asked, text, index, SETTLED_S + rtt_ms / 1e3)
                if not index:  # the first round makes links and learns what a trip costs
                    continue
                label = f"{text}, {n_nodes} nodes, {rtt_ms:g} ms: {way}"
                figures.setdefault((text, way), Figure(label, SPEED)).values.append(decode_speed(answers))
                if way == OURS:
                    n_right[text] += sum(answer.n_right for answer in answers)
                    n_guessed[text] += sum(answer.n_right + answer.n_wrong for answer in answers)
            for text in ggufs:
                compare_texts(said[text, PLAIN], said[text, OURS], f"{text}, {n_nodes} nodes, round {index}")
    for text in ggufs:
        figures[text, OURS].name += f" ({n_right[text]} of {n_guessed[text]} right)"
    return figures


def compare(
    ggufs: dict[str, tuple[Path, int]], arguments: argparse.Namespace
) -> list[tuple[Figure, Figure | None]]:
    rows: list[tuple[Figure, Figure | None]] = []
    for n_nodes in arguments.nodes:
        near_s: dict[str, float] = {}
        for rtt_ms in arguments.rtt_ms:
            figures = measure(ggufs, n_nodes, rtt_ms, arguments)
            for text in ggufs:
                n_before = len(rows)
                plain, ours = figures[text, PLAIN], figures[text, OURS]
                rows += [(plain, None), (ours, ratios(ours, plain))]
                if rival := figures.get((text, RPC)):
                    rows.append((rival, ratios(rival, plain)))
                if not rtt_ms:
                    near_s[text] = 1 / median(plain.values)
                elif text in near_s:
                    bound = 1 / (near_s[text] + n_nodes * rtt_ms / 2e3)
                    name = f"{plain.name} / bound of {bound:.2f}"
                    rows.append((Figure(name, "x", [value / bound for value in plain.values]), None))
                for row, ratio in rows[n_before:]:
                    print(row.name, f"{median(row.values):.2f}", row.unit, end=" ", flush=True)
                    print(f"({median(ratio.values):.2f}x)" if ratio else "", flush=True)
    return rows


def build_all(texts: Sequence[str], folder: Path) -> dict[str, tuple[Path, int]]:
    """The file and number of layers of each text's model."""
    found: dict[str, tuple[Path, int]] = {}
    for text in texts:
        if text == "guide":
            found[text] = GUIDE_PATH, GUIDE_LAYERS
            continue
        gguf = build(HALF_BILLION, folder / f"{text}.gguf")
        found[text] = (silence_layers(gguf) if text == "repetitive" else gguf), HALF_BILLION.n_layers
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rtt-ms", type=float, nargs="+", default=[0.0, 20.0, 80.0, 200.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=list(TEXTS))
    add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(build_all(arguments.texts, Path(folder)), arguments)
    publish(
        "wan_decode",
        f"python -m bench.wan_decode --nodes {' '.join(map(str, arguments.nodes))} "
        f"--rtt-ms {' '.join(f'{each:g}' for each in arguments.rtt_ms)} --rounds {arguments.rounds} "
        f"--tokens {arguments.tokens} --threads {arguments.threads} --texts {' '.join(arguments.texts)}",
        rows,
    )


if __name__ == "__main__":
    main()
