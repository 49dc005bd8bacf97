"""Translates templates of Ollama's Modelfiles, which are Go's, to Jinja, as far as their meaning is certain.

Translated are text, `.System`, `.Prompt`, `.Response`, `if`, `else` and `end`, and in `range .Messages` also
`.Role`, `.Content` and `eq .Role "..."`, with and without `-` at the braces. A template without
`.Messages` is Ollama's older form: it is applied to each turn (system, prompt, response), and to the last
one up to `.Response`. Everything else (variables, functions, tools) is refused by name. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarmllm.errors import InvalidRequest

MAX_DEPTH = 32
_ACTION = re.compile(r"\{\{(-\s)?\s*(/\*.*?\*/|.*?)\s*(\s-)?\}\}", re.DOTALL)
_EQUAL = re.compile(r'eq\s+\.Role\s+"([a-z]{1,20})"', re.ASCII)
_TURN = {".System": "system", ".Prompt": "prompt", ".Response": "response"}
_IN_MESSAGES = {".Role": "message.role", ".Content": "message.content"}


@dataclass(frozen=True, slots=True)
class _Text:
    text: str


@dataclass(frozen=True, slots=True)
class _Value:
    """A value, as a Jinja expression."""

    name: str


@dataclass(frozen=True, slots=True)
class _If:
    branches: tuple[tuple[str, tuple[_Node, ...]], ...]
    """(condition in Jinja, what follows); "": else."""


@dataclass(frozen=True, slots=True)
class _Range:
    body: tuple[_Node, ...]


_Node = _Text | _Value | _If | _Range


def translate(template: str) -> str:
    """Raises InvalidRequest naming what cannot be translated."""
    parser = _Parser(list(_tokens(template)))
    nodes = parser.nodes(0)
    response = _Value("response")
    before = nodes[: nodes.index(response)] if response in nodes else nodes
    after = nodes[nodes.index(response) + 1 :] if response in nodes else ()
    if "response" in _names(before + after):
        raise _bad("{{ .Response }} twice, or inside of an if")
    if any(isinstance(node, _Range) for node in nodes):
        if "prompt" in _names(nodes):
            raise _bad("{{ .Prompt }} beside .Messages")
        return _SYSTEM + _written(before)
    return (
        "{%- macro turn(system, prompt, response, is_last) -%}"
        + _written(before)
        + "{%- if not is_last -%}{{ response }}"
        + _written(after)
        + "{%- endif -%}{%- endmacro -%}"
        + _TURNS
    )


_SYSTEM = (
    "{%- set now = namespace(system='') -%}{%- for message in messages if message.role == 'system' -%}"
    "{%- set now.system = (now.system + '\\n\\n' if now.system else '') + message.content -%}{%- endfor -%}"
    "{%- set system = now.system -%}"
)
_TURNS = (
    "{%- set now = namespace(system='', prompt='', response='') -%}{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}"
    "{%- if now.prompt or now.response -%}{{ turn(now.system, now.prompt, now.response, false) }}"
    "{%- set now.prompt = '' -%}{%- set now.response = '' -%}{%- endif -%}"
    "{%- set now.system = message.content -%}"
    "{%- elif message.role == 'user' -%}"
    "{%- if now.response -%}{{ turn(now.system, now.prompt, now.response, false) }}"
    "{%- set now.system = '' -%}{%- set now.response = '' -%}{%- endif -%}"
    "{%- set now.prompt = message.content -%}"
    "{%- elif message.role == 'assistant' -%}{%- set now.response = message.content or '' -%}"
    "{%- else -%}{{ raise_exception('this template has no word for role ' + message.role) }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if now.response -%}{{ turn(now.system, now.prompt, now.response, false) }}"
    "{%- set now.system = '' -%}{%- set now.prompt = '' -%}{%- endif -%}"
    "{{ turn(now.system, now.prompt, '', true) }}"
)


class _Parser:
    def __init__(self, tokens: Sequence[_Text | str]) -> None:
        self._tokens = tokens
        self._at = 0

    def nodes(self, depth: int, *, in_range: bool = False) -> tuple[_Node, ...]:
        """Until the `else` or `end` that belongs to an opener, which stays."""
        if depth > MAX_DEPTH:
            raise _bad("ifs within more than 32 others")
        found: list[_Node] = []
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if isinstance(token, _Text):
                found.append(token)
            elif token == "end" or token == "else" or token.startswith("else "):
                if depth == 0:
                    raise _bad(f"{{{{ {token} }}}} without an if")
                return tuple(found)
            elif token.startswith("if "):
                found.append(self._if(token, depth, in_range=in_range))
            elif token == "range .Messages" and not in_range and depth == 0:
                self._at += 1
                body = self.nodes(depth + 1, in_range=True)
                self._expect_end()
                found.append(_Range(body))
            else:
                found.append(_Value(self._name(token, in_range=in_range)))
            self._at += 1
        if depth:
            raise _bad("an if or range without {{ end }}")
        return tuple(found)

    def _if(self, token: str, depth: int, *, in_range: bool) -> _If:
        branches: list[tuple[str, tuple[_Node, ...]]] = []
        condition = self._condition(token.removeprefix("if ").strip(), in_range=in_range)
        while True:
            self._at += 1
            branches.append((condition, self.nodes(depth + 1, in_range=in_range)))
            closer = self._tokens[self._at]
            assert isinstance(closer, str)
            if closer == "end":
                return _If(tuple(branches))
            if not branches[-1][0]:
                raise _bad("{{ else }} twice")
            rest = closer.removeprefix("else").strip()
            if rest and not rest.startswith("if "):
                raise _bad(f"{{{{ {closer} }}}}")
            condition = self._condition(rest.removeprefix("if ").strip(), in_range=in_range) if rest else ""

    def _expect_end(self) -> None:
        if self._tokens[self._at] != "end":
            raise _bad(f"{{{{ {self._tokens[self._at]} }}}} in a range")

    def _condition(self, said: str, *, in_range: bool) -> str:
        equal = _EQUAL.fullmatch(said)
        if equal and in_range:
            return f"message.role == '{equal[1]}'"
        return self._name(said, in_range=in_range)

    def _name(self, said: str, *, in_range: bool) -> str:
        if in_range and said in _IN_MESSAGES:
            return _IN_MESSAGES[said]
        if in_range and said == "$.System":
            return "system"
        if not in_range and said in _TURN:
            return _TURN[said]
        raise _bad(f"{{{{ {said[:60]} }}}}")


def _tokens(template: str) -> Iterator[_Text | str]:
    """Texts, and what stands in braces, without comments."""
    at, trims = 0, False
    for match in _ACTION.finditer(template):
        text = template[at : match.start()]
        text = text.lstrip() if trims else text
        text = text.rstrip() if match[1] else text
        if text:
            yield _Text(text)
        if not match[2].startswith("/*"):
            yield re.sub(r"\s+", " ", match[2])
        at, trims = match.end(), bool(match[3])
    rest = template[at:].lstrip() if trims else template[at:]
    if "{{" in rest:
        raise _bad("{{ without }}")
    if rest:
        yield _Text(rest)


def _written(nodes: Sequence[_Node]) -> str:
    return "".join(map(_write, nodes))


def _write(node: _Node) -> str:
    if isinstance(node, _Text):
        return f'{{{{ "{_escaped(node.text)}" }}}}'
    if isinstance(node, _Value):
        return f"{{{{ {node.name} }}}}"
    if isinstance(node, _Range):
        return f"{{%- for message in messages -%}}{_written(node.body)}{{%- endfor -%}}"
    words = []
    for place, (condition, body) in enumerate(node.branches):
        word = f"if {condition}" if place == 0 else f"elif {condition}" if condition else "else"
        words.append(f"{{%- {word} -%}}{_written(body)}")
    return "".join(words) + "{%- endif -%}"


def _escaped(text: str) -> str:
    for raw, written in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(raw, written)
    return text


def _names(nodes: Sequence[_Node]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, _Value):
            names.add(node.name)
        elif isinstance(node, _Range):
            names |= _names(node.body)
        elif isinstance(node, _If):
            for condition, body in node.branches:
                names |= {condition} | _names(body)
    return names


def _bad(what: str) -> InvalidRequest:
    return InvalidRequest(f"TEMPLATE: {what} is not translated here", field="modelfile")
