"""Value types of config keys: each parses a node of the tree and provides its JSON Schema.

A section is a frozen dataclass whose fields are created by the functions at the end of this file
(`integer`, `choice`, …). This module does not know the keys of any section.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol

from trainer.config.tree import List, Map, Node, Scalar, is_null
from trainer.errors import Rule, closest, one_of
from trainer.named_tuple import NamedTuple

WRONG_TYPE = Rule("C011", "a value must have the type of its key")
OUT_OF_RANGE = Rule("C012", "a number must be within the range of its key")
NOT_A_CHOICE = Rule("C013", "a value must be one of the choices of its key")
NOT_A_NAME = Rule("C014", "a text value must match the format of its key")

MAX_NAMES = 500  # entries of a mapping; a config with more is a mistake
INT_LIMIT = 2**53  # a float represents every integer up to here; no count is larger

_INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[+-]?([0-9]+(_[0-9]+)*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
# The words that PaddleNLP's flags accept, and YAML's on and off.
_TRUE = frozenset(("true", "yes", "y", "t", "on", "1"))
_FALSE = frozenset(("false", "no", "n", "f", "off", "0"))
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BLANKS = re.compile(r"[\n\r\t\v]")


class BadValue(Exception):
    """A node, or an item in it, is invalid for its key: the rule, the problem and the fix."""

    def __init__(self, rule: Rule, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.rule, self.message, self.hint = rule, message, hint
        self.item: Node | None = None  # the invalid item of a list or mapping
        self.key = ""

    def of(self, item: Node, key: str = "") -> BadValue:
        self.item, self.key = self.item or item, key
        return self


class BadItems(Exception):
    """Some items of a list or mapping are invalid: all their problems, and the valid rest."""

    def __init__(self, faults: list[BadValue], rest: Any) -> None:
        super().__init__(len(faults))
        self.faults, self.rest = faults, rest


class Kind(Protocol):
    def read(self, node: Node) -> Any: ...

    def schema(self) -> dict[str, Any]: ...


class Key(NamedTuple):
    """The definition of one key of a section."""

    kind: Kind
    default: Any
    doc: str


def shown(value: Any) -> str:
    """Format a value for a message: quoted if that makes it clearer, and never long."""
    text = value if isinstance(value, str) and value.strip() == value and value else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def scalar_text(node: Node, wanted: str) -> str:
    if isinstance(node, Scalar):
        return node.text
    found = "a mapping" if isinstance(node, Map) else "a list"
    raise BadValue(
        WRONG_TYPE, f"expected {wanted}, found {found}", f"write {wanted} after the colon"
    )


def read_integer(text: str) -> int:
    if _INTEGER.fullmatch(text) and len(text) < 40:
        digits = text.lstrip("+-")
        # YAML 1.1 reads 010 as 8, YAML 1.2 as 10: refuse instead of guessing.
        if len(digits) > 1 and digits[0] == "0":
            raise BadValue(
                WRONG_TYPE, f"{text} may be read as octal", f"write {digits.lstrip('0') or '0'}"
            )
        return int(text)
    if _FLOAT.fullmatch(text) and "e" in text.lower():  # such as max_steps: 5e5
        number = float(text)
        if abs(number) < INT_LIMIT and number == int(number):
            return int(number)
    raise BadValue(
        WRONG_TYPE, f"{shown(text)} is not a whole number", "write digits only, such as 8"
    )


def read_number(text: str) -> float:
    if not _FLOAT.fullmatch(text):
        raise BadValue(
            WRONG_TYPE, f"{shown(text)} is not a number", "write a number such as 0.01 or 1e-5"
        )
    number = float(text.replace("_", ""))
    if not math.isfinite(number):
        raise BadValue(OUT_OF_RANGE, f"{shown(text)} is too large", "write a finite number")
    return number


def check_range(
    number: float,
    low: float | None,
    high: float | None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    # `below` and `above` exclude the bound itself, `low` and `high` include it.
    if below is not None and number >= below:
        raise BadValue(
            OUT_OF_RANGE, f"{number:g} is not below {below:g}", f"use a value below {below:g}"
        )
    if above is not None and number <= above:
        raise BadValue(
            OUT_OF_RANGE, f"{number:g} is not above {above:g}", f"use a value above {above:g}"
        )
    if low is not None and number < low:
        raise BadValue(OUT_OF_RANGE, f"{number} is below {low}", f"use {low} or more")
    if high is not None and number > high:
        raise BadValue(OUT_OF_RANGE, f"{number} is above {high}", f"use {high} or less")


class Integer(NamedTuple):
    low: int | None = None
    high: int = INT_LIMIT

    def read(self, node: Node) -> int:
        number = read_integer(scalar_text(node, "a whole number"))
        check_range(number, self.low, self.high)
        return number

    def schema(self) -> dict[str, Any]:
        low = {"minimum": self.low} if self.low is not None else {}
        high = {"maximum": self.high} if self.high < INT_LIMIT else {}
        return {"type": ["integer", "null"], **low, **high}


class Number(NamedTuple):
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def read(self, node: Node) -> float:
        number = read_number(scalar_text(node, "a number"))
        check_range(number, *self)
        return number

    def schema(self) -> dict[str, Any]:
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        bounds = {name: bound for name, bound in zip(names, self) if bound is not None}
        return {"type": ["number", "null"], **bounds}


class Boolean:
    def read(self, node: Node) -> bool:
        word = scalar_text(node, "true or false").lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
        raise BadValue(
            WRONG_TYPE, f"{shown(word)} is neither true nor false", "write True or False"
        )

    def schema(self) -> dict[str, Any]:
        return {"type": ["boolean", "null"]}


class Choice(NamedTuple):
    options: tuple[str, ...]
    synonyms: Mapping[str, str] = MappingProxyType({})  # other spellings, in lower case

    def read(self, node: Node) -> str:
        word = scalar_text(node, "a word")
        known = {option.lower(): option for option in self.options} | dict(self.synonyms)
        if word.lower() not in known:
            # With few options it is shorter to list them all than to guess one.
            near = closest(word, self.options) if len(self.options) > 4 else []
            hint = f"did you mean {near[0]}?" if near else f"use {one_of(self.options)}"
            raise BadValue(NOT_A_CHOICE, f"unknown value {shown(word)}", hint)
        return known[word.lower()]

    def schema(self) -> dict[str, Any]:
        # An editor reads `true` as a boolean, not as a word.
        booleans = [value for value in (True, False) if str(value).lower() in self.options]
        return {"enum": [*self.options, *self.synonyms, *booleans, None]}


class Text(NamedTuple):
    """One line of text. `pattern` restricts it, and `form` describes the pattern in words."""

    pattern: str = ""
    form: str = ""
    has_lines: bool = False  # more than one is fine
    longest: int = 4096  # characters

    def read(self, node: Node) -> str:
        text = scalar_text(node, "a text")
        if not self.has_lines and _BLANKS.search(text):
            raise BadValue(
                NOT_A_NAME, "line breaks and tabs are not allowed here", "write it on one line"
            )
        if len(text) > self.longest:
            hint = f"use at most {self.longest:,} characters"
            raise BadValue(NOT_A_NAME, f"too long: {len(text):,} characters", hint)
        if self.pattern and not re.fullmatch(self.pattern, text):
            raise BadValue(NOT_A_NAME, f"{shown(text)} is not {self.form}", f"write {self.form}")
        return text

    def schema(self) -> dict[str, Any]:
        pattern = {"pattern": f"^({self.pattern})$"} if self.pattern else {}
        return {"type": ["string", "null"], **pattern}


def _download(url: str) -> str:
    """How to get what a URL names. KEY stands for the key, which only the reader knows."""
    name = url.partition("://")[2].rpartition("/")[2]
    # Anything else could mean something to the shell into which the command is pasted.
    is_plain = re.fullmatch(r"https?://[A-Za-z0-9._~:/@%+=,-]+", url) and re.fullmatch(
        r"[A-Za-z0-9][A-Za-z0-9._-]*", name
    )
    if not is_plain:
        return "write a path on a file system"
    return f"download it: curl -L -o {name} {url}; then set the key, or add -o KEY={name}"


class FilePath:
    """A path on a file system. URLs such as `s3://` are refused: nothing here downloads them."""

    def read(self, node: Node) -> str:
        text = Text().read(node)
        if scheme := _SCHEME.match(text):
            raise BadValue(NOT_A_NAME, f"{scheme[0]} URLs are not supported", _download(text))
        return text

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "null"]}


class OutputPath:
    """A path that is relative to the output folder of the run, not to the current folder."""

    def read(self, node: Node) -> str:
        return FilePath().read(node)

    def schema(self) -> dict[str, Any]:
        return FilePath().schema()


class Integers(NamedTuple):
    """`[949, 50, 1]`, `'949,50,1'` or one number."""

    low: int = 0
    longest: int | None = None

    def read(self, node: Node) -> tuple[int, ...]:
        numbers = Words(Integer(self.low)).read(List(tuple(list_items(node)), node.place))
        if self.longest and len(numbers) > self.longest:
            raise BadValue(
                OUT_OF_RANGE,
                f"too many numbers: {len(numbers)}",
                f"write at most {self.longest}",
            )
        return numbers

    def schema(self) -> dict[str, Any]:
        return {
            "type": ["array", "string", "null"],
            "items": {"type": "integer", "minimum": self.low},
        }


class Words(NamedTuple):
    """A list of texts. A single text is read as a list of one."""

    item: Kind = Text()

    def read(self, node: Node) -> tuple[Any, ...]:
        # Collect all invalid items, so that the user can fix them in one go.
        items, faults = [], []
        for item in node.items if isinstance(node, List) else (node,):
            try:
                items.append(self.item.read(item))
            except BadValue as bad:
                faults.append(bad.of(item))
        if faults:
            raise BadItems(faults, tuple(items))
        return tuple(items)

    def schema(self) -> dict[str, Any]:
        # YAML reads unquoted items as numbers or booleans, which are valid texts here.
        items = (
            {"type": ["string", "number", "boolean"]}
            if isinstance(self.item, Text)
            else self.item.schema()
        )
        return {"type": ["array", "string", "number", "null"], "items": items}


class Choices(NamedTuple):
    """`[a, b]`, `'a,b'` or one word: each of them once, in the order in which they are written."""

    options: tuple[str, ...]
    synonyms: Mapping[str, str] = MappingProxyType({})

    @property
    def _words(self) -> Words:
        return Words(Choice(self.options, self.synonyms))

    def read(self, node: Node) -> tuple[str, ...]:
        words = self._words.read(List(tuple(list_items(node)), node.place))
        return tuple(dict.fromkeys(words))

    def schema(self) -> dict[str, Any]:
        return {**self._words.schema(), "type": ["array", "string", "null"]}


class Names(NamedTuple):
    """A mapping from names to values of one kind, such as environment variables."""

    item: Kind = Text()
    pattern: str = r"[A-Za-z_][A-Za-z0-9_]*"
    form: str = "a name of letters, digits and _"
    is_secret: bool = False  # messages must not show the value

    def read(self, node: Node) -> dict[str, Any]:
        if not isinstance(node, Map):
            raise BadValue(WRONG_TYPE, "expected a mapping", "write it as {NAME: value}")
        if len(node.items) > MAX_NAMES:
            raise BadValue(
                OUT_OF_RANGE, f"too many names: {len(node.items):,}", f"use at most {MAX_NAMES}"
            )
        values, faults = {}, []
        for name, item in node.items.items():
            try:
                if not re.fullmatch(self.pattern, name):
                    raise BadValue(
                        NOT_A_NAME, f"{shown(name)} is not {self.form}", f"use {self.form}"
                    )
                values[name] = (
                    "" if is_null(item) and isinstance(self.item, Text) else self.item.read(item)
                )
            except BadValue as bad:
                faults.append(bad.of(item, name))
        if faults:
            raise BadItems(faults, values)
        return values

    def schema(self) -> dict[str, Any]:
        return {
            "type": ["object", "null"],
            "additionalProperties": {} if isinstance(self.item, Text) else self.item.schema(),
        }


class Section(NamedTuple):
    """A nested section. `shorthand` names the key that a bare value sets (`grad_clip: 1.0`)."""

    cls: type
    shorthand: str = ""

    def read(self, node: Node) -> Any:
        raise AssertionError("sections are read key by key")

    def schema(self) -> dict[str, Any]:
        nested = section_schema(self.cls)
        if self.shorthand:
            return {"anyOf": [nested, keys_of(self.cls)[self.shorthand].kind.schema()]}
        return nested


def list_items(node: Node) -> Sequence[Node]:
    if isinstance(node, List):
        return node.items
    text = scalar_text(node, "a list")  # PaddleNLP writes `split: 949,50,1`
    return [Scalar(part.strip(), node.place, True) for part in text.split(",")]


@cache
def keys_of(cls: type) -> dict[str, Key]:
    return {item.name: item.metadata["key"] for item in fields(cls)}


def section_schema(cls: type) -> dict[str, Any]:
    properties = {}
    for name, key in keys_of(cls).items():
        default = (
            {} if isinstance(key.kind, Section) or key.default is None else {"default": key.default}
        )
        described = {"description": key.doc} if key.doc else {}
        properties[name] = {**described, **key.kind.schema(), **default}
    properties["_inherited_"] = {
        "type": "boolean",
        "description": "False: replace the section of the _base_ file instead of merging",
    }
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def key(kind: Kind, default: Any, doc: str) -> Any:
    # Dataclasses refuse mutable defaults; sections and mappings need a factory instead.
    made: Callable[[], Any] | Any = MISSING
    if isinstance(kind, Section):
        made = kind.cls
    elif isinstance(default, dict):
        made = dict
    metadata = {"key": Key(kind, default, doc)}
    return (
        field(metadata=metadata, default_factory=made)
        if made is not MISSING
        else field(metadata=metadata, default=default)
    )


def integer(default: int | None, doc: str, low: int | None = None, high: int = INT_LIMIT) -> Any:
    return key(Integer(low, high), default, doc)


def number(
    default: float | None,
    doc: str,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    return key(Number(low, high, above, below), default, doc)


def boolean(default: bool, doc: str) -> Any:
    return key(Boolean(), default, doc)


def choice(default: str | None, options: Sequence[str], doc: str, **synonyms: str) -> Any:
    return key(Choice(tuple(options), synonyms), default, doc)


def text(default: str | None, doc: str, pattern: str = "", form: str = "") -> Any:
    return key(Text(pattern, form), default, doc)


def file_path(default: str | None, doc: str) -> Any:
    return key(FilePath(), default, doc)


def section(cls: type, doc: str = "", shorthand: str = "") -> Any:
    return key(Section(cls, shorthand), None, doc)
