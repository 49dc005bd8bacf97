"""Pictures and sounds in the dashboard's chat, in a browser: chosen, dropped, pasted, removed, sent."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_page import find, go, picture, seen, size, texts
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S
from picture_files import data_url, png
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from sound_models import sound_projector, tones, wav_of
from vision_models import projector

from swarmllm.guide import GUIDE_PATH

pytestmark = pytest.mark.slow

KEEP_WHAT_IS_ASKED = """
window.asked = [];
const real = window.fetch;
window.fetch = (where, init, ...rest) => {
  if (String(where).endsWith("chat/completions")) asked.push(JSON.parse(init.body).messages);
  return real(where, init, ...rest);
};
"""
GIVE = """
const [selector, kind, name, type, bytes] = arguments;
const given = new DataTransfer();
given.items.add(new File([new Uint8Array(bytes)], name, { type }));
const init = { bubbles: true, cancelable: true };
const event = kind === "paste" ? new ClipboardEvent(kind, { ...init, clipboardData: given })
  : new DragEvent(kind, { ...init, dataTransfer: given });
document.querySelector(selector).dispatchEvent(event);
return event.defaultPrevented;
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("pictures")
    with running_daemon(folder, "kitchen", load=["guide"], inference={"n_threads": 1, "n_ctx": 1024}) as node:
        wait_for(lambda: node.http.get("/health/ready").status_code == 200, DEADLINE_S, "the guide")
        yield node


def attach(node: DaemonProcess, folder: Path, mmproj: Path | None = None) -> None:
    mmproj = mmproj or projector(folder / "mmproj.gguf", "janus_pro", 256)
    body = {"path": str(GUIDE_PATH), "name": "guide", "mmproj": str(mmproj)}
    assert '"result"' in node.http.post("/api/admin/models", json=body).text


def names(page: WebDriver, where: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.alt)"
    return [str(name) for name in page.execute_script(script, f"{where} .attachments img")]


def give(page: WebDriver, selector: str, kind: str, name: str, data: bytes, media: str = "image/png") -> bool:
    return bool(page.execute_script(GIVE, selector, kind, name, media, list(data)))


def test_pictures_are_chosen_dropped_pasted_taken_away_sent_and_kept(
    page: WebDriver, node: DaemonProcess, tmp_path: Path
) -> None:
    node.http.post("/api/admin/models/guide/unload", json={"layers": "mmproj"}).raise_for_status()
    go(page, node, "chat")
    wait_for(lambda: not find(page, "#model").get_attribute("disabled"), DEADLINE_S, "the model")
    assert not page.find_elements(By.CSS_SELECTOR, "#files")
    assert not give(page, ".composer", "drop", "no.png", png())
    assert not give(page, "#prompt", "paste", "no.png", png())

    attach(node, tmp_path)
    seen(page, "Add picture", ".composer")
    page.execute_script(KEEP_WHAT_IS_ASKED)
    (tmp_path / "chosen.png").write_bytes(png(3, 2))
    find(page, "#files").send_keys(str(tmp_path / "chosen.png"))
    wait_for(lambda: names(page, ".composer") == ["chosen.png"], DEADLINE_S, "the chosen one")
    assert give(page, ".composer", "dragover", "dropped.png", png(4, 2))
    assert give(page, ".composer", "drop", "dropped.png", png(4, 2))
    wait_for(lambda: len(names(page, ".composer")) == 2, DEADLINE_S, "the dropped one")
    assert give(page, "#prompt", "paste", "pasted.png", png(5, 2))
    wait_for(lambda: len(names(page, ".composer")) == 3, DEADLINE_S, "the pasted one")
    shown = "return [...document.querySelectorAll('.composer img')].map((each) => each.naturalWidth)"
    wait_for(lambda: page.execute_script(shown) == [3, 4, 5], DEADLINE_S, "small pictures")
    give(page, ".composer", "drop", "evil.svg", b"<svg/>", "image/svg+xml")
    seen(page, "evil.svg is no PNG")
    give(page, ".composer", "drop", "bad.png", b"no picture")
    seen(page, "bad.png cannot be read")
    find(page, "[aria-label='Remove dropped.png']").click()
    wait_for(lambda: names(page, ".composer") == ["chosen.png", "pasted.png"], DEADLINE_S, "two")

    find(page, "#prompt").send_keys("What is this?", Keys.ENTER)
    wait_for(lambda: names(page, ".turn.user") == ["chosen.png", "pasted.png"], DEADLINE_S, "the question")
    assert names(page, ".composer") == []
    seen(page, "tokens/s", ".way")
    seen(page, "looked at 2 pictures", ".way .looked")
    assert texts(page, ".way .looked .cut") == ["kitchen"]
    images = [{"type": "image_url", "image_url": {"url": data_url(png(width, 2))}} for width in (3, 5)]
    question: dict[str, Any] = {
        "role": "user",
        "content": [*images, {"type": "text", "text": "What is this?"}],
    }
    assert page.execute_script("return asked") == [[question]]

    page.refresh()
    find(page, ".kept summary").click()
    find(page, ".kept li button").click()
    wait_for(lambda: names(page, ".turn.user") == ["chosen.png", "pasted.png"], DEADLINE_S, "them again")
    page.execute_script(KEEP_WHAT_IS_ASKED)
    wait_for(lambda: not find(page, "#model").get_attribute("disabled"), DEADLINE_S, "the model")
    find(page, "#prompt").send_keys("And now?", Keys.ENTER)
    wait_for(lambda: page.execute_script("return asked.length") == 1, DEADLINE_S, "the second question")
    (messages,) = page.execute_script("return asked")
    assert messages[0] == question
    assert messages[-1] == {"role": "user", "content": "And now?"}
    wait_for(lambda: len(page.find_elements(By.CSS_SELECTOR, ".way")) == 2, DEADLINE_S, "the answer")
    # Nobody looked again.
    assert len(texts(page, ".way .looked")) == 1


def test_a_sound_is_chosen_played_sent_and_kept(page: WebDriver, node: DaemonProcess, tmp_path: Path) -> None:
    attach(node, tmp_path, sound_projector(tmp_path / "ears.gguf", "ultravox", 256))
    go(page, node, "chat")
    seen(page, "Add sound", ".composer")
    page.execute_script(KEEP_WHAT_IS_ASKED)
    give(page, ".composer", "drop", "chosen.png", png())
    seen(page, "chosen.png is no WAV, MP3 or FLAC.")
    hum = tmp_path / "hum.wav"
    hum.write_bytes(wav_of(tones(2.0)))
    find(page, "#files").send_keys(str(hum))
    seen(page, "hum.wav", ".composer .attachments")
    find(page, ".composer audio[aria-label='hum.wav']")
    page.execute_script("document.querySelector('.composer audio').preload = 'auto'")
    length_s = "return document.querySelector('.composer audio').duration"
    wait_for(lambda: page.execute_script(length_s) == 2.0, DEADLINE_S, "the sound to be playable")

    find(page, "#prompt").send_keys("What is this?", Keys.ENTER)
    seen(page, "heard 1 sound", ".way .looked")
    audio = {"data": base64.b64encode(hum.read_bytes()).decode(), "format": "wav"}
    content = [{"type": "input_audio", "input_audio": audio}, {"type": "text", "text": "What is this?"}]
    assert page.execute_script("return asked") == [[{"role": "user", "content": content}]]
    assert not page.find_elements(By.CSS_SELECTOR, ".composer audio")

    page.refresh()
    find(page, ".kept summary").click()
    find(page, ".kept li button").click()
    find(page, ".turn.user audio[aria-label='hum.wav']")


def test_the_strips_show_who_has_the_projector(page: WebDriver, node: DaemonProcess, tmp_path: Path) -> None:
    with running_daemon(tmp_path, "study", load=[], bootstrap=node.addresses) as study:
        body = {"layers": "mmproj"}
        # The same one, as the guide of a fresh node has its own.
        for each in (node, study):
            attach(each, tmp_path)
            assert '"result"' in each.http.post("/api/admin/models/guide/load", json=body).text
        go(page, node)
        wait_for(lambda: len(texts(page, ".strips .mmproj.has")) == 2, DEADLINE_S, "two cells")
        assert texts(page, ".strip .label .cut") == ["kitchen", "study"]
        labels = [
            each.get_attribute("aria-label") for each in page.find_elements(By.CSS_SELECTOR, ".mmproj.has")
        ]
        assert labels == ["kitchen has the projector", "study has the projector"]
        tracks = [each.get_attribute("aria-label") for each in page.find_elements(By.CSS_SELECTOR, ".track")]
        assert tracks == ["kitchen holds layers 0–11", "study holds no layers", "Every layer is held"]
        for width in (1280, 360):
            size(page, width)
            assert page.execute_script("return document.documentElement.scrollWidth") <= width
            picture(page, f"projectors-{width}")
        assert '"unloaded"' in study.http.post("/api/admin/models/guide/unload", json=body).text
        wait_for(lambda: len(texts(page, ".strips .mmproj.has")) == 1, DEADLINE_S, "one cell")
        wait_for(lambda: texts(page, ".strip .label .cut") == ["kitchen"], DEADLINE_S, "one strip")
