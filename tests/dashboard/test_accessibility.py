"""The dashboard before axe-core, the judge of accessibility that others trust, in Chromium.

axe-core comes from npm: `make compliance` fetches it and runs this; without it the tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_page import go, media, picture, size
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S
from other_guide import other_guide
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from swarmllm.downloads.unidentified_model import PartialModelState, UnidentifiedModel
from swarmllm.guide import GUIDE_PATH
from swarmllm.models import LayerRange, build_manifest, needed_tensors

pytestmark = pytest.mark.slow

AXE = Path(__file__).parents[1] / "compliance/http/node_modules/axe-core/axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
JUDGE = """
const done = arguments[arguments.length - 1];
axe.run(document, {runOnly: {type: "tag", values: arguments[0]}}).then(
  (found) => done({passes: found.passes.length, violations: found.violations.map((each) =>
    [each.impact, each.id, each.nodes.map((node) => node.html.slice(0, 200))])}),
  (error) => done({passes: 0, violations: [["error", String(error), []]]}));
"""
QUESTION = "What is a layer?"
OPEN = "document.querySelectorAll('details').forEach((each) => each.open = true)"
ANSWERED = """
const real = window.fetch;
const large = { repo: "org/large", source: "large", files: [], download_bytes: 4e9, fits: true, n_nodes: 3,
  tokens_per_s: 9, problem: "" };
const none = { ...large, repo: "org/none", source: "none", fits: false, problem: "it is too large" };
const found = JSON.stringify({ models: [large, none] });
const code = "```python\\nreturn 12  # layers\\n```\\n\\n| a | b |\\n|---|---|\\n\\n1. one";
const deltas = [{ reasoning_content: "Two things." }, { content: code }];
const events = deltas.map((delta) => `data: ${JSON.stringify({ choices: [{ delta }] })}\\n\\n`).join("");
const failure = JSON.stringify({ error: { message: "no room" } });
const answers = [new Response(events), new Response(failure, { status: 503 })];
window.fetch = (where, ...rest) => {
  if (String(where).endsWith("models/search")) return Promise.resolve(new Response(found));
  if (String(where).endsWith("chat/completions")) return Promise.resolve(answers.shift());
  return real(where, ...rest);
};
"""
"""What a hub would find, and answers with thoughts, with code, and none at all."""


@pytest.fixture(scope="module")
def axe() -> str:
    if not AXE.exists():
        if "SWARMLLM_COMPLIANCE" in os.environ:
            pytest.fail("axe-core is missing")
        pytest.skip("axe-core is not installed: make compliance")
    return AXE.read_text()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """With something of everything: a model that answers, one with a gap, and one that waits for its id."""
    folder = tmp_path_factory.mktemp("accessible")
    wait_in(folder / "kitchen" / "downloads" / "0123456789abcdef")
    with running_daemon(folder, "kitchen", load=["guide"]) as node:
        wait_for(lambda: node.http.get("/health/ready").status_code == 200, DEADLINE_S, "the guide")
        body = {"model": "guide", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20}
        assert node.http.post("/v1/chat/completions", json=body).status_code == 200
        for source in ("http://127.0.0.1:9/unreachable.gguf", f"{node.url}/no-such-file.gguf"):
            node.http.post("/api/admin/downloads", json={"source": source}).raise_for_status()
        yield node


def wait_in(folder: Path) -> None:
    """What `swarmllm models pull --layers 0:4` of a file that nobody knows leaves."""
    digests = {
        tensor.name: tensor.blake3 for tensor in needed_tensors(build_manifest(GUIDE_PATH), LayerRange(0, 4))
    }
    state = PartialModelState(
        url="https://example.org/stranger.gguf",
        source="https://example.org/stranger.gguf",
        name="stranger",
        size_bytes=GUIDE_PATH.stat().st_size,
        validator="1",
        sha256="",
        layers=["0:4"],
        digests=digests,
    )
    model = UnidentifiedModel(folder, state)
    model.begin()
    model.part.write_bytes(other_guide("A"))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with running_daemon(tmp_path_factory.mktemp("fresh"), "fresh", load=[]) as node:
        yield node


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_axe_finds_nothing_to_complain_about(
    chromium: WebDriver, axe: str, node: DaemonProcess, fresh: DaemonProcess, scheme: str, width: int
) -> None:
    """Of every view as it comes, and with everything open that can be opened."""
    media(chromium, scheme)
    size(chromium, width)
    complaints = []

    def judge(view: str) -> None:
        # What is half below the header of a page that was scrolled counts as too small to be hit.
        chromium.execute_script("scrollTo(0, 0)")
        chromium.execute_script(axe)
        found: dict[str, Any] = chromium.execute_async_script(JUDGE, RULES)
        picture(chromium, f"axe-{scheme}-{width}-{view}")
        complaints.extend((view, *each) for each in found["violations"])
        assert found["passes"] > 15, "nearly nothing was looked at"

    go(chromium, node, "swarm")
    shown(chromium, "view-swarm", "Recent requests")
    judge("swarm")
    chromium.execute_script(OPEN)
    judge("swarm, open")

    go(chromium, fresh, "swarm")
    shown(chromium, "view-swarm", "Load guide")
    chromium.execute_script(ANSWERED)
    chromium.find_element(By.ID, "find-start").send_keys("x", Keys.ENTER)
    shown(chromium, "view-swarm", "fits in this swarm: yes")
    judge("start")

    go(chromium, node, "models")
    shown(chromium, "view-models", "waiting for the hashes of layers 4–11, head")
    shown(chromium, "view-models", "failed")
    judge("models")
    chromium.execute_script(ANSWERED)
    chromium.find_element(By.ID, "find-models").send_keys("x", Keys.ENTER)
    shown(chromium, "view-models", "does not fit")
    chromium.find_element(By.CSS_SELECTOR, "[aria-label='Share guide']").click()
    shown(chromium, "view-models", "tokens/s expected")
    judge("models, open")
    chromium.find_element(By.CSS_SELECTOR, "[aria-label='Cancel sharing guide']").click()

    go(chromium, node, "chat")
    ask(chromium, QUESTION)
    wait_for(lambda: chromium.find_elements(By.CSS_SELECTOR, ".way .hops li"), DEADLINE_S, "the route")
    judge("chat")
    chromium.execute_script(ANSWERED)
    ask(chromium, "Code?")
    shown(chromium, "view-chat", "return 12")
    ask(chromium, "And now?")
    shown(chromium, "view-chat", "no room")
    chromium.execute_script(OPEN)
    chromium.execute_script("document.querySelector('[data-key=edit]').click()")
    judge("chat, open")
    assert not complaints, "\n".join(map(str, complaints))


def ask(page: WebDriver, question: str) -> None:
    wait_for(lambda: page.find_elements(By.CSS_SELECTOR, "[data-key=send]:enabled"), DEADLINE_S, "the button")
    page.find_element(By.ID, "prompt").send_keys(question, Keys.ENTER)


def shown(page: WebDriver, view: str, text: str) -> None:
    element = page.find_element(By.ID, view)
    wait_for(lambda: element.is_displayed() and text in element.text, DEADLINE_S, f"{text!r} in {view}")
