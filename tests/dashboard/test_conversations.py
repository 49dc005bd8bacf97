"""The chat's conversations in a real browser: kept over a reload, found, deleted, exported, branched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_page import find, go, picture, seen, size, texts
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

pytestmark = pytest.mark.slow

MARKUP = "<img src=x onerror=alert(1)>"
CODE = f'```python\ndef layer(n):  # {MARKUP}\n    return "<b>" * 12\n```\n\n```\nreturn 12\n```'
ECHO = """
window.asked = [];
const real = window.fetch;
window.fetch = (where, init, ...rest) => {
  if (!String(where).endsWith("chat/completions")) return real(where, init, ...rest);
  asked.push(JSON.parse(init.body));
  const content = arguments[0] || `Answer ${asked.length}`;
  const choices = [{ delta: { content } }];
  return Promise.resolve(new Response(`data: ${JSON.stringify({ choices })}\\n\\n`));
};
"""
"""Requests are written down and answered in the page: what is asked counts here, not what a model says."""

ENDLESS = """
const real = window.fetch;
window.fetch = (where, init, ...rest) => {
  if (!String(where).endsWith("chat/completions")) return real(where, init, ...rest);
  const body = new ReadableStream({ start(to) {
    to.enqueue(new TextEncoder().encode('data: {"choices": [{"delta": {"content": "Begun"}}]}\\n\\n'));
    init.signal.addEventListener("abort", () => to.error(init.signal.reason));
  } });
  return Promise.resolve(new Response(body));
};
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with running_daemon(tmp_path_factory.mktemp("conversations"), "kitchen", load=["guide"]) as node:
        wait_for(lambda: node.http.get("/health/ready").status_code == 200, DEADLINE_S, "the guide")
        yield node


@pytest.fixture
def chat(page: WebDriver, node: DaemonProcess) -> Iterator[WebDriver]:
    """A fresh page without conversations, whose requests are answered in the page."""
    begin(page, node, ECHO)
    yield page
    while page.find_elements(By.CSS_SELECTOR, ".kept li"):
        press(page, ".kept li button:last-child")


def begin(page: WebDriver, node: DaemonProcess, script: str, *arguments: str) -> None:
    go(page, node, "chat")
    seen(page, "Under each answer")
    page.execute_script(script, *arguments)


def press(page: WebDriver, selector: str) -> None:
    """Click it also while it is folded away or drawn anew."""
    find(page, selector)
    page.execute_script("document.querySelector(arguments[0]).click()", selector)


def expect(page: WebDriver, selector: str, wanted: list[str]) -> None:
    wait_for(lambda: texts(page, selector) == wanted, DEADLINE_S, f"{wanted} in {selector}")


def ask(page: WebDriver, question: str) -> None:
    """Ask and wait for the answer's end."""
    before = len(texts(page, ".turn.assistant"))
    find(page, "#prompt").send_keys(question, Keys.ENTER)
    wait_for(lambda: len(texts(page, ".turn.assistant")) == before + 1, DEADLINE_S, "the answer")
    find(page, "[data-key=send]")


def fill(page: WebDriver, selector: str, text: str) -> WebElement:
    page.execute_script("document.querySelectorAll('.tools details').forEach((each) => each.open = true)")
    box = find(page, selector)
    box.clear()
    box.send_keys(text)
    return box


def last_asked(page: WebDriver) -> dict[str, Any]:
    return dict(page.execute_script("return asked.at(-1)"))


def said(page: WebDriver) -> list[str]:
    return [each["content"] for each in last_asked(page)["messages"]]


def test_conversations_survive_a_reload_and_are_found_and_deleted(
    chat: WebDriver, node: DaemonProcess
) -> None:
    ask(chat, f"What is a layer? {MARKUP}")
    press(chat, ".composer button.quiet")
    expect(chat, ".turn", [])
    ask(chat, "Where do nodes meet?")
    titles = ["Where do nodes meet?", f"What is a layer? {MARKUP}"]
    expect(chat, ".kept li .grow", titles)

    begin(chat, node, ECHO)
    expect(chat, ".kept li .grow", titles)
    expect(chat, ".turn", [])
    assert not chat.find_elements(By.CSS_SELECTOR, "main img")
    fill(chat, "#search", "layer ANSWER")
    expect(chat, ".kept li .grow", titles[1:])
    press(chat, ".kept li .grow")
    expect(chat, ".turn > .text", [titles[1], "Answer 1"])
    ask(chat, "And then?")
    assert said(chat) == [titles[1], "Answer 1", "And then?"]
    fill(chat, "#search", "nothing of the kind")
    expect(chat, ".kept li .grow", [])
    fill(chat, "#search", " ")
    expect(chat, ".kept li .grow", [titles[1], titles[0]])
    press(chat, ".kept li button:last-child")
    expect(chat, ".turn", [])

    begin(chat, node, ECHO)
    expect(chat, ".kept li .grow", titles[:1])


def test_what_was_answered_before_a_conversation_was_deleted_does_not_come_back(
    page: WebDriver, node: DaemonProcess
) -> None:
    begin(page, node, ENDLESS)
    find(page, "#prompt").send_keys("For ever?", Keys.ENTER)
    seen(page, "Begun")
    press(page, ".kept li button:last-child")
    find(page, "[data-key=send]")
    begin(page, node, ECHO)
    ask(page, "And now?")
    expect(page, ".kept li .grow", ["And now?"])
    press(page, ".kept li button:last-child")
    expect(page, ".kept li", [])


def test_a_conversation_has_a_system_prompt_and_sampling_of_its_own(
    chat: WebDriver, node: DaemonProcess
) -> None:
    fill(chat, "#system", "Be brief.")
    fill(chat, "[name=temperature]", "0.25")
    fill(chat, "[name=max_tokens]", "40")
    fill(chat, "[name=top_p]", "7").send_keys(Keys.TAB)  # above its bound
    ask(chat, "What is a layer?")
    asked = last_asked(chat)
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (asked["temperature"], asked["max_tokens"]) == (0.25, 40)
    assert not {"top_p", "seed"} & set(asked)
    press(chat, ".composer button.quiet")
    ask(chat, "And here?")
    assert said(chat) == ["And here?"]
    assert "temperature" not in last_asked(chat)

    begin(chat, node, ECHO)
    expect(chat, ".kept li .grow", ["And here?", "What is a layer?"])
    press(chat, ".kept li:last-child .grow")
    ask(chat, "Once more")
    assert said(chat)[0] == "Be brief."
    assert last_asked(chat)["temperature"] == 0.25


def test_an_answer_is_generated_again_and_an_edited_question_branches(chat: WebDriver) -> None:
    ask(chat, "One")
    ask(chat, "Two")
    press(chat, "[data-key=again]")
    expect(chat, ".turn > .text", ["One", "Answer 1", "Two", "Answer 3"])
    assert said(chat) == ["One", "Answer 1", "Two"]
    press(chat, ".turn:nth-child(3) [data-key=edit]")
    find(chat, "#edit").clear()
    find(chat, "#edit").send_keys("Three")
    press(chat, ".log .composer .primary")
    expect(chat, ".turn > .text", ["One", "Answer 1", "Three", "Answer 4"])
    assert said(chat) == ["One", "Answer 1", "Three"]
    press(chat, ".kept li:last-child .grow")
    expect(chat, ".turn > .text", ["One", "Answer 1", "Two", "Answer 3"])


FAILING = """
const real = window.fetch;
window.asked = [];
window.answers = ["First", "Begun, then stopped", "", "Last"];
window.fetch = (where, init, ...rest) => {
  if (!String(where).endsWith("chat/completions")) return real(where, init, ...rest);
  asked.push(JSON.parse(init.body));
  const content = answers.shift();
  const failure = JSON.stringify({ error: { message: "no room" } });
  if (!content) return Promise.resolve(new Response(failure, { status: 503 }));
  const chunk = `data: ${JSON.stringify({ choices: [{ delta: { content } }] })}\\n\\n`;
  if (!content.endsWith("stopped")) return Promise.resolve(new Response(chunk));
  const body = new ReadableStream({ start(to) {
    to.enqueue(new TextEncoder().encode(chunk));
    init.signal.addEventListener("abort", () => to.error(init.signal.reason));
  } });
  return Promise.resolve(new Response(body));
};
"""


def test_what_was_stopped_or_failed_is_said_beside_the_answers_and_not_sent_again(
    page: WebDriver, node: DaemonProcess
) -> None:
    begin(page, node, FAILING)
    ask(page, "One?")
    find(page, "#prompt").send_keys("Two?", Keys.ENTER)
    expect(page, ".turn > .text", ["One?", "First", "Two?", "Begun, then stopped"])
    press(page, "[data-key=stop]")
    seen(page, "Stopped.")
    # The new answer fails: the one that is there stays.
    press(page, "[data-key=again]")
    seen(page, "no room")
    expect(page, ".turn > .text", ["One?", "First", "Two?", "Begun, then stopped"])
    ask(page, "Three?")
    assert said(page) == ["One?", "First", "Two?", "Begun, then stopped", "Three?"]
    press(page, ".kept li button:last-child")


def test_a_question_without_an_answer_is_not_sent_again(page: WebDriver, node: DaemonProcess) -> None:
    begin(page, node, FAILING)
    page.execute_script("answers.splice(0, 2)")
    ask(page, "One?")
    seen(page, "no room")
    ask(page, "Two?")
    assert said(page) == ["Two?"]
    press(page, ".kept li button:last-child")


def test_a_conversation_is_exported_and_copied(chat: WebDriver, tmp_path: Path) -> None:
    allow = {"behavior": "allow", "downloadPath": str(tmp_path)}
    chat.execute_cdp_cmd("Browser.setDownloadBehavior", allow)
    fill(chat, "#system", "Be brief.")
    ask(chat, "What is a layer?")
    press(chat, ".settings button:last-child")
    press(chat, ".settings button:first-child")

    def exported(ending: str) -> list[Path]:
        return list(tmp_path.glob(f"conversation-*.{ending}"))

    wait_for(lambda: exported("md") and exported("json"), DEADLINE_S, "both files")
    assert exported("md")[0].read_text() == (
        "# What is a layer?\n\nModel: guide\n\n## System\n\nBe brief.\n\n"
        "## You\n\nWhat is a layer?\n\n## Answer\n\nAnswer 1\n"
    )
    assert json.loads(exported("json")[0].read_text()) == {
        "model": "guide",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is a layer?"},
            {"role": "assistant", "content": "Answer 1"},
        ],
    }
    find(chat, ".turn.assistant [data-key=copy]").click()
    expect(chat, ".turn.assistant [data-key=copy]", ["Copied"])
    find(chat, "#prompt").send_keys(Keys.CONTROL, "v")
    wait_for(
        lambda: find(chat, "#prompt").get_attribute("value") == "Answer 1", DEADLINE_S, "what was copied"
    )


def test_code_is_coloured_and_stays_text(page: WebDriver, node: DaemonProcess) -> None:
    begin(page, node, ECHO, CODE)
    ask(page, "Code?")
    expect(page, ".code-word", ["def", "return"])
    expect(page, ".code-string", ['"<b>"'])
    expect(page, ".code-number", ["12"])
    expect(page, ".code-comment", [f"# {MARKUP}"])
    assert texts(page, "pre code")[0] == CODE.split("\n", 1)[1].split("\n```")[0]
    assert not page.find_elements(By.CSS_SELECTOR, "pre img, pre b")
    page.execute_script("document.querySelectorAll('.tools details').forEach((each) => each.open = true)")
    for width in (1280, 768, 390):
        size(page, width)
        over = page.execute_script("return document.documentElement.scrollWidth - innerWidth")
        assert over <= 0, f"{over} px too wide at {width}"
        picture(page, f"conversations-{width}")
    press(page, ".kept li button:last-child")
    expect(page, ".kept li", [])
