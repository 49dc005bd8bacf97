"""Formats the lines of the daemon's log and writes them to stderr and a file.

Text and JSON come from the same `LogFields` of a record. The event is the line's template in one word, for
example `request_failed_here` for "request %s failed here: %s": all lines that one place writes have the same,
whatever they are about. Libraries may put anything into a template, so their event is their logger's name.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final, Literal

from swarmllm.config import Config
from swarmllm.errors import ConfigError
from swarmllm.log_filter import REQUEST_ID, TEMPLATE, LogLimitFilter
from swarmllm.sd_notify import JournalFormatter, is_journal

FILE_BYTES: Final = 10_000_000
OLD_FILES: Final = 2
EVENT_MAX: Final = 60
ID_END: Final = 8
_NODE_ID = re.compile(r"\b12D3KooW[1-9A-HJ-NP-Za-km-z]{44}\b")
_MODEL_ID = re.compile(r"\b[0-9a-f]{64}\b")
_REQUEST = re.compile(r"\breq_[0-9a-f]{24}(\.[0-9a-f]{8})?\b")
_PLACEHOLDER = re.compile(r"%[#0\- +]*[\d*]*(\.\d+)?[a-zA-Z%]")
_NOT_WORD = re.compile(r"[^a-z0-9]+")
_OURS = ("swarmllm", "swarmllm_workers")


@dataclass(frozen=True, slots=True)
class LogFields:
    time: str
    """ISO 8601, in UTC, to the millisecond."""
    level: str
    logger: str
    event: str
    message: str
    request_id: str
    nodes: tuple[str, ...]
    """Ids of the nodes that the message names."""
    models: tuple[str, ...]
    """Ids of the models that it names."""


class LineFormatter(logging.Formatter):
    def __init__(self, style: Literal["text", "json", "journal"], names: LineFormatter | None = None) -> None:
        """The style "journal" has neither time nor level, which the journal keeps itself. `names`: the
        formatter that is told nicknames, if it is another one."""
        super().__init__()
        self._form = style
        self._names = names or self
        self.nickname_of: Callable[[str], str] = lambda node_id: ""
        self.model_name_of: Callable[[str], str] = lambda model_id: ""
        """Both are set once nodes and models are known. Called in whichever thread writes a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = fields_of(record, self._names.nickname_of, self._names.model_name_of)
        traceback = super().formatException(record.exc_info) if record.exc_info else ""
        if self._form == "json":
            told = {
                "time": fields.time,
                "level": fields.level.lower(),
                "logger": fields.logger,
                "event": fields.event,
                "message": fields.message,
                "request_id": fields.request_id,
                "nodes": list(fields.nodes),
                "models": list(fields.models),
                "traceback": traceback,
            }
            return json.dumps({name: value for name, value in told.items() if value})
        text = fields.message
        if fields.request_id and fields.request_id not in text:
            text = f"{text} [{fields.request_id}]"
        if traceback:
            text = f"{text}\n{traceback}"
        if self._form == "journal":
            return f"{fields.logger}: {text}"
        return f"{fields.time} {fields.level:<7} {fields.logger}: {text}"


def fields_of(
    record: logging.LogRecord, nickname_of: Callable[[str], str], model_name_of: Callable[[str], str]
) -> LogFields:
    """Only what `model_name_of` knows is a model: other hashes are as long as their ids."""
    try:
        message = record.getMessage()
    except Exception as error:
        message = f"{record.msg!r} cannot be written: {type(error).__name__}"
    nodes = tuple(dict.fromkeys(_NODE_ID.findall(message)))
    names = {each: model_name_of(each) for each in dict.fromkeys(_MODEL_ID.findall(message))}
    models = tuple(each for each, name in names.items() if name)
    found = _REQUEST.search(message)
    message = _MODEL_ID.sub(lambda match: names.get(match[0]) or match[0], message)
    for node_id in nodes:
        message = _with_name(message, node_id, nickname_of)
    written = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return LogFields(
        time=written.replace("+00:00", "Z"),
        level=record.levelname,
        logger=record.name,
        event=event_of(record),
        message=message,
        request_id=found[0] if found else REQUEST_ID.get(),
        nodes=nodes,
        models=models,
    )


def event_of(record: logging.LogRecord) -> str:
    """At most EVENT_MAX characters of [a-z0-9_]; a logger's name for lines of libraries."""
    if record.name.partition(".")[0] not in _OURS:
        return record.name
    template = getattr(record, TEMPLATE, record.msg)
    if not isinstance(template, str):
        return type(template).__name__.lower()
    words = _NOT_WORD.sub("_", _PLACEHOLDER.sub(" ", template).lower()).strip("_")
    return words[:EVENT_MAX].rstrip("_") or record.module


def _with_name(message: str, node_id: str, nickname_of: Callable[[str], str]) -> str:
    """The end of an id tells nodes apart; nicknames are their owners' choice, and may be anybody's."""
    end = f"…{node_id[-ID_END:]}"
    nickname = "".join(c if c.isprintable() else "?" for c in nickname_of(node_id))
    if not nickname:
        return message.replace(node_id, end)
    named = f"{nickname} ({end})"
    # Texts of errors, which clients read too, name both already.
    return message.replace(f"{nickname} ({node_id})", named).replace(node_id, named)


class LogFile(RotatingFileHandler):
    """For this user alone. A disk that is full costs lines of the file, not the node."""

    def __init__(self, file: Path) -> None:
        """Raises OSError."""
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(file, maxBytes=FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        def private(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        return open(self.baseFilename, self.mode, encoding="utf-8", opener=private)  # type: ignore[return-value]

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """The same line goes to stderr."""


class _Outputs(logging.Handler):
    """One handler for several, so that the limit sees each line once."""

    def __init__(self, outputs: Sequence[logging.Handler]) -> None:
        super().__init__()
        self._outputs = outputs

    def emit(self, record: logging.LogRecord) -> None:
        for output in self._outputs:
            output.handle(record)

    def close(self) -> None:
        for output in self._outputs:
            output.close()
        super().close()


def set_up_logging(config: Config) -> LineFormatter:
    """Everything to stderr and to the log's file, within the log limit. Libraries are heard only when they
    warn.

    Returns what can be told the nicknames of nodes. Raises ConfigError for a `log.file` that cannot be
    written.
    """
    in_journal = is_journal(os.environ)
    style = config.log.format
    lines = LineFormatter("journal" if in_journal and style == "text" else style)
    stderr = logging.StreamHandler(sys.stderr)
    stderr.setFormatter(JournalFormatter(lines) if in_journal else lines)
    outputs: list[logging.Handler] = [stderr]
    file = config.log_file
    if file is not None and (config.log.file or not in_journal):
        try:
            outputs.append(LogFile(file))
        except OSError as error:
            # What is wrong with the data folder itself is said where that is opened.
            if config.log.file:
                raise ConfigError(f"log.file {file}: {error.strerror}", field="log.file") from error
        else:
            outputs[-1].setFormatter(lines if style == "json" else LineFormatter("text", lines))
    handler = _Outputs(outputs)
    handler.addFilter(LogLimitFilter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("swarmllm").setLevel(config.node.log_level.upper())
    return lines
