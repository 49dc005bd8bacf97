"""What the dashboard shows of a new node: the guide, models of the hub, and how a second machine joins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_page import find, go, picture, seen, size
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S
from faulty_server import open_shelf
from other_guide import other_guide
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from swarmllm.downloads.hub_search import READS_MAX
from swarmllm.downloads.source import search_url
from swarmllm.keys import KeyFile
from swarmllm.swarm.membership.network_key import NetworkFile, private_network

pytestmark = pytest.mark.slow

ANNOUNCED = {"announce": ["192.0.2.7"]}
LARGE = {"repo": "org/large", "source": f"hf:org/large:{'long-name-' * 15}Q4_K_M.gguf", "files": []} | {
    "download_bytes": 40e9,
    "fits": True,
    "n_nodes": 3,
    "tokens_per_s": 9.04,
    "problem": "",
}
FOUND = """
const real = window.fetch;
window.asked = [];
window.fetch = (where, init, ...rest) => {
  if (String(where).endsWith("models/search")) return Promise.resolve(new Response(arguments[0]));
  const error = { type: "error", error: { message: "no memory left" } };
  if (String(where).endsWith("/load"))
    return Promise.resolve(new Response(JSON.stringify(error) + "\\n"));
  if (!String(where).endsWith("admin/downloads")) return real(where, init, ...rest);
  asked.push(JSON.parse(init.body));
  const failure = JSON.stringify({ error: { message: "the disk is full" } });
  return Promise.resolve(new Response(failure, { status: 507 }));
};
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A node that holds nothing, before a hub with one model."""
    room = {"interval_s": 0.3}
    with open_shelf() as hub, pytest.MonkeyPatch.context() as environment:
        listing = [{"id": "org/other", "siblings": [{"rfilename": "other-Q8_0.gguf"}]}]
        path = search_url(hub.url, "other", READS_MAX).removeprefix(hub.url)
        hub.files[path] = json.dumps(listing).encode()
        hub.files["/org/other/resolve/main/other-Q8_0.gguf"] = other_guide("A")
        environment.setenv("HF_ENDPOINT", hub.url)
        folder = tmp_path_factory.mktemp("start")
        with running_daemon(folder, "fresh", load=[], network=ANNOUNCED, auto_manage=room) as node:
            yield node


def fits_every_width(page: WebDriver, name: str) -> None:
    for width in (390, 768, 1280):
        size(page, width)
        assert page.execute_script("return document.documentElement.scrollWidth") == width
        picture(page, f"{name}-{width}")


def panels(page: WebDriver) -> list[str]:
    return [
        str(each.get_attribute("aria-label"))
        for each in page.find_elements(By.CSS_SELECTOR, "#view-swarm .panel")
    ]


def test_what_does_not_fit_one_node_is_shared_and_failures_are_said(
    page: WebDriver, fresh: DaemonProcess
) -> None:
    small = LARGE | {
        "repo": "org/none",
        "source": "hf:org/none:x.gguf",
        "fits": False,
        "problem": "too large",
    }
    unknown = LARGE | {"repo": "org/odd", "source": "hf:org/odd:x.gguf", "fits": None, "problem": "no header"}
    go(page, fresh, "models")
    seen(page, "Find a model")
    found = {"models": [LARGE, small, unknown | {"download_bytes": None}]}
    page.execute_script(FOUND, json.dumps(found))
    find(page, "#find-models").send_keys("large", Keys.ENTER)
    seen(page, "yes, over 3 nodes, about 9.0 tokens/s")
    seen(page, "does not fit in this swarm: too large")
    seen(page, "not known whether it fits: no header")
    assert len(page.find_elements(By.CSS_SELECTOR, ".found button")) == 1
    find(page, "[aria-label='Fetch and share org/large']").click()
    seen(page, "the disk is full")
    assert page.execute_script("return asked") == [{"source": LARGE["source"], "share": True}]
    fits_every_width(page, "found-many")
    find(page, "nav a[href='#swarm']").click()
    find(page, "[data-key=guide] button").click()
    seen(page, "no memory left", ".start [role=alert]")


def test_a_new_node_finds_a_model_and_loads_the_guide(page: WebDriver, fresh: DaemonProcess) -> None:
    go(page, fresh)
    seen(page, "Load guide")
    assert panels(page) == ["Start"]
    line = seen_command(page)
    assert line.startswith("swarmllm daemon --bootstrap /ip4/192.0.2.7/tcp/")
    assert line.endswith(fresh.node_id)
    assert "invitation" not in find(page, ".start").text
    fits_every_width(page, "start")

    find(page, "#find-start").send_keys("other", Keys.ENTER)
    seen(page, "yes, on one node, about ")
    assert "other-Q8_0.gguf · 8.7 MB" in find(page, ".found").text
    fits_every_width(page, "found")
    find(page, "[aria-label='Fetch org/other']").click()
    seen(page, "fetched")
    assert find(page, "nav a[aria-current=page]").text == "Models"

    find(page, "nav a[href='#swarm']").click()
    find(page, "[data-key=guide] button").click()
    seen(page, "complete on 1 node")
    assert "Start" not in panels(page)
    assert "Layers" in panels(page)
    find(page, "details[data-key=join] summary").click()
    assert seen_command(page) == line

    body = {"source": "hf:org/other:other-Q8_0.gguf", "share": True}
    fresh.http.post("/api/admin/downloads", json=body).raise_for_status()
    find(page, "nav a[href='#models']").click()
    seen(page, "shared: all layers are held by 1 node")


def seen_command(page: WebDriver) -> str:
    return str(wait_for(lambda: find(page, "code.line").text, DEADLINE_S, "the command"))


def test_an_invitation_is_shown_when_asked_for(page: WebDriver, tmp_path: Path) -> None:
    (tmp_path / "fresh").mkdir(mode=0o700)
    NetworkFile(tmp_path / "fresh").change(lambda known: private_network(bytes(32)))
    _, key = KeyFile(tmp_path / "fresh").create("operator", is_admin=True)
    with running_daemon(tmp_path, "fresh", load=[], network=ANNOUNCED) as node:
        go(page, node)
        find(page, "#login-key").send_keys(key, Keys.ENTER)
        seen(page, "This swarm is private")
        assert "swarmllm-join-" not in page.page_source
        find(page, "[data-key=show]").click()
        assert seen_command(page).startswith("swarmllm join swarmllm-join-")
        seen(page, "as you would a password")
        fits_every_width(page, "invitation")
        find(page, "[data-key=hide]").click()
        wait_for(lambda: "swarmllm-join-" not in page.page_source, DEADLINE_S, "it to be hidden")
        assert "swarmllm-join-" not in node.log.read_text()
        page.execute_script("sessionStorage.clear()")
