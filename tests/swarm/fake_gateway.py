"""A router that speaks UPnP, on an address of the loopback network: honest, or hostile in many ways."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
OUTER_IP = "198.51.100.7"
NO_SUCH_ENTRY, CONFLICT, PERMANENT_ONLY = 714, 718, 725


class FakeGateway:
    """`url`: where its HTTP server is."""

    def __init__(self, ip: str) -> None:
        self.ip = ip
        self.outer_ip = OUTER_IP
        self.forwarded: dict[int, tuple[str, int, int]] = {}
        """Outer port -> (ip, port, lease in s)."""
        self.paths: list[str] = []
        """What was asked for by HTTP, in order."""
        self.location = ""
        """Where it says that its description is, if not where it is."""
        self.control_url = "/control"
        self.ports_refused: set[int] = set()
        self.permanent_only = False
        self.describe: Callable[[BaseHTTPRequestHandler], None] = self._describe
        self.url = ""

    def answer_to_search(self) -> bytes:
        location = self.location or f"{self.url}/description.xml"
        return f"HTTP/1.1 200 OK\r\nST: x\r\nLOCATION: {location}\r\n\r\n".encode()

    def _describe(self, request: BaseHTTPRequestHandler) -> None:
        service = f"<serviceType>{SERVICE}</serviceType><controlURL>{self.control_url}</controlURL>"
        answer(
            request, f"<root><device><serviceList><service>{service}</service></serviceList></device></root>"
        )

    def do(self, action: str, body: str) -> tuple[int, dict[str, object]]:
        """(error or 0, what it says)"""

        def given(name: str) -> str:
            found = re.search(rf"<{name}>([^<]*)</{name}>", body)
            return found[1] if found else ""

        if action == "GetExternalIPAddress":
            return 0, {"NewExternalIPAddress": self.outer_ip}
        port = int(given("NewExternalPort"))
        if action == "GetSpecificPortMappingEntry":
            if port not in self.forwarded:
                return NO_SUCH_ENTRY, {}
            ip, inner, lease_s = self.forwarded[port]
            said = {"NewInternalPort": inner, "NewInternalClient": ip, "NewEnabled": 1}
            return 0, {**said, "NewPortMappingDescription": "x", "NewLeaseDuration": lease_s}
        if action == "AddPortMapping":
            lease_s = int(given("NewLeaseDuration"))
            if port in self.ports_refused:
                return CONFLICT, {}
            if self.permanent_only and lease_s:
                return PERMANENT_ONLY, {}
            self.forwarded[port] = given("NewInternalClient"), int(given("NewInternalPort")), lease_s
            return 0, {}
        assert action == "DeletePortMapping", action
        return (0, {}) if self.forwarded.pop(port, None) else (NO_SUCH_ENTRY, {})


def within(tag: str, content: object) -> str:
    return f"<{tag}>{content}</{tag.partition(' ')[0]}>"


def answer(request: BaseHTTPRequestHandler, text: str, status: int = 200) -> None:
    content = text.encode()
    request.send_response(status)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    request.wfile.write(content)


def _handler(gateway: FakeGateway) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            gateway.paths.append(self.path)
            with suppress(OSError):
                gateway.describe(self)

        def do_POST(self) -> None:
            gateway.paths.append(self.path)
            if self.path != "/control":
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            action = self.headers["SOAPAction"].rpartition("#")[2].strip('"')
            error, said = gateway.do(action, body)
            inner = "".join(within(name, value) for name, value in said.items())
            if error:
                inner = within("s:Fault", within("UPnPError", within("errorCode", error)))
            response = within(f'u:{action}Response xmlns:u="{SERVICE}"', inner)
            answer(self, within("s:Envelope", within("s:Body", response)), 500 if error else 200)

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler


@contextmanager
def gateway_at(ip: str, answers_from: str = "") -> Iterator[FakeGateway]:
    """`answers_from`: the address from which searches are answered, if not its own."""
    gateway = FakeGateway(ip)
    http = ThreadingHTTPServer((ip, 0), _handler(gateway))
    http.daemon_threads = True
    gateway.url = f"http://{ip}:{http.server_port}"
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as search,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as answering,
    ):
        search.bind((ip, 1900))
        answering.bind((answers_from or ip, 0))

        def hear() -> None:
            while True:
                datagram, asker = search.recvfrom(2048)
                if not datagram:
                    return
                answering.sendto(gateway.answer_to_search(), asker)

        threads = [threading.Thread(target=http.serve_forever, args=(0.05,)), threading.Thread(target=hear)]
        for thread in threads:
            thread.start()
        try:
            yield gateway
        finally:
            answering.sendto(b"", (ip, 1900))
            http.shutdown()
            for thread in threads:
                thread.join()
            http.server_close()
