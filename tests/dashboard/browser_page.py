"""A page of the dashboard in tests: how it is shown, where it goes, what is on it, a picture of it."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess, wait_for
from deadlines import DEADLINE_S
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

SCREENSHOTS = os.environ.get("SWARMLLM_SCREENSHOTS")
"""A folder to keep the pictures in, for people to look at."""


def media(page: WebDriver, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def size(page: WebDriver, width: int, height: int = 900) -> None:
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
    )


def go(page: WebDriver, node: DaemonProcess, view: str = "swarm") -> None:
    page.get("about:blank")
    page.get(f"{node.url}/#{view}")


def seen(page: WebDriver, text: str, where: str = "main") -> Any:
    def shown() -> bool:
        try:
            return any(text in element.text for element in page.find_elements(By.CSS_SELECTOR, where))
        except StaleElementReferenceException:
            return False  # It was drawn anew between the two.

    return wait_for(shown, DEADLINE_S, f"{text!r} in {where}")


def texts(page: WebDriver, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
    return list(page.execute_script(script, selector))


def find(page: WebDriver, selector: str) -> WebElement:
    return wait_for(lambda: page.find_elements(By.CSS_SELECTOR, selector), DEADLINE_S, selector)[0]  # type: ignore[no-any-return]


def picture(page: WebDriver, name: str) -> None:
    if SCREENSHOTS:
        shot = page.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": False})
        Path(SCREENSHOTS, f"{name}.png").write_bytes(base64.b64decode(shot["data"]))
