"""`swarmllm bench`: how fast the running node answers, as a client feels it.

Every prompt is fresh random words, so nothing is found in a prefix cache, and the end token is ignored, so
every answer has the length that was asked for. The first request, whose worker may still have to read its
weights, is not counted.

Times are a client's: taken when a line of the stream has been read here, so they hold everything a user
would wait for. A chunk may hold several tokens (speculation) or none that can be shown yet, so the pace per
token is the stream's whole length over its tokens, and only the gaps between chunks are taken one by one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from urllib.parse import urlencode

import click

from swarmllm.cli.chat.conversation import choose_model
from swarmllm.cli.client import EXIT_INTERRUPTED, Client, CommandFailed
from swarmllm.cli.display import kernel_lines, make_console, print_json, safe, table
from swarmllm.cli.options import api_option, json_option


@dataclass(frozen=True, slots=True)
class TimedStream:
    """All in seconds on one clock."""

    started_s: float
    first_s: float
    """The first text was there."""
    ended_s: float
    gaps_s: tuple[float, ...]
    """Between two chunks of text."""
    n_prompt_tokens: int
    n_generated: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Of streams that ran at the same time."""

    n_streams: int
    n_prompt_tokens: int
    """The longest prompt."""
    first_token_s: float
    """Median over the streams, from the request to the first text."""
    prefill_tokens_per_s: float
    """Of all streams together, until the last of them had its first text."""
    gap_s: float
    """Median between two chunks."""
    slow_gap_s: float
    """95th percentile."""
    stream_tokens_per_s: float
    """Median over the streams, after the first text."""
    tokens_per_s: float
    """Of all streams together, from the first text of any to the end of the last."""


def time_completion(client: Client, body: dict[str, object]) -> TimedStream:
    """Runs `/v1/completions` with `body`, streamed. Raises CommandFailed, also for an answer without text."""
    started_s = time.monotonic()
    seen_s: list[float] = []
    usage: dict[str, int] = {}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.post_chunks("/v1/completions", body | options):
        usage = chunk.get("usage") or usage
        if any(choice.get("text") for choice in chunk.get("choices", ())):
            seen_s.append(time.monotonic())
    if not seen_s or not usage:
        raise CommandFailed("The answer has no text to time.")
    return TimedStream(
        started_s=started_s,
        first_s=seen_s[0],
        ended_s=seen_s[-1],
        gaps_s=tuple(later - earlier for earlier, later in pairwise(seen_s)),
        n_prompt_tokens=int(usage["prompt_tokens"]),
        n_generated=int(usage["completion_tokens"]),
    )


def figures(streams: Sequence[TimedStream]) -> Figures:
    """`streams`: at least one, started together."""
    first_s = min(stream.first_s for stream in streams)
    all_first_s = max(stream.first_s for stream in streams) - min(stream.started_s for stream in streams)
    gaps_s = sorted(gap_s for stream in streams for gap_s in stream.gaps_s) or [0.0]
    n_after_first = sum(stream.n_generated - 1 for stream in streams)
    return Figures(
        n_streams=len(streams),
        n_prompt_tokens=max(stream.n_prompt_tokens for stream in streams),
        first_token_s=_middle([stream.first_s - stream.started_s for stream in streams]),
        prefill_tokens_per_s=_rate(sum(stream.n_prompt_tokens for stream in streams), all_first_s),
        gap_s=_middle(gaps_s),
        slow_gap_s=gaps_s[min(len(gaps_s) - 1, int(0.95 * len(gaps_s)))],
        stream_tokens_per_s=_middle(
            [_rate(stream.n_generated - 1, stream.ended_s - stream.first_s) for stream in streams]
        ),
        tokens_per_s=_rate(n_after_first, max(stream.ended_s for stream in streams) - first_s),
    )


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _rate(n_tokens: int, seconds: float) -> float:
    return n_tokens / seconds if seconds > 0 else 0.0


WORDS = ("stone", "river", "copper", "lantern", "seven", "winter", "paper", "engine", "orchard", "signal")
NUMBERS = (
    "streams",
    "prompt",
    "first token",
    "prefill tokens/s",
    "gap p50",
    "gap p95",
    "tokens/s each",
    "tokens/s",
)
MAX_STREAMS = 256


def _numbers_up_to(maximum: int) -> Callable[[click.Context, click.Parameter, str], tuple[int, ...]]:
    """A click callback for numbers with commas between them."""

    def convert(_context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdecimal() and 1 <= int(part) <= maximum for part in parts):
            raise click.BadParameter(
                f"{value!r} is not a list of numbers from 1 to {maximum}, like 1,4", param=parameter
            )
        return tuple(map(int, parts))

    return convert


@click.command(
    short_help="Measure how fast the node answers.",
    epilog="""\b
Examples:
  swarmllm bench
  swarmllm bench --model qwen --prompt-tokens 32,512 --streams 1,2,4,8
  swarmllm bench --json > before.json
""",
)
@click.option("--model", "-m", help="Name or id of the model.  [default: guide, or the only one]")
@click.option(
    "--prompt-tokens",
    callback=_numbers_up_to(2**17),
    default="64",
    show_default=True,
    metavar="N,...",
    help="Prompt lengths.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(2, 2**16),
    default=64,
    show_default=True,
    metavar="N",
    help="Length of every answer.",
)
@click.option(
    "--streams",
    callback=_numbers_up_to(MAX_STREAMS),
    default="1,4",
    show_default=True,
    metavar="N,...",
    help="Requests at the same time.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    metavar="N",
    help="Repetitions; the round with the median tokens/s is shown.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of the random words.")
@json_option
@api_option
def bench(
    model: str | None,
    prompt_tokens: tuple[int, ...],
    output_tokens: int,
    streams: tuple[int, ...],
    rounds: int,
    seed: int,
    as_json: bool,
    api_url: str,
) -> None:
    """Send random prompts to a model of the running node and show how long the answers take.

    The times are a client's and include HTTP, queueing and the whole pipeline: `first token` is from the
    request to the first text, `gap` from one piece of text to the next, `tokens/s` counts all streams
    together. A node that computes for others at the same time shows what it has left.
    """
    with Client(api_url) as client:
        name = choose_model(client, model)
        prompts = _Prompts(client, name, output_tokens, seed)
        try:
            time_completion(client, prompts.body(8))
            results = [
                _in_the_middle([_run_together(api_url, prompts.bodies(*shape)) for _ in range(rounds)])
                for shape in _with_progress([(n, k) for n in prompt_tokens for k in streams])
            ]
        except KeyboardInterrupt:
            raise SystemExit(EXIT_INTERRUPTED) from None
        query = {"model": name, "prompt_tokens": prompt_tokens[0], "output_tokens": output_tokens}
        plan = client.get(f"/api/admin/plan?{urlencode(query)}")
        stats = client.get("/api/admin/stats")
    loaded = {model["model_id"] for model in stats["models"] if model["name"] == name}
    kernels = [
        choice
        for worker in stats["workers"]
        if worker["model_id"] in loaded
        for choice in worker.get("kernels", ())
    ]
    route = " -> ".join(f"{stage['layers']}@{stage['nickname'] or stage['node']}" for stage in plan["stages"])
    if as_json:
        print_json(
            {
                "model": name,
                "output_tokens": output_tokens,
                "rounds": rounds,
                "route": route,
                "kernels": kernels,
                "results": [asdict(result) for result in results],
            }
        )
        return
    click.echo(f"{safe(name)}: answers of {output_tokens} tokens, route {safe(route)}\n")
    make_console().print(table(NUMBERS, map(_row, results), right=NUMBERS))
    for line in kernel_lines(kernels):
        click.echo(f"kernels here: {line}")


def _with_progress(shapes: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The shapes one by one, with a line on stderr where that is a terminal."""
    status = make_console(stderr=True).status("")
    with status:
        for done, (n_prompt, n_streams) in enumerate(shapes):
            status.update(f"{done + 1} of {len(shapes)}: {n_streams} x {n_prompt} prompt tokens")
            yield n_prompt, n_streams


class _Prompts:
    """Requests for answers of one length to prompts of any."""

    def __init__(self, client: Client, model: str, n_output_tokens: int, seed: int) -> None:
        self._fields = {"model": model, "max_tokens": n_output_tokens, "temperature": 0, "ignore_eos": True}
        self._random = random.Random(seed)
        n_tokens = len(client.post("/tokenize", {"model": model, "content": " ".join(WORDS)})["tokens"])
        self._tokens_per_word = max(0.1, n_tokens / len(WORDS))

    def body(self, n_prompt_tokens: int) -> dict[str, object]:
        n_words = max(1, round(n_prompt_tokens / self._tokens_per_word))
        return {"prompt": " ".join(self._random.choices(WORDS, k=n_words)), **self._fields}

    def bodies(self, n_prompt_tokens: int, n_streams: int) -> list[dict[str, object]]:
        return [self.body(n_prompt_tokens) for _ in range(n_streams)]


def _run_together(api_url: str, bodies: Sequence[dict[str, object]]) -> Figures:
    with ExitStack() as stack, ThreadPoolExecutor(len(bodies)) as threads:
        clients = [stack.enter_context(Client(api_url)) for _ in bodies]
        return figures(list(threads.map(time_completion, clients, bodies)))


def _in_the_middle(rounds: Sequence[Figures]) -> Figures:
    return sorted(rounds, key=lambda each: each.tokens_per_s)[len(rounds) // 2]


def _row(result: Figures) -> tuple[object, ...]:
    return (
        result.n_streams,
        result.n_prompt_tokens,
        f"{1000 * result.first_token_s:.1f} ms",
        f"{result.prefill_tokens_per_s:.0f}",
        f"{1000 * result.gap_s:.2f} ms",
        f"{1000 * result.slow_gap_s:.2f} ms",
        f"{result.stream_tokens_per_s:.1f}",
        f"{result.tokens_per_s:.1f}",
    )
