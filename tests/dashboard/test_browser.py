"""The dashboard in a real browser, in front of real daemons: what a person sees and does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser_page import find, go, media, picture, seen, size, texts
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S
from other_guide import other_guide
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from swarmllm.guide import DRAFT_PATH

pytestmark = [pytest.mark.slow, pytest.mark.long]

WIDTHS = (1280, 768, 360)
VIEWS = ("swarm", "models", "chat")
NAMED_ROLES = {"button", "combobox", "image", "link", "progressbar", "region", "textbox"}
CONTRAST = """
const channel = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const behind = (element) => {
  for (let each = element; each; each = each.parentElement) {
    const color = parse(getComputedStyle(each).backgroundColor);
    if (color.length < 4 || color[3] > 0.99) return color;
  }
};
const texts = [...document.querySelectorAll("main *, header *")].filter((element) =>
  [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) && element.checkVisibility()
  && !element.disabled);
return texts.map((element) => {
  const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
  return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.textContent.slice(0, 40)];
}).filter(([ratio]) => ratio < 4.5);
"""


COUNT_CHANGES = """
window.drawn = 0;
const everything = {subtree: true, childList: true, attributes: true, characterData: true};
new MutationObserver(() => drawn++).observe(document.body, everything);
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    """Two nodes of which nobody holds the last third of the model."""
    folder = tmp_path_factory.mktemp("dashboard")
    with (
        running_daemon(folder, "kitchen", load=["guide:0:4"]) as kitchen,
        running_daemon(folder, "study", load=["guide:4:8"], bootstrap=kitchen.addresses) as study,
    ):
        wait_for(
            lambda: kitchen.http.get("/api/admin/models/guide/status").json()["missing"] == ["8:12"],
            DEADLINE_S,
            "the nodes to know each other",
        )
        yield kitchen, study


@pytest.fixture
def kitchen(nodes: tuple[DaemonProcess, DaemonProcess]) -> DaemonProcess:
    """The first node, with the last third as well: then every layer is held."""
    node, _ = nodes
    node.http.post("/api/admin/models/guide/load", json={"layers": "8:12"}).raise_for_status()
    return node


@contextmanager
def endless_answer(node: DaemonProcess) -> Iterator[None]:
    body = {
        "model": "guide",
        "stream": True,
        "ignore_eos": True,
        "max_tokens": 4000,
        "messages": [{"role": "user", "content": "Tell me all."}],
    }
    stop = threading.Event()

    def ask() -> None:
        with node.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            for _ in answer.iter_lines():
                if stop.is_set():
                    return

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        stop.set()
        asking.join(30)


def test_a_gap_is_seen_and_closed_by_loading_its_layers(
    page: WebDriver, nodes: tuple[DaemonProcess, DaemonProcess]
) -> None:
    kitchen, _ = nodes
    go(page, kitchen)
    seen(page, "layers 8–11 missing")
    seen(page, "others can dial it", ".node")
    labels = [strip.text for strip in page.find_elements(By.CSS_SELECTOR, ".strip .label")]
    assert labels == ["kitchen", "study", "coverage"]
    assert find(page, ".bar.gap").size["width"] > 100
    find(page, "nav a[href='#models']").click()
    find(page, ".model input[name=layers]").send_keys("8:99", Keys.ENTER)
    seen(page, "has layers 0:12, not 8:99")
    find(page, ".model input[name=layers]").send_keys(Keys.CONTROL, "a")
    find(page, ".model input[name=layers]").send_keys("8:12", Keys.ENTER)
    seen(page, "ready: complete on 2 nodes")
    find(page, "nav a[href='#swarm']").click()
    seen(page, "complete on 2 nodes")
    assert not page.find_elements(By.CSS_SELECTOR, ".bar.gap")


def test_an_answer_shows_the_route_it_took(page: WebDriver, kitchen: DaemonProcess) -> None:
    go(page, kitchen, "chat")
    seen(page, "Under each answer stands the way")
    find(page, "#prompt").send_keys("What is a pipeline?", Keys.ENTER)
    stages = wait_for(lambda: page.find_elements(By.CSS_SELECTOR, ".way .hops li"), DEADLINE_S, "the route")
    assert [stage.text.split("\n")[:2] for stage in stages] == [
        ["kitchen", "0–3"],
        ["study", "4–7"],
        ["kitchen", "8–11"],
    ]
    assert "pipeline" in find(page, ".turn.assistant .text").text
    assert find(page, ".way .split").get_attribute("aria-label").count("computes") == 3
    assert page.switch_to.active_element.get_attribute("id") == "prompt"
    find(page, "nav a[href='#swarm']").click()
    seen(page, "completed")
    row = find(page, "tbody tr")
    assert "guide" in row.text
    assert len(row.find_elements(By.CSS_SELECTOR, ".hops li")) == 3


WRITTEN = (
    "# Steps\n\n1. Run `swarmllm daemon`\n2. **Wait**\n\n```sh\nls <b>*.gguf</b>\n```\n\n"
    "- <img src=x onerror=alert(1)> is *text*"
)
ANSWER = r"""
const thoughts = ["Two things", " to do."].map((reasoning_content) => ({ reasoning_content }));
const deltas = [...thoughts, ...arguments[0].map((content) => ({ content }))];
const events = deltas.map((delta) => `data: ${JSON.stringify({ choices: [{ delta }] })}\n\n`);
const real = window.fetch;
window.fetch = (where, ...rest) => String(where).endsWith("chat/completions")
  ? Promise.resolve(new Response(events.join(""))) : real(where, ...rest);
"""


def test_thoughts_are_folded_away_and_markdown_becomes_elements_never_html(
    page: WebDriver, kitchen: DaemonProcess
) -> None:
    go(page, kitchen, "chat")
    seen(page, "Under each answer stands the way")
    page.execute_script(ANSWER, [WRITTEN[at : at + 7] for at in range(0, len(WRITTEN), 7)])
    find(page, "#prompt").send_keys("How?", Keys.ENTER)
    wait_for(
        lambda: page.find_elements(By.CSS_SELECTOR, ".turn.assistant .text ul"), DEADLINE_S, "the answer"
    )
    answer = find(page, ".turn.assistant > .text")
    assert [item.text for item in answer.find_elements(By.CSS_SELECTOR, "ol li")] == [
        "Run swarmllm daemon",
        "Wait",
    ]
    assert answer.find_element(By.CSS_SELECTOR, "pre code").text == "ls <b>*.gguf</b>"
    assert answer.find_element(By.CSS_SELECTOR, "ul li").text == "<img src=x onerror=alert(1)> is text"
    assert not answer.find_elements(By.CSS_SELECTOR, "img, b")
    thought = find(page, "details.thought")
    assert thought.get_attribute("open") is None
    thought.find_element(By.TAG_NAME, "summary").click()
    assert thought.find_element(By.CSS_SELECTOR, ".text").text == "Two things to do."


def test_a_request_is_seen_walking_through_the_layers_and_stopped(
    page: WebDriver, kitchen: DaemonProcess
) -> None:
    go(page, kitchen)
    with endless_answer(kitchen):
        seen(page, "generates", ".pipeline")
        find(page, ".pipeline .split")
        assert find(page, ".flow path").get_attribute("d").count("L") == 5
        rate = wait_for(lambda: float(find(page, ".stat .value").text.split()[0]), DEADLINE_S, "tokens/s")
        assert rate > 0
        picture(page, "live")
    seen(page, "No request of this node runs")
    seen(page, "cancelled")


def test_a_node_shows_what_it_computes_for_another_one(
    page: WebDriver, kitchen: DaemonProcess, nodes: tuple[DaemonProcess, DaemonProcess]
) -> None:
    table = "section[aria-label='Computed for other nodes'] tbody"
    go(page, nodes[1])
    with endless_answer(kitchen):
        wait_for(
            lambda: "kitchen" in find(page, table).text and "layers 4–7" in find(page, table).text,
            DEADLINE_S,
            "the row",
        )
        cells = f"{table} td[data-label='tokens/s']"
        wait_for(lambda: float(find(page, cells).text.split()[0].replace("–", "0")) > 0, DEADLINE_S, "a rate")
        for width in (390, 768, 1280):
            size(page, width)
            assert page.execute_script("return document.documentElement.scrollWidth") == width
            page.execute_script(f'document.querySelector("{table}").scrollIntoView({{block: "center"}})')
            picture(page, f"serving-{width}")
    wait_for(
        lambda: "–" in find(page, f"{table} td[data-label=running]").get_property("textContent"),
        DEADLINE_S,
        "it to be idle",
    )


def test_a_chat_can_be_stopped(page: WebDriver, kitchen: DaemonProcess) -> None:
    go(page, kitchen, "chat")
    page.execute_script(
        "const real = fetch; window.fetch = (url, init) => { if (init?.body?.includes('stream')) init.body ="
        " JSON.stringify({...JSON.parse(init.body), ignore_eos: true}); return real(url, init); };"
    )
    seen(page, "Under each answer")
    find(page, "#prompt").send_keys("What is a node?", Keys.ENTER)
    find(page, "[data-key=stop]").click()
    find(page, "[data-key=send]")
    wait_for(lambda: kitchen.stats()["requests"]["active"] == 0, DEADLINE_S, "the generation to end")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_width_and_can_be_read(page: WebDriver, kitchen: DaemonProcess, scheme: str) -> None:
    media(page, scheme)
    go(page, kitchen)
    seen(page, "Recent requests")
    assert page.execute_script("return document.documentElement.dataset.theme") == scheme
    for width in WIDTHS:
        size(page, width)
        for view in VIEWS:
            page.execute_script(f"location.hash = '#{view}'")
            wait_for(
                lambda view=view: page.find_element(By.ID, f"view-{view}").is_displayed(), DEADLINE_S, view
            )
            over = page.execute_script("return document.documentElement.scrollWidth - innerWidth")
            assert over <= 0, f"{view} at {width} is {over} px too wide"
            assert page.execute_script(CONTRAST) == []
            picture(page, f"{scheme}-{width}-{view}")


def test_everything_has_a_name_and_is_reached_by_keyboard(page: WebDriver, kitchen: DaemonProcess) -> None:
    go(page, kitchen, "models")
    seen(page, "guide")
    for view in VIEWS:
        page.execute_script(f"location.hash = '#{view}'")
        wait_for(lambda view=view: page.find_element(By.ID, f"view-{view}").is_displayed(), DEADLINE_S, view)
        assert list(nameless(page)) == []
    go(page, kitchen)
    seen(page, "Recent requests")
    order = []
    for _ in range(3):
        page.switch_to.active_element.send_keys(Keys.TAB)
        element = page.switch_to.active_element
        order.append(element.text)
        assert element.value_of_css_property("outline-style") == "solid"
    assert order == ["Skip to content", "Swarm", "Models"]
    element.send_keys(Keys.ENTER)
    seen(page, "file of this machine")
    assert find(page, "nav a[aria-current=page]").text == "Models"


def nameless(page: WebDriver) -> Iterator[dict[str, Any]]:
    """What a screen reader could only call by its role."""
    for node in page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]:
        role = node.get("role", {}).get("value")
        if not node["ignored"] and role in NAMED_ROLES and not node.get("name", {}).get("value"):
            yield node


def test_what_is_typed_survives_the_news(page: WebDriver, nodes: tuple[DaemonProcess, DaemonProcess]) -> None:
    kitchen, _ = nodes
    go(page, kitchen, "models")
    box = find(page, ".model input[name=layers]")
    box.send_keys("0:")
    page.execute_script(COUNT_CHANGES)
    with endless_answer(kitchen):
        kitchen.http.post("/api/admin/models/guide/unload", json={"layers": "8:12"})
        seen(page, "8–11 missing")
    assert page.execute_script("return drawn") > 0
    assert page.switch_to.active_element == box
    assert box.get_attribute("value") == "0:"


def test_a_model_is_fetched_from_the_web_and_a_mistake_is_explained(
    page: WebDriver, nodes: tuple[DaemonProcess, DaemonProcess], tmp_path: Path
) -> None:
    kitchen, _ = nodes
    (tmp_path / "tiny.gguf").write_bytes(DRAFT_PATH.read_bytes())
    go(page, kitchen, "models")
    find(page, "#source").send_keys("tiny.gguf", Keys.ENTER)
    seen(page, "Write hf:ORG/REPO")
    with file_server(tmp_path) as url:
        find(page, "#source").send_keys(Keys.CONTROL, "a")
        find(page, "#source").send_keys(f"{url}/tiny.gguf", Keys.ENTER)
        seen(page, "fetched")
    assert find(page, "#source").get_attribute("value") == ""
    picture(page, "fetched")
    names = [name.text for name in page.find_elements(By.CSS_SELECTOR, ".model strong")]
    assert "tiny" in names


def test_a_model_says_what_is_wrong_with_its_file(
    page: WebDriver, kitchen: DaemonProcess, tmp_path: Path
) -> None:
    path = tmp_path / "moved.gguf"
    path.write_bytes(DRAFT_PATH.read_bytes())
    for what, body in (("", {"path": str(path), "name": "moved"}), ("/moved/load", {})):
        assert kitchen.http.post(f"/api/admin/models{what}", json=body).status_code == 200
    path.unlink()
    go(page, kitchen, "models")
    seen(page, "runs on, but cannot be loaded again: ")
    kitchen.http.delete("/api/admin/models/moved")


def test_a_failed_download_is_tried_again_and_cleared(
    page: WebDriver, kitchen: DaemonProcess, tmp_path: Path
) -> None:
    def clear() -> None:
        find(page, "[aria-label^='Clear http']").click()
        wait_for(
            lambda: not page.find_elements(By.CSS_SELECTOR, "[aria-label^='Clear http']"), DEADLINE_S, "it"
        )

    for view in kitchen.http.get("/api/admin/downloads").json()["downloads"]:
        kitchen.http.post(f"/api/admin/downloads/{view['id']}/clear", json={})
    with file_server(tmp_path) as url:
        kitchen.http.post(
            "/api/admin/downloads", json={"source": f"{url}/late.gguf", "name": "later"}
        ).raise_for_status()
        go(page, kitchen, "models")
        seen(page, "there is no such file")
        picture(page, "failed")
        (tmp_path / "late.gguf").write_bytes(other_guide("B"))
        find(page, "[aria-label^='Try again: http']").click()
        wait_for(lambda: "later" in texts(page, ".model strong"), DEADLINE_S, "the model")
    wait_for(
        lambda: not page.find_elements(By.CSS_SELECTOR, "[aria-label^='Cancel http']"), DEADLINE_S, "its end"
    )
    clear()
    assert "later" in texts(page, ".model strong")


def test_a_download_with_a_long_name_fits_every_width(page: WebDriver, kitchen: DaemonProcess) -> None:
    source = f"http://127.0.0.1:9/{'long-name.' * 15}gguf"
    started = kitchen.http.post("/api/admin/downloads", json={"source": source}).json()
    try:
        go(page, kitchen, "models")
        seen(page, "trying again")
        for width in WIDTHS:
            size(page, width)
            assert page.execute_script("return document.documentElement.scrollWidth") == width
            picture(page, f"download-{width}")
    finally:
        kitchen.http.delete(f"/api/admin/downloads/{started['id']}")


def test_a_model_is_shared_out_and_taken_back_with_a_button(page: WebDriver, tmp_path: Path) -> None:
    room = {"auto_manage": {"interval_s": 0.3, "accept": ["members"]}}
    with (
        running_daemon(tmp_path, "attic", load=[], **room) as attic,
        running_daemon(tmp_path, "garage", load=[], bootstrap=attic.addresses, **room) as garage,
    ):
        wait_for(
            lambda: len(attic.http.get("/api/admin/shares/guide/plan").json()["parts"]) == 2,
            DEADLINE_S,
            "both to know each other",
        )
        go(page, attic, "models")
        seen(page, "guide")
        find(page, "button[aria-label='Share guide']").click()
        seen(page, "tokens/s expected")
        seen(page, "garage")
        assert not attic.http.get("/api/admin/shares").json()["shares"]
        find(page, "button[aria-label='Share it out: guide']").click()
        seen(page, "shared: all layers are held by")
        assert list(nameless(page)) == []
        picture(page, "shared")
        find(page, "button[aria-label='Stop sharing guide']").click()
        find(page, "button[aria-label='Share guide']")
        for node in (attic, garage):
            wait_for(lambda node=node: not node.stats()["models"], DEADLINE_S, "the layers to be dropped")


@contextmanager
def file_server(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


COLOURS = """
const shown = [...document.querySelectorAll(".nodes .node")].map((node) => [
  node.querySelector(".name .cut").textContent,
  getComputedStyle(node.querySelector(".swatch")).backgroundColor]);
return Object.fromEntries(shown);
"""
DRAW = """
const [events, ago, recently, done] = arguments;
import("/dashboard/swarm.js").then(({ renderSwarm }) => {
  const sections = events.map(([name, text]) => [name, JSON.parse(text)]);
  const state = Object.fromEntries([["link", { status: "live" }], ...sections]);
  for (const node of state.peers.left) Object.assign(node, { recently, left_at: Date.now() / 1000 - ago });
  const root = document.createElement("div");
  root.id = "drawn";
  document.getElementById("drawn")?.remove();
  document.querySelector("main").append(root);
  renderSwarm(root, state);
  done(true);
});
"""


def sections_of(node: DaemonProcess, until: Callable[[str, str], bool]) -> list[list[str]]:
    """(name, JSON) of every section, once one is as it should be."""
    found: dict[str, str] = {}
    with node.http.stream("GET", "/api/events") as answer:
        name, fulfilled = "", False
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found[name] = line.removeprefix("data: ")
                fulfilled = fulfilled or until(name, found[name])
            if fulfilled and len(found) == 7:
                break
    return [list(each) for each in found.items()]


def test_a_node_that_left_goes_from_the_list_and_colours_stay(page: WebDriver, tmp_path: Path) -> None:
    def card(name: str) -> str:
        cards = [element.text for element in page.find_elements(By.CSS_SELECTOR, ".nodes .node")]
        return next((text for text in cards if text.startswith(name)), "")

    with running_daemon(tmp_path, "attic", load=["guide:0:4"]) as attic:
        with (
            running_daemon(tmp_path, "barn", load=["guide:4:8"], bootstrap=attic.addresses),
            running_daemon(tmp_path, "cellar", load=["guide:8:12"], bootstrap=attic.addresses) as cellar,
        ):
            go(page, attic)
            seen(page, "complete on 3 nodes")
            wait_for(lambda: card("barn") and card("cellar"), DEADLINE_S, "both")
            before = page.execute_script(COLOURS)
            go(page, cellar)
            wait_for(lambda: card("attic"), DEADLINE_S, "the other node's page")
            seen_there = page.execute_script(COLOURS)
            assert {name: before[name] for name in seen_there} == seen_there, "the same on every node's page"
            go(page, attic)
            wait_for(lambda: card("barn") and card("cellar"), DEADLINE_S, "both again")
            cellar.process.kill()
            wait_for(lambda: " left " in card("cellar").replace("\n", " "), DEADLINE_S, "it to have left")
            assert "held guide layers 8–11" in card("cellar")
            assert page.execute_script(COLOURS) == before
        seen(page, "layers 4–11 missing")
        left = sections_of(attic, lambda name, text: name == "peers" and text.count('"left_at"') == 2)
        go(page, attic, "models")
        for recently, ago in ((True, 30), (False, 90)):
            assert page.execute_async_script(DRAW, left, ago, recently)
            for width in (390, 768, 1280):
                size(page, width)
                assert page.execute_script("return document.documentElement.scrollWidth") == width
                page.execute_script(
                    'document.querySelector("#drawn .nodes").scrollIntoView({block: "center"})'
                )
                picture(page, f"left-{'recently' if recently else 'before'}-{width}")
        assert len(page.find_elements(By.CSS_SELECTOR, "#drawn .nodes .node")) == 1
        closed = find(page, "#drawn details.gone")
        assert closed.get_attribute("open") is None
        assert closed.text == "2 nodes left in the last hour"
        closed.find_element(By.TAG_NAME, "summary").click()
        assert "cellar" in closed.text
        assert "left 1 min ago" in closed.text
