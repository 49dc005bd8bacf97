"""The HTTP client of the commands; every failure becomes a sentence and an exit code.

Synchronous httpx: a command does one thing at a time. The environment's proxies are not used; a node's
endpoint is on the loopback interface, where a proxy can only be in the way.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlsplit

import click
import httpx

from swarmllm.errors import InvalidRequest, SwarmLLMError, reason_of

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_REFUSED = 4
EXIT_OUTDATED = 5
EXIT_INTERRUPTED = 130


class CommandFailed(click.ClickException):
    """The daemon, or something it relies on, could not do what was asked."""

    exit_code = EXIT_FAILED


class WrongUsage(CommandFailed):
    """The command line is wrong."""

    exit_code = EXIT_USAGE


class DaemonUnreachable(CommandFailed):
    """Nobody answers at the API address."""

    exit_code = EXIT_UNREACHABLE


class ApiRefused(CommandFailed):
    """The daemon answered that the request is wrong: an unknown model, layers it cannot cut, too many
    requests."""

    exit_code = EXIT_REFUSED


@contextmanager
def failures_explained() -> Iterator[None]:
    """What fails in this process, without a daemon, as a command says it."""
    try:
        yield
    except InvalidRequest as error:
        raise ApiRefused(error.message) from None
    except SwarmLLMError as error:
        raise CommandFailed(error.message) from None


ANSWER_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
LINE_MAX_BYTES = 1 << 24
"""A section of the event stream of a node in a large swarm is one line."""
KEY_VARIABLE = "SWARMLLM_KEY"
REFUSALS = frozenset(
    {"invalid_request_error", "authentication_error", "permission_error", "rate_limit_error"}
)


class Client:
    def __init__(self, api_url: str) -> None:
        self.api_url = api_url.rstrip("/")
        if not is_http_url(self.api_url):
            raise WrongUsage(f"{api_url!r} is not an address like http://127.0.0.1:8800.")
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        # Reading the certificates takes longer than most answers; they are of no use for plain http.
        verify = _certificates() if self.api_url.startswith("https:") else False
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(
            base_url=self.api_url, timeout=timeout, trust_env=False, verify=verify, headers=headers
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str) -> Any:
        """The JSON body of a GET."""
        with self._failures_explained():
            return self._checked(self._http.get(path))

    def get_any(self, path: str) -> Any:
        """The JSON body of a GET, whatever its status: for /health/ready, where 503 is an answer too."""
        with self._failures_explained():
            return self.parse(self._http.get(path).text)

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        with self._failures_explained():
            return self._checked(self._http.post(path, json=body))

    def delete(self, path: str) -> Any:
        with self._failures_explained():
            return self._checked(self._http.delete(path))

    def post_lines(self, path: str, body: Mapping[str, object]) -> Iterator[str]:
        """The lines of the answer as they arrive; an answer may take as long as it likes between two of
        them."""
        return self._lines("POST", path, None, json=body)

    def events(self, path: str) -> Iterator[tuple[str, Any]]:
        """(name, data) of server-sent events, for as long as they come. A sign of life is expected now and
        then."""
        name = ""
        for line in self._lines("GET", path, ANSWER_TIMEOUT_S):
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, self.parse(line.removeprefix("data: "))

    def post_chunks(self, path: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer as they arrive; an error among them is raised, and so is an end
        that nobody announced."""
        for line in self.post_lines(path, body):
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:"):
                continue
            if data == "[DONE]":
                return
            chunk = self.parse(data)
            if "error" in chunk:
                raise failure(chunk["error"])
            yield chunk
        raise CommandFailed("The answer broke off before its end.")

    def _lines(self, method: str, path: str, timeout_s: float | None, **content: Any) -> Iterator[str]:
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        with (
            self._failures_explained(),
            self._http.stream(method, path, timeout=timeout, **content) as answer,
        ):
            if answer.status_code >= 400:
                answer.read()
                self._checked(answer)
            for line in answer.iter_lines():
                if len(line) > LINE_MAX_BYTES:
                    raise CommandFailed(f"{self.api_url} sent a line of {len(line)} characters")
                if line:
                    yield line

    def post_progress(self, path: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """The objects of an NDJSON answer; an `error` among them is raised."""
        for line in self.post_lines(path, body):
            event = self.parse(line)
            if "error" in event:
                raise failure(event["error"])
            yield event

    def parse(self, text: str) -> Any:
        """The value of a piece of JSON from the daemon."""
        try:
            return json.loads(text)
        except ValueError:
            raise CommandFailed(f"What answers at {self.api_url} is not a SwarmLLM node.") from None

    def _checked(self, answer: httpx.Response) -> Any:
        body = self.parse(answer.text)
        if answer.status_code < 400:
            return body
        if isinstance(body, dict) and "error" in body:
            raise failure(body["error"])
        raise CommandFailed(f"{self.api_url} answered with status {answer.status_code}.")

    @contextmanager
    def _failures_explained(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if (distrust := _distrust(error)) is not None:
                raise DaemonUnreachable(
                    f"The certificate of {self.api_url} is not trusted here ({distrust}). Where you made it "
                    "yourself, name the file of its authority in SSL_CERT_FILE."
                ) from None
            raise DaemonUnreachable(
                f"No daemon answers at {self.api_url}: start one with `swarmllm daemon`, or name another "
                "with --api."
            ) from None
        except httpx.TimeoutException:
            raise CommandFailed(f"{self.api_url} did not answer within {ANSWER_TIMEOUT_S:.0f} s.") from None
        except httpx.HTTPError as error:
            raise CommandFailed(f"The connection to {self.api_url} broke: {reason_of(error)}") from None


def _distrust(error: BaseException | None) -> str | None:
    """What is wrong with the certificate, if that is what an error comes from."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message
        error = error.__cause__ or error.__context__
    return None


def _certificates() -> ssl.SSLContext:
    """The system's, or those of SSL_CERT_FILE: that of a node that has made its own, for example."""
    try:
        return ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE"))
    except OSError as error:
        raise WrongUsage(f"Cannot read SSL_CERT_FILE: {error.strerror or error}") from None


def path_segment(name: str) -> str:
    """`name`, of a model or a node, for the path of a request. Raises ApiRefused for what cannot be a name:
    servers take a slash in it for one of the path, whether or not it is quoted."""
    if not name or "/" in name:
        raise ApiRefused(f"There is nothing called {name[:80]!r}: a name is not empty and has no '/'.")
    return quote(name, safe="")


def is_http_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False


def failure(error: Any) -> CommandFailed:
    """The exception for an OpenAI error object, which may come as a body or in the middle of a stream."""
    if not isinstance(error, dict):
        return CommandFailed(str(error))
    message = str(error.get("message", error))
    if error.get("type") == "authentication_error":
        message += f" Put it into {KEY_VARIABLE}."
    return ApiRefused(message) if error.get("type") in REFUSALS else CommandFailed(message)
