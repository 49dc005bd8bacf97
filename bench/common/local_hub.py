"""A hub that serves the files of a folder as Hugging Face does, from the disk and in ranges.

    python -m bench.common.local_hub FOLDER [--port 0]

Prints its address. `hf:ORG/REPO:FILE` with HF_ENDPOINT set to that address is a file of the folder: the
repository redirects to it and says its SHA-256 on the way. `/sent` says how many bytes of files it has given.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

REPOSITORY = "ORG/REPO"
_RANGE = re.compile(r"bytes=(\d+)-(\d*)", re.ASCII)
_PORTION_BYTES = 2**20


class _Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(("127.0.0.1", port), _HubHandler)
        self.files = {path.name: path for path in sorted(folder.glob("*.gguf"))}
        self.sha256s = {name: _sha256(path) for name, path in self.files.items()}
        self.n_sent_bytes = 0
        self.counting = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that leave are no failure."""


class _HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Hub

    def do_GET(self) -> None:
        path, hub = unquote(self.path), self.server
        name = path.rpartition("/")[2]
        if path == "/sent":
            self._answer(200, json.dumps({"n_bytes": hub.n_sent_bytes}).encode())
        elif path == f"/api/models/{REPOSITORY}":
            self._answer(200, json.dumps({"siblings": [{"rfilename": name} for name in hub.files]}).encode())
        elif path == f"/{REPOSITORY}/resolve/main/{name}" and name in hub.files:
            told = {"Location": f"/files/{name}", "X-Linked-Etag": f'"{hub.sha256s[name]}"'}
            self._answer(302, b"", **told)
        elif path == f"/files/{name}" and name in hub.files:
            self._give(hub.files[name])
        else:
            self._answer(404, b"there is no such file")

    def _give(self, path: Path) -> None:
        size_bytes, status = path.stat().st_size, 200
        start, end = 0, size_bytes
        headers = {"ETag": f'"{path.name}"'}
        if match := _RANGE.fullmatch(self.headers.get("Range", "")):
            start, end = int(match[1]), min(int(match[2] or size_bytes) + 1, size_bytes)
            status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{size_bytes}"
        self.send_response(status)
        for header, value in {"Content-Length": str(end - start), **headers}.items():
            self.send_header(header, value)
        self.end_headers()
        with path.open("rb") as file, contextlib.suppress(ConnectionError):
            while start < end:
                n = os.sendfile(
                    self.connection.fileno(), file.fileno(), start, min(_PORTION_BYTES, end - start)
                )
                if not n:
                    break
                start += n
                with self.server.counting:
                    self.server.n_sent_bytes += n

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0, help="0: any  [default: 0]")
    arguments = parser.parse_args()
    hub = _Hub(arguments.folder, arguments.port)
    print(json.dumps({"url": f"http://127.0.0.1:{hub.server_port}"}), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        hub.serve_forever()


if __name__ == "__main__":
    main()
