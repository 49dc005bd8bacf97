"""The dashboard in a real browser, before keys and strangers: who gets in, and whose words stay words."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser_page import find, go, seen
from daemon_process import running_daemon, wait_for
from deadlines import DEADLINE_S
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.keys import Keys

from swarmllm.keys import KeyFile

pytestmark = pytest.mark.slow


def test_a_node_with_keys_asks_for_one(page: WebDriver, tmp_path: Path) -> None:
    with running_daemon(tmp_path, "locked", load=[]) as node:
        keys = KeyFile(node.data_dir)
        _, user = keys.create("app")
        _, admin = keys.create("me", is_admin=True)
        wait_for(
            lambda: node.http.get("/api/admin/stats").status_code == 401, DEADLINE_S, "the keys to count"
        )
        go(page, node)
        find(page, "#login[open]")
        type_key(page, "sk-swarm-wrong")
        seen(page, "not known here", "#login")
        type_key(page, user)
        seen(page, "only the chat works", "#notice")
        page.execute_script("sessionStorage.clear()")
        go(page, node)
        find(page, "#login[open]")
        type_key(page, admin)
        seen(page, "Load guide")
        assert node.stop() == 0
        seen(page, "The connection to the node is lost", "#notice")
        assert "stale" in find(page, "main").get_attribute("class")


def type_key(page: WebDriver, key: str) -> None:
    find(page, "#login-key").send_keys(key, Keys.ENTER)


def test_names_of_other_nodes_are_text_and_scripts_of_others_do_not_run(
    page: WebDriver, tmp_path: Path
) -> None:
    name = "<img src=x onerror=document.title='owned'>"
    with running_daemon(tmp_path, "plain", load=["guide:0:4"], node={"nickname": name}) as node:
        go(page, node)
        seen(page, name)
        page.execute_script(
            "document.body.insertAdjacentHTML('beforeend', `<img src=x onerror=\"window.owned = 1\">`)"
        )
        blocked = """
        const done = arguments[0];
        const script = document.createElement("script");
        script.textContent = "window.owned = 1";
        document.addEventListener("securitypolicyviolation", () => done(window.owned ?? "blocked"));
        document.body.append(script);
        """
        assert page.execute_async_script(blocked) == "blocked"
        page.get_log("browser")
