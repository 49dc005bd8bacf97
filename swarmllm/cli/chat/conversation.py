"""A conversation with a model as `swarmllm chat` keeps it, and as a JSON file."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from swarmllm.cli.chat.stream import Finished, Message, stream_chat
from swarmllm.cli.client import Client, CommandFailed, WrongUsage
from swarmllm.cli.display import safe
from swarmllm.errors import InvalidRequest, reason_of
from swarmllm.pictures import MEDIA_TYPES, parse_picture
from swarmllm.sounds import parse_sound
from swarmllm_proto.ipc import SoundKind
from swarmllm_proto.limits import PICTURE_BYTES_MAX, SOUND_BYTES_MAX

Parsed = TypeVar("Parsed")
FILE_MAX_BYTES: Final = 64 * 2**20


class SavedText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class SavedUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    """A data URL."""


class SavedPicture(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"
):
    image_url: SavedUrl


class SavedAudio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    data: str
    """Base64."""
    format: Literal["wav", "mp3", "flac"]


class SavedSound(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_audio"
):
    input_audio: SavedAudio


class SavedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str | tuple[SavedText | SavedPicture | SavedSound, ...]


class SavedConversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a file that `/save` writes."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    sampling: dict[str, float | int]
    messages: tuple[SavedMessage, ...]


def _whole(least: float, most: float) -> Callable[[str], int | float]:
    def read(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise ValueError
        return value

    return read


def _number(least: float, most: float) -> Callable[[str], int | float]:
    def read(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and least <= value <= most):
            raise ValueError
        return value

    return read


@dataclass(frozen=True, slots=True)
class Parameter:
    meaning: str
    read: Callable[[str], int | float]
    """Raises ValueError."""


PARAMETERS: Final[Mapping[str, Parameter]] = {
    "temperature": Parameter("a number from 0 to 2", _number(0, 2)),
    "max_tokens": Parameter("a whole number from 1 on", _whole(1, math.inf)),
    "seed": Parameter("a whole number", _whole(-(2**63), 2**63 - 1)),
    "top_p": Parameter("a number from 0 to 1", _number(0, 1)),
    "top_k": Parameter("a whole number from 0 on", _whole(0, 2**31 - 1)),
    "min_p": Parameter("a number from 0 to 1", _number(0, 1)),
}


def parameter_named(name: str) -> Parameter:
    """Raises CommandFailed."""
    if (parameter := PARAMETERS.get(name)) is None:
        raise CommandFailed(f"There is no parameter {name[:40]}, only {', '.join(PARAMETERS)}.")
    return parameter


def read_parameter(name: str, text: str) -> int | float:
    """Raises CommandFailed."""
    parameter = parameter_named(name)
    try:
        return parameter.read(text)
    except ValueError:
        raise CommandFailed(f"{name} is {parameter.meaning}.") from None


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A picture that goes with a question."""

    name: str
    url: str
    """A data URL."""
    width: int
    height: int

    @property
    def size(self) -> str:
        return f"{self.width} x {self.height}"

    @property
    def part(self) -> dict[str, Any]:
        """Of a message."""
        return {"type": "image_url", "image_url": {"url": self.url}}


@dataclass(frozen=True, slots=True)
class SoundFile:
    """A sound that goes with a question."""

    name: str
    data: str
    """Base64."""
    kind: SoundKind
    seconds: float | None
    """None: its file does not say it."""

    @property
    def size(self) -> str:
        return self.kind if self.seconds is None else f"{self.seconds:.1f} s"

    @property
    def part(self) -> dict[str, Any]:
        """Of a message."""
        return {"type": "input_audio", "input_audio": {"data": self.data, "format": self.kind}}


def read_media(images: Sequence[Path], sounds: Sequence[Path]) -> list[PictureFile | SoundFile]:
    """Raises CommandFailed where one of them is none that a node would take."""
    return [*map(read_picture, images), *map(read_sound, sounds)]


def read_picture(path: Path) -> PictureFile:
    """Raises CommandFailed where there is none that a node would take."""
    picture = _parsed(path, parse_picture, PICTURE_BYTES_MAX)
    data = base64.b64encode(picture.data).decode()
    url = f"data:{MEDIA_TYPES[picture.kind]};base64,{data}"
    return PictureFile(path.name, url, picture.width, picture.height)


def read_sound(path: Path) -> SoundFile:
    """Raises CommandFailed where there is none that a node would take."""
    sound = _parsed(path, parse_sound, SOUND_BYTES_MAX)
    return SoundFile(path.name, base64.b64encode(sound.data).decode(), sound.kind, sound.seconds)


def _parsed(path: Path, parse: Callable[[bytes, str], Parsed], bytes_max: int) -> Parsed:
    try:
        with path.open("rb") as file:
            return parse(file.read(bytes_max + 1), str(path))
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read: {reason_of(error)}.") from None
    except InvalidRequest as error:
        raise CommandFailed(f"{path}: {error.message}") from None


def question_message(text: str, media: Sequence[PictureFile | SoundFile] = ()) -> Message:
    """Pictures and sounds first, as models were trained."""
    shown = [each.part for each in media]
    return {"role": "user", "content": [*shown, {"type": "text", "text": text}] if shown else text}


@dataclass
class Conversation:
    """What has been said, and the settings under which the model answers."""

    client: Client
    model: str
    sampling: dict[str, object]
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    last: Finished | None = None

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.last = None

    def instruct(self, system: str) -> None:
        """From the next question on. "": without a system message."""
        self.system = system or None
        history = [message for message in self.messages if message["role"] != "system"]
        self.messages = ([{"role": "system", "content": system}] if system else []) + history

    def ask(
        self,
        question: str | Message,
        on_reasoning: Callable[[str], None] = lambda piece: None,
    ) -> Iterator[str]:
        """Pieces of the answer; `last` tells how it went. An answer that was stopped or failed counts as
        far as it got."""
        self.messages.append(question_message(question) if isinstance(question, str) else question)
        pieces: list[str] = []
        stream = stream_chat(self.client, self.model, self.messages, on_reasoning, **self.sampling)
        try:
            with closing(stream):
                for part in stream:
                    if isinstance(part, Finished):
                        self.last = part
                    else:
                        pieces.append(part)
                        yield part
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def take_back(self) -> Message | None:
        """The last question, which is forgotten with its answer. None: there is none."""
        asked = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            return None
        question = self.messages[asked[-1]]
        del self.messages[asked[-1] :]
        return question

    def save(self, path: Path, *, may_replace: bool) -> None:
        """Readable for its owner alone. Raises CommandFailed."""
        sampling = {name: value for name, value in self.sampling.items() if isinstance(value, int | float)}
        saved = SavedConversation(
            model=self.model,
            sampling=sampling,
            messages=tuple(msgspec.convert(self.messages, list[SavedMessage])),
        )
        content = msgspec.json.format(msgspec.json.encode(saved)) + b"\n"
        target = path.with_name(f"{path.name}.new") if may_replace else path
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            target.replace(path)
        except FileExistsError:
            raise CommandFailed(f"{target} exists already; choose another name.") from None
        except OSError as error:
            raise CommandFailed(f"{path} cannot be written: {reason_of(error)}.") from None

    def load(self, path: Path) -> None:
        """In place of what has been said. Raises CommandFailed, and changes nothing then."""
        try:
            with path.open("rb") as file:
                content = file.read(FILE_MAX_BYTES + 1)
        except OSError as error:
            raise CommandFailed(f"{path} cannot be read: {reason_of(error)}.") from None
        if len(content) > FILE_MAX_BYTES:
            raise CommandFailed(f"{path} is larger than {FILE_MAX_BYTES // 2**20} MiB.")
        try:
            saved = msgspec.json.decode(content, type=SavedConversation)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CommandFailed(f"{path} is no saved conversation: {error}") from None
        for name, value in saved.sampling.items():
            read_parameter(name, str(value))
        self.model = saved.model
        self.sampling = dict(saved.sampling)
        self.messages = list(msgspec.to_builtins(saved.messages))
        system = next((each.content for each in saved.messages if each.role == "system"), None)
        self.system = system if isinstance(system, str) else None
        self.last = None


def choose_model(client: Client, wanted: str | None) -> str:
    """The model that was asked for, or the only one, or the bundled one."""
    if wanted:
        return wanted
    names = [str(model["id"]) for model in client.get("/v1/models")["data"]]
    if not names:
        raise CommandFailed("The node knows no model yet: swarmllm models add PATH.gguf")
    if len(names) > 1 and "guide" not in names:
        raise WrongUsage(f"Which model? --model with one of: {', '.join(map(safe, names))}")
    return "guide" if "guide" in names else names[0]
