"""A web server for every test here that asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from download_stand import DATA, GUIDE, GUIDE_DATA, MODEL
from faulty_server import FaultyServer, open_shelf


@pytest.fixture
def web_server() -> Iterator[FaultyServer]:
    with open_shelf() as server:
        server.files[MODEL] = DATA
        server.files[GUIDE] = GUIDE_DATA
        yield server
