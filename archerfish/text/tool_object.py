"""CallObject: the JSON object of one tool call, read character by character."""

from __future__ import annotations

import json
from typing import Literal, Protocol

Outcome = Literal["going", "done", "broken"]
ARGUMENTS = ("arguments", "parameters")
USUAL_KEYS = ("name", *ARGUMENTS, "type", "id")
SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
CLOSERS = {"{": "}", "[": "]"}


class Sink(Protocol):
    """Receives the calls that are found."""

    def knows(self, name: str) -> bool:
        """Whether there is a tool of this name."""

    def begin_call(self, name: str) -> int:
        """Begin a call, which cannot be undone; gives its index."""

    def add_arguments(self, index: int, text: str) -> None: ...


class CallObject:
    """Reports a call as soon as its name is known and its arguments begin, and passes on the arguments as they come.

    Arguments are not validated, only followed to their end. is_strict: an object with unusual keys is not a call.
    """

    def __init__(self, sink: Sink, *, is_strict: bool, needs_arguments: bool) -> None:
        self.index: int | None = None  # set when the call has been reported
        self._sink, self._is_strict, self._needs_arguments = sink, is_strict, needs_arguments
        self._state: Literal["key", "colon", "value", "in_key", "in_value", "comma"] = "key"
        self._can_close = True
        self._key = ""
        self._text: list[str] = []  # characters of the current key or value
        self._value = ValueScanner()
        self._name: str | None = None
        self._arguments: list[str] | None = None  # arguments that came before the name
        self._is_streaming = False

    def step(self, character: str) -> Outcome:
        """Read one character after the opening brace."""
        if self._state == "in_key":
            return self._in_key(character)
        if self._state == "in_value":
            return self._in_value(character)
        if character.isspace():
            return "going"
        if self._state == "value":
            return self._begin_value(character)
        if self._state == "colon":
            self._state = "value"
            return "going" if character == ":" else "broken"
        if character == "}" and (self._state == "comma" or self._can_close):
            return self._end()
        if self._state == "comma":
            self._state, self._can_close = "key", False
            return "going" if character == "," else "broken"
        self._state, self._text, self._value = "in_key", ['"'], ValueScanner()
        self._value.begin('"')
        return "going" if character == '"' else "broken"

    def _in_key(self, character: str) -> Outcome:
        self._text.append(character)
        if self._value.step(character) == "going":
            return "going"
        key = read_string("".join(self._text))
        if key is None or (self._is_strict and key not in USUAL_KEYS):
            return "broken"
        self._key, self._state = key, "colon"
        return "going"

    def _begin_value(self, character: str) -> Outcome:
        self._value, self._text = ValueScanner(), []
        self._state = "in_value"
        if self._value.begin(character) == "broken":
            return "broken"
        is_first = self._arguments is None and not self._is_streaming
        if self._key in ARGUMENTS and character == "{" and is_first and self.index is None:
            self._arguments, self._is_streaming = [], True
            self._report()
        self._keep(character)
        return "going"

    def _in_value(self, character: str) -> Outcome:
        outcome = self._value.step(character)
        if outcome == "going":
            self._keep(character)
            return "going"
        if outcome == "broken":
            return "broken"
        self._state = "comma"
        if not self._value.is_scalar:
            self._keep(character)
        was_streaming, self._is_streaming = self._is_streaming, False
        if not was_streaming and not self._take_value("".join(self._text)):
            return "broken"
        return self.step(character) if self._value.is_scalar else "going"

    def _keep(self, character: str) -> None:
        if not self._is_streaming:
            self._text.append(character)
        elif self.index is not None:
            self._sink.add_arguments(self.index, character)
        elif self._arguments is not None:
            self._arguments.append(character)

    def _take_value(self, text: str) -> bool:
        """Handle a complete value; false if the object cannot be a call."""
        if self.index is not None:
            return True
        if self._key == "name":
            name = read_string(text)
            if name is None or not self._sink.knows(name):
                return False
            self._name = name
            if self._arguments is not None:
                self._report()
        elif self._key in ARGUMENTS and text != "null":
            inner = read_string(text)  # some models write the arguments as a string of JSON
            if inner is None or not inner.lstrip().startswith("{") or self._arguments is not None:
                return False
            self._arguments = [inner]
            self._report()
        return True

    def _report(self) -> None:
        if self._name is not None and self.index is None:
            self.index = self._sink.begin_call(self._name)
            self._sink.add_arguments(self.index, "".join(self._arguments or ()))

    def _end(self) -> Outcome:
        if self.index is not None:
            return "done"
        if self._name is None or self._needs_arguments:
            return "broken"
        self._arguments = ["{}"]
        self._report()
        return "done"


class ValueScanner:
    """Finds the end of a JSON value. Strings and brackets are tracked; the rest is not validated."""

    def __init__(self) -> None:
        self.is_scalar = False  # a scalar ends before the character that follows it
        self._closers: list[str] = []
        self._is_string = self._is_escaped = False

    def begin(self, character: str) -> Outcome:
        if character in CLOSERS:
            self._closers.append(CLOSERS[character])
        elif character == '"':
            self._is_string = True
        elif character in SCALAR:
            self.is_scalar = True
        else:
            return "broken"
        return "going"

    def step(self, character: str) -> Outcome:
        if self._is_string:
            return self._in_string(character)
        if self.is_scalar:
            return "going" if character in SCALAR else "done"
        if character == '"':
            self._is_string = True
        elif character in CLOSERS:
            self._closers.append(CLOSERS[character])
        elif character in "}]":
            if character != self._closers.pop():
                return "broken"
            return "going" if self._closers else "done"
        elif not (character.isspace() or character in ":," or character in SCALAR):
            return "broken"
        return "going"

    def _in_string(self, character: str) -> Outcome:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_string = False
            return "going" if self._closers else "done"
        return "going"


def read_string(text: str) -> str | None:
    """The value of a JSON string; None if the text is not one."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
