"""A real Chromium. Debian's packages `chromium` and `chromium-driver` (see README.md) bring it; continuous
integration installs them and sets SWARMLLM_BROWSER, so that there a missing browser is a failure."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from browser_page import media, size
from selenium import webdriver
from selenium.webdriver.chrome.webdriver import WebDriver

FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars")


@pytest.fixture(scope="session")
def chromium() -> Iterator[WebDriver]:
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        if "SWARMLLM_BROWSER" in os.environ:
            pytest.fail("chromium or chromedriver is missing")
        pytest.skip("Chromium is not installed: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


@pytest.fixture
def page(chromium: WebDriver) -> Iterator[WebDriver]:
    media(chromium, "light")
    size(chromium, 1280)
    yield chromium
    complaints = [entry["message"] for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"]
    chromium.get("about:blank")
    assert [text for text in complaints if "ERR_" not in text and "status of 40" not in text] == []
