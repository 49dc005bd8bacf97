"""The chat page in a real browser with several models ready: it asks the model that it shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser_page import find, go, seen
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S
from other_guide import other_guide
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.slow

KEEP_WHAT_IS_ASKED = """
window.asked = [];
const real = window.fetch;
window.fetch = (where, init, ...rest) => {
  if (String(where).endsWith("chat/completions")) asked.push(JSON.parse(init.body).model);
  return real(where, init, ...rest);
};
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("chat")
    (folder / "other.gguf").write_bytes(other_guide("A"))
    with running_daemon(folder, "kitchen", load=["guide"]) as node:
        body = {"path": str(folder / "other.gguf"), "name": "other"}
        node.http.post("/api/admin/models", json=body).raise_for_status()
        load(node, "other")
        load(node, "guide")
        yield node


def load(node: DaemonProcess, model: str) -> None:
    node.http.post(f"/api/admin/models/{model}/load", json={}).raise_for_status()
    wait_for(lambda: model in ready(node), DEADLINE_S, f"{model} to be ready")


def unload(node: DaemonProcess, model: str) -> None:
    node.http.post(f"/api/admin/models/{model}/unload", json={}).raise_for_status()
    wait_for(lambda: model not in ready(node), DEADLINE_S, f"{model} to be gone")


def ready(node: DaemonProcess) -> list[str]:
    return [model["id"] for model in node.http.get("/v1/models").json()["data"] if model["ready"]]


def options(page: WebDriver) -> list[str]:
    script = "return [...document.querySelectorAll('#model option')].map((each) => each.textContent)"
    return [str(text) for text in page.execute_script(script)]


def open_chat(page: WebDriver, node: DaemonProcess) -> str:
    """The model that the fresh page shows."""
    go(page, node, "chat")
    wait_for(lambda: sorted(options(page)) == ["guide", "other"], DEADLINE_S, "both models")
    page.execute_script(KEEP_WHAT_IS_ASKED)
    return shown(page)


def shown(page: WebDriver) -> str:
    return str(page.execute_script("return document.querySelector('#model').value"))


def choose_other(page: WebDriver) -> str:
    """Choose as a person does, in the list that opens, the model that is not shown."""
    first = shown(page)
    is_top = page.execute_script("return document.querySelector('#model').selectedIndex === 0")
    key = Keys.ARROW_DOWN if is_top else Keys.ARROW_UP
    keys = ActionChains(page).click(find(page, "#model")).pause(0.3).send_keys(key).pause(0.1)
    keys.send_keys(Keys.ENTER).perform()
    wait_for(lambda: shown(page) != first, DEADLINE_S, "the choice")
    return shown(page)


def ask(page: WebDriver) -> str:
    """The model that the request named."""
    before = len(page.find_elements(By.CSS_SELECTOR, ".way"))
    find(page, "#prompt").send_keys("What is a layer?", Keys.ENTER)
    wait_for(
        lambda: len(page.find_elements(By.CSS_SELECTOR, ".way")) > before, DEADLINE_S, "the answer's way"
    )
    return str(page.execute_script("return asked.at(-1)"))


def placeholder(page: WebDriver) -> str:
    return str(find(page, "#prompt").get_attribute("placeholder"))


def test_the_model_shown_without_a_choice_is_asked(page: WebDriver, node: DaemonProcess) -> None:
    first = open_chat(page, node)
    assert first in placeholder(page)
    assert ask(page) == first == shown(page)


def test_the_first_choice_on_a_fresh_page_is_asked(page: WebDriver, node: DaemonProcess) -> None:
    first = open_chat(page, node)
    chosen = choose_other(page)
    assert chosen != first
    wait_for(lambda: chosen in placeholder(page), DEADLINE_S, "the placeholder to name it")
    assert ask(page) == chosen == shown(page)
    assert choose_other(page) == first
    assert ask(page) == first == shown(page)
    find(page, "#view-chat button.quiet").click()
    seen(page, "Under each answer")
    assert shown(page) == first


@pytest.mark.parametrize("is_explicit", [True, False], ids=["chosen", "asked"])
def test_a_model_that_flaps_stays_the_one_of_the_conversation(
    page: WebDriver, node: DaemonProcess, is_explicit: bool
) -> None:
    open_chat(page, node)
    if is_explicit:
        kept = choose_other(page)
    else:
        kept = ask(page)
    asked = page.execute_script("return asked.length")
    unload(node, kept)
    try:
        wait_for(lambda: f"{kept} (unavailable)" in options(page), DEADLINE_S, "it to be unavailable")
        assert shown(page) == kept
        find(page, "#prompt").send_keys("Still there?", Keys.ENTER)
        seen(page, f"Not sent: {kept} is not available", "[role=alert]")
        assert page.execute_script("return asked.length") == asked
        assert find(page, "#prompt").get_attribute("value") == "Still there?"
        find(page, "#prompt").clear()
    finally:
        load(node, kept)
    wait_for(lambda: sorted(options(page)) == ["guide", "other"], DEADLINE_S, "it to come back")
    assert shown(page) == kept
    assert not page.find_elements(By.CSS_SELECTOR, "#view-chat [role=alert]")
    assert ask(page) == kept


def test_another_model_can_be_chosen_while_one_is_unavailable(page: WebDriver, node: DaemonProcess) -> None:
    open_chat(page, node)
    kept = choose_other(page)
    unload(node, kept)
    try:
        wait_for(lambda: f"{kept} (unavailable)" in options(page), DEADLINE_S, "it to be unavailable")
        other = choose_other(page)
        assert other != kept
        assert ask(page) == other
    finally:
        load(node, kept)
    wait_for(lambda: sorted(options(page)) == ["guide", "other"], DEADLINE_S, "it to come back")
    assert ask(page) == other == shown(page)
