"""Parses YAML (or JSON) into a tree that records the file and line of every value.

Scalars stay text: the key decides what `1e-5`, `no` or `12:00:00` means, not YAML 1.1. This module
knows no keys, and it is the only one that imports yaml.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from typing import Any, NoReturn, TypeAlias

from trainer.config.full_width import with_plain_marks
from trainer.errors import WRONG_USAGE, Finding, Place, Rule, UserError
from trainer.named_tuple import NamedTuple

# Far above any real config. They keep a wrong or hostile file from using up time and memory.
MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 20_000

SYNTAX = Rule("C001", "a config must be YAML or JSON with a mapping at its root")
TWICE = Rule("C002", "a key must be written only once")
TAG = Rule("C003", "a config must not contain YAML tags, merge keys or keys that are not words")
TOO_DEEP = Rule("C004", f"a config must not be nested more than {MAX_DEPTH} levels deep")
TOO_MUCH = Rule(
    "C005",
    f"a config must not exceed {MAX_BYTES >> 20} MiB and {MAX_NODES:,} values, aliases expanded",
)
ENCODING = Rule("C006", "a config must be UTF-8 text without control characters")
EMPTY = Rule("C007", "a config must set at least one key")

# C0 (except tab and line ends), DEL, C1, line and paragraph separators, direction overrides, BOM,
# surrogates: a config needs none of them, and each can mislead a reader or a shell.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f"
    "\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)


class Scalar(NamedTuple):
    text: str
    place: Place
    quoted: bool = False

    @property
    def is_empty(self) -> bool:
        """No value given: it is derived, or the default applies."""
        return not self.text or (
            not self.quoted and self.text in ("~", "null", "Null", "NULL", "None")
        )


class List(NamedTuple):
    items: tuple[Node, ...]
    place: Place


class Map(NamedTuple):
    items: dict[str, Node]
    place: Place


Node: TypeAlias = "Scalar | List | Map"


def is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.is_empty


def plain(node: Node) -> Any:
    """The tree as plain Python values, for messages."""
    if isinstance(node, Map):
        return {key: plain(item) for key, item in node.items.items()}
    if isinstance(node, List):
        return [plain(item) for item in node.items]
    return None if node.is_empty else node.text


class ReadFile(NamedTuple):
    """A file as it was when it was read. Owner and mode are those of the file with these bytes."""

    path: str
    data: bytes  # one byte more than allowed, if the file is too large
    uid: int = 0
    gid: int = 0
    mode: int = stat.S_IFREG


def read_file(
    path: str | os.PathLike[str],
    found: list[Finding],
    files: list[ReadFile] | None = None,
    what: str = "run config",
) -> Map | None:
    """Parse a file. Raises UserError if it cannot be read; mistakes in it are added to `found`.

    What was read is added to `files`. `what` is the kind of file, for messages.
    """
    file = read_once(path)
    if files is not None:
        files.append(file)
    text = _decode(file.data, str(path), found, what)
    return None if text is None else parse(text, str(path), found)


def read_once(path: str | os.PathLike[str]) -> ReadFile:
    """Read a file, and who may change it. Raises UserError if it cannot be read."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            facts = os.fstat(file.fileno())
            # <(command) and /dev/stdin are pipes without a name. Anything else may block forever.
            is_pipe = stat.S_ISFIFO(facts.st_mode) and os.fspath(path).startswith("/dev/")
            if not (is_pipe or stat.S_ISREG(facts.st_mode)):
                message = f"{path} is not a regular file, and may block forever"
                raise UserError(message, "use a file, or <(command)", WRONG_USAGE)
            os.set_blocking(file.fileno(), True)  # the writer of <(command) may be slow
            data = file.read(MAX_BYTES + 1)  # one byte more shows that the file is too large
        return ReadFile(os.fspath(path), data, facts.st_uid, facts.st_gid, facts.st_mode)
    except IsADirectoryError:
        raise UserError(f"{path} is a folder", "name a file inside it", WRONG_USAGE) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot read {path}: {reason}", "check the path and its permissions", WRONG_USAGE
        ) from None


def _open_at_once(path: str, flags: int) -> int:
    # Opening a named pipe without a writer would block forever; /dev/fd/N comes from <(command).
    return os.open(path, flags | os.O_NONBLOCK)


def _decode(data: bytes, file: str, found: list[Finding], what: str) -> str | None:
    if len(data) > MAX_BYTES:
        found.append(
            TOO_MUCH.found(
                "",
                None,
                f"the file is larger than {MAX_BYTES >> 20} MiB",
                f"check that this is a {what}",
                Place(file),
            )
        )
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = Place(file, data.count(b"\n", 0, error.start) + 1)
        found.append(
            ENCODING.found(
                "",
                None,
                f"byte 0x{data[error.start]:02x} is not UTF-8",
                "save the file as UTF-8",
                place,
            )
        )
        return None
    if bad := _CONTROL.search(text):  # before the parser, which would accept some of them
        place = Place(file, text.count("\n", 0, bad.start()) + 1)
        found.append(
            ENCODING.found("", None, f"control character {_code_point(bad[0])}", "delete it", place)
        )
        return None
    return text


def checked_text(text: str, place: Place, found: list[Finding]) -> str:
    """The text. Control characters are reported and replaced."""
    bad = _CONTROL.search(text)
    if not bad:
        return text
    found.append(
        ENCODING.found(
            "", None, f"control character {_code_point(bad[0])} in a value", "delete it", place
        )
    )
    return _CONTROL.sub("?", text)


def _code_point(character: str) -> str:
    return f"U+{ord(character):04X}"


def parse(text: str, file: str, found: list[Finding]) -> Map | None:
    """The root mapping of a document, or None. Every mistake is added to `found`."""
    faults = len(found)
    node = parse_value(text, file, found)
    if len(found) > faults and (node is None or not isinstance(node, Map) or not node.items):
        return None  # already reported
    if node is None or is_null(node) or (isinstance(node, Map) and not node.items):
        found.append(
            EMPTY.found(
                "", None, "the file contains no keys", "write at least one key", Place(file)
            )
        )
        return None
    if not isinstance(node, Map):
        kind = "a list" if isinstance(node, List) else "a single value"
        hint = "start with a section such as `Distributed:`"
        found.append(SYNTAX.found("", None, f"the root is {kind}, not a mapping", hint, node.place))
        return None
    return node


def parse_value(text: str, file: str, found: list[Finding], first_line: int = 1) -> Node | None:
    """Parse any value. `first_line` 0: the text came from a flag, so report no line numbers."""
    import yaml

    # Only the loader's event parser runs, without constructor and resolver: no object is created.
    loader = getattr(yaml, "CLoader", yaml.Loader)
    builder = _Builder(file, found, first_line)
    text = with_plain_marks(text, file, found, first_line)
    try:
        return builder.document(yaml.parse(text, Loader=loader))
    except _Stop:
        return None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # An error at the end of the file is reported one line after the last.
        line = min(mark.line if mark else 0, max(0, len(text.splitlines()) - 1))
        problem = " ".join(str(part) for part in (error.context, error.problem) if part)
        hint = _syntax_hint(text, line) if first_line else "check brackets and quotes"
        found.append(
            SYNTAX.found(
                "", None, problem, hint, Place(file, line + first_line if first_line else 0)
            )
        )
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # yaml's pure-Python scanner raises ValueError for some inputs.
        found.append(
            SYNTAX.found(
                "", None, " ".join(str(error).split()), "check the syntax of the file", Place(file)
            )
        )
    return None


def _syntax_hint(text: str, line: int) -> str:
    lines = text.splitlines()
    near = lines[max(0, line - 1) : line + 1]
    if any("\t" in row[: len(row) - len(row.lstrip())] for row in near):
        return "indent with spaces, not tabs"
    return "check indentation, colons and quotes near this line"


class _Stop(Exception):
    """Stop parsing: the rest of the document cannot be used."""


class _Builder:
    """Builds the tree from parser events.

    It keeps its own stack, so that deep nesting cannot exhaust Python's.
    """

    def __init__(self, file: str, found: list[Finding], first_line: int) -> None:
        self.file, self.found, self.first_line = file, found, first_line
        self.anchors: dict[str, _Size] = {}
        self.count = 0

    def document(self, events: Iterator[Any]) -> Node | None:
        root: Node | None = None
        stack: list[_Open] = []
        documents = 0
        for event in events:
            kind = type(event).__name__
            if kind == "DocumentStartEvent":
                documents += 1
                if documents > 1:
                    self.stop(
                        SYNTAX,
                        event,
                        "a second YAML document starts here",
                        "keep one document per file",
                    )
            elif kind in ("MappingStartEvent", "SequenceStartEvent"):
                self.check_tag(event)
                stack.append(
                    _Open(event, self.place(event), self.count, kind == "MappingStartEvent")
                )
                if len(stack) > MAX_DEPTH:
                    self.stop(
                        TOO_DEEP, event, f"nested more than {MAX_DEPTH} levels deep", "flatten it"
                    )
            elif kind in ("MappingEndEvent", "SequenceEndEvent"):
                closed = stack.pop()
                size = _Size(closed.node(), self.count - closed.count + 1, closed.height)
                root = self.add(stack, size, closed.event)
            elif kind == "ScalarEvent":
                root = self.add(stack, _Size(self.scalar(event), 1, 0), event)
            elif kind == "AliasEvent":
                root = self.alias(stack, event)
        return root

    def add(self, stack: list[_Open], size: _Size, event: Any) -> Node:
        self.count += 1
        if self.count > MAX_NODES:
            self.stop(
                TOO_MUCH,
                event,
                f"more than {MAX_NODES:,} values, aliases expanded",
                "split the config with _base_",
            )
        if event.anchor:
            self.anchors[event.anchor] = size
        if stack:
            parent = stack[-1]
            parent.height = max(parent.height, size.height + 1)
            if parent.is_map and parent.key is None:
                self.open_key(
                    parent, size.node, event, [outer.key for outer in stack[:-1] if outer.key]
                )
            else:
                parent.put(size.node)
        return size.node

    def open_key(self, parent: _Open, node: Node, event: Any, parents: list[str]) -> None:
        if not isinstance(node, Scalar) or node.text == "<<":
            message = (
                "merge keys (`<<`) are not supported"
                if isinstance(node, Scalar)
                else "a key must be a plain word"
            )
            self.found.append(
                TAG.found("", None, message, "share values through _base_", self.place(event))
            )
            parent.key, parent.ignored = "", True  # skip its value, and report other mistakes too
            return
        parent.key, parent.key_place, parent.ignored = node.text, node.place, False
        if node.text in parent.items:
            first = parent.items[node.text].place
            message = (
                f"written twice, first on line {first.line}" if first.line else "written twice"
            )
            path = ".".join([*parents, node.text])
            self.found.append(TWICE.found(path, None, message, "delete one of the two", node.place))
            parent.ignored = True

    def scalar(self, event: Any) -> Scalar:
        self.check_tag(event)
        place = self.place(event)
        return Scalar(checked_text(event.value, place, self.found), place, bool(event.style))

    def alias(self, stack: list[_Open], event: Any) -> Node:
        size = self.anchors.get(event.anchor)
        if size is None:
            self.stop(
                SYNTAX,
                event,
                f"alias *{event.anchor} is not defined before this line",
                f"define it first with &{event.anchor}",
            )
        # An alias adds the depth of its anchor at this point.
        if len(stack) + size.height > MAX_DEPTH:
            self.stop(
                TOO_DEEP,
                event,
                f"nested more than {MAX_DEPTH} levels deep, aliases expanded",
                "flatten it",
            )
        self.count += size.values  # or ten lines of nested aliases would make a billion values
        return self.add(stack, size, event)

    def check_tag(self, event: Any) -> None:
        # A tag such as !!python/object asks a YAML loader to create objects.
        if event.tag is not None:
            self.found.append(
                TAG.found("", None, f"YAML tag {event.tag}", "delete the tag", self.place(event))
            )

    def place(self, event: Any) -> Place:
        return Place(self.file, event.start_mark.line + self.first_line if self.first_line else 0)

    def stop(self, rule: Rule, event: Any, message: str, hint: str) -> NoReturn:
        self.found.append(rule.found("", None, message, hint, self.place(event)))
        raise _Stop


class _Size(NamedTuple):
    """A finished node and its size. Each alias counts in full, so a small file cannot grow huge."""

    node: Node
    values: int
    height: int


class _Open:
    """A mapping or list that is still being read."""

    def __init__(self, event: Any, place: Place, count: int, is_map: bool) -> None:
        self.event, self.place, self.count, self.is_map = event, place, count, is_map
        self.items: dict[str, Node] = {}
        self.sequence: list[Node] = []
        self.height = 0
        self.key: str | None = None
        self.key_place = place
        self.ignored = False

    def put(self, node: Node) -> None:
        if not self.is_map:
            self.sequence.append(node)
            return
        if not self.ignored:
            assert self.key is not None
            self.items[self.key] = moved(node, self.key_place)
        self.key = None

    def node(self) -> Node:
        return (
            Map(self.items, self.place) if self.is_map else List(tuple(self.sequence), self.place)
        )


def moved(node: Node, place: Place) -> Node:
    """A copy with another place: values are reported at the line of their key."""
    if isinstance(node, Scalar):
        return Scalar(node.text, place, node.quoted)
    return Map(node.items, place) if isinstance(node, Map) else List(node.items, place)
