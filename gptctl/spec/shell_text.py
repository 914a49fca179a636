"""Read a shell command or script as text: its commands, variables and `#SBATCH` lines.

Nothing is ever executed. What only a shell could know, such as `$(hostname)`, `$1` or a variable
that is not set here, stays a marked part of its word. Loops and conditions are not interpreted:
the commands inside them count once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gptctl.spec.shell_arithmetic import MAX_NUMBER, calculate
from trainer.errors import WRONG_USAGE, UserError

MAX_TEXT = 1 << 16  # characters; no launch script is longer
MAX_EXPANDED = 1 << 20  # characters of all words: variables that double each other must end
# A part that is not known stands in its word as MARK, its number, END. Neither contains blanks, so
# words can be split and joined as usual.
MARK, END = "\ue000", "\ue001"
_MARKED = re.compile(f"{MARK}([0-9]+){END}")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_BRACED = re.compile(r"([A-Za-z_]\w*|[1-9])(\[[@*]\])?(?::?[-=]([^\\$`'\"{}]*))?", re.ASCII)
_ENDS = " \t\r\n;|&()<>"
# Other blanks of Unicode are ordinary characters of a word.
_PLAIN = re.compile(r"""[^ \t\r\n;|&()<>'"\\$`]+""")
_ESCAPED = re.compile(r"\$'(?:[^'\\]|\\.)*'", re.DOTALL)  # $'a\tb'
_QUOTED = re.compile(r"""(?:[^"\\$`]|\\["\\$`\n])+""")
_REDIRECTION = re.compile(r"(?:\d*|&)(<<<|<<-?|>>|>&|<&|[<>])")
_PROCESS = re.compile(r"[<>](?=\()")  # <(command)
_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")", "\n")
_KEYWORDS = frozenset("if then else elif fi for do done while until case esac { } ! time".split())
_DECLARES = frozenset("export declare readonly local typeset".split())


class ShellCommand(NamedTuple):
    """One simple command, with the variables that are exported when it starts."""

    words: tuple[str, ...]
    line: int
    environment: Mapping[str, str]
    output: tuple[str, ...] = ()  # as written: redirections, `| tee log.txt` and a final `&`


class ShellScript(NamedTuple):
    commands: tuple[ShellCommand, ...]
    sbatch: tuple[str, ...]  # the words of all #SBATCH lines
    unknown: tuple[str, ...]  # the parts of words that only a shell could know

    def shown(self, word: str) -> str:
        """The word as the user wrote it."""
        return _shown(word, self.unknown)


def _shown(word: str, unknown: Sequence[str]) -> str:
    return _MARKED.sub(lambda match: unknown[int(match[1])], word)


def is_known(word: str) -> bool:
    return MARK not in word


def read_script(
    text: str,
    variables: Mapping[str, str],
    arguments: Sequence[str] = (),
    unknown: Sequence[str] = (),
) -> ShellScript:
    """Read a text; `variables` are known from outside. Raises UserError if it is not shell text.

    `arguments` are `$1` and so on; `unknown`: the marked parts of all these values.
    """
    if len(text) > MAX_TEXT:
        message = f"the text has more than {MAX_TEXT:,} characters: too long for a launch command"
        raise UserError(message, "give only the launch command", WRONG_USAGE)
    if MARK in text or END in text or "\0" in text:
        raise UserError("the text contains control characters", "delete them", WRONG_USAGE)
    reader = _Reader(text.replace("\r\n", "\n"), variables)
    reader.unknown = list(unknown)
    reader.set_arguments(arguments)
    return _read(reader)


def read_inside(text: str, script: ShellScript) -> ShellScript:
    """Read a word of a script that is a script itself, as in `bash -c TEXT`."""
    reader = _Reader(text, {})
    reader.unknown = list(script.unknown)
    return _read(reader)


def _read(reader: _Reader) -> ShellScript:
    commands = list(reader.commands())
    # What follows a pipe reads the output of the command before it.
    for at in range(len(commands) - 1, 0, -1):
        before = commands[at - 1]
        if before.output[-1:] == ("|",):
            commands[at - 1] = before._replace(output=(*before.output, *commands[at].words))
    return ShellScript(tuple(commands), tuple(reader.sbatch), tuple(reader.unknown))


class _Reader:
    """A cursor over the text. Each method reads one construct and moves behind it."""

    def __init__(self, text: str, variables: Mapping[str, str]) -> None:
        self.text, self.at, self.produced = text, 0, 0
        self.counted, self.lines = 0, 1  # the lines up to a position
        self.variables: dict[str, list[str]] = {name: [value] for name, value in variables.items()}
        self.variables["@"] = []  # the arguments of the script
        self.exported: dict[str, str] = {}
        self.unknown: list[str] = []
        self.sbatch: list[str] = []
        self.output: list[str] = []  # what the current command does with its output
        self.heredocs: list[str] = []  # delimiters of here-documents that begin at the next line

    def commands(self) -> Iterator[ShellCommand]:
        while self.at < len(self.text):
            line, self.output = self.line, []
            words, assigned = self.simple_command()
            while words and words[0] in _KEYWORDS:
                words.pop(0)
            if words and words[0] not in _DECLARES:
                environment = {**self.exported, **assigned} if assigned else self.exported
                self.count(len(assigned) and len(environment), self.at)
                yield ShellCommand(tuple(words), line, environment, tuple(self.output))
                # Behind it, `$1` is another argument.
                if words[0] in ("shift", "getopts"):
                    self.unknown.append("$@")
                    self.set_arguments([f"{MARK}{len(self.unknown) - 1}{END}"])
            else:
                self.assign(words, assigned)

    def set_arguments(self, arguments: Sequence[str]) -> None:
        self.variables["@"] = list(arguments)
        for number in range(1, 10):
            self.variables[str(number)] = list(arguments[number - 1 : number])

    @property
    def line(self) -> int:
        # From the last position on: a text may contain thousands of commands.
        self.lines += self.text.count("\n", self.counted, self.at)
        self.counted = max(self.at, self.counted)
        return self.lines

    def fail(self, what: str, start: int) -> UserError:
        line = self.text.count("\n", 0, start) + 1
        hint = "give one complete command, or a shell script"
        return UserError(f"line {line}: {_shown(what, self.unknown)}", hint, WRONG_USAGE)

    def simple_command(self) -> tuple[list[str], dict[str, str]]:
        """The words up to the next operator, and the variables set before the first word."""
        words: list[str] = []
        assigned: dict[str, str] = {}
        while self.skip_blanks():
            if self.operator():
                break
            if _PROCESS.match(self.text, self.at):
                words.append(self.mark(self.at, self.closing(self.at + 1, "(", ")")))
                continue
            if self.redirection():
                continue
            match = _ASSIGNMENT.match(self.text, self.at)
            is_declared = bool(words) and words[0] in _DECLARES
            if match and (not words or is_declared):
                self.assignment(match, assigned)
            else:
                words += self.word()
        return words, assigned

    def skip_blanks(self) -> bool:
        """Skip blanks, continued lines and comments; False at the end of the text."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                self.comment()
            else:
                return True
        return False

    def comment(self) -> None:
        start, end = self.at, self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end
        line = self.text[start : self.at]
        # sbatch reads these lines literally: variables do not count there.
        if line.startswith("#SBATCH") and (start == 0 or self.text[start - 1] == "\n"):
            try:
                self.sbatch += shlex.split(line[len("#SBATCH") :], comments=True)
            except ValueError:
                raise self.fail("a quote is not closed", start) from None

    def operator(self) -> bool:
        found = next((each for each in _OPERATORS if self.text.startswith(each, self.at)), "")
        # `&>` is a redirection.
        if not found or self.text.startswith("&>", self.at):
            return False
        self.at += len(found)
        if found in ("&", "|"):
            self.output.append(found)
        if found == "\n" and self.heredocs:
            self.skip_heredocs()
        return True

    def redirection(self) -> bool:
        match = _REDIRECTION.match(self.text, self.at)
        if not match:
            return False
        start, self.at = self.at, match.end()
        self.skip_blanks()
        target = "".join(self.word())
        self.output.append(self.text[start : self.at])
        if match[1] in ("<<", "<<-"):
            self.heredocs.append(target)
        return True

    def skip_heredocs(self) -> None:
        for delimiter in self.heredocs:
            start = self.at
            while True:
                if self.at >= len(self.text):
                    raise self.fail(f"the here-document {delimiter} has no end", start)
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, self.at = self.text[self.at : end], end + 1
                if line.strip() == delimiter:
                    break
        self.heredocs = []

    def assignment(self, match: re.Match[str], assigned: dict[str, str]) -> None:
        name, start = match[1], self.at
        self.at = match.end()
        if self.text.startswith("(", self.at):
            value = self.array(start)
        else:
            # Not split: `A=$B` keeps the blanks of B.
            value = [" ".join(self.word(splits=False))] if self.is_word() else [""]
        if match[2]:
            before = self.variables.get(name, [])
            joined = len(value) == 1 and len(before) <= 1
            value = ["".join([*before, *value])] if joined else [*before, *value]
            self.count(sum(map(len, value)), start)
        # Known at once: the next word of the same line may use it.
        self.variables[name] = value
        assigned[name] = " ".join(value)

    def is_word(self) -> bool:
        return self.at < len(self.text) and self.text[self.at] not in _ENDS

    def array(self, start: int) -> list[str]:
        self.at += 1
        items: list[str] = []
        while True:
            while self.skip_blanks() and self.text[self.at] == "\n":
                self.at += 1
            if self.at >= len(self.text):
                raise self.fail("a parenthesis is not closed", start)
            if self.text[self.at] == ")":
                self.at += 1
                return items
            before = self.at
            items += self.word()
            if self.at == before:
                raise self.fail(f"unexpected {self.text[self.at]!r}", before)

    def assign(self, words: list[str], assigned: Mapping[str, str]) -> None:
        """Note which variables are exported: `export A=1`, or `export A` after `A=1`."""
        if words and words[0] == "export":
            named = {name: " ".join(self.variables.get(name, [])) for name in words[1:]}
            changed = {**assigned, **{n: v for n, v in named.items() if n.isidentifier()}}
        else:
            changed = {n: v for n, v in assigned.items() if n in self.exported}
        # Commands share the variables, until these change.
        if changed:
            self.exported = {**self.exported, **changed}
            self.count(len(self.exported), self.at)

    def word(self, splits: bool = True) -> list[str]:
        """The next word; several where a variable contains blanks, none where it is empty."""
        fields = _Fields()
        while self.is_word():
            character = self.text[self.at]
            if match := _PLAIN.match(self.text, self.at):
                fields.add(match[0])
                self.at = match.end()
            elif character == "'":
                fields.add(self.single_quoted())
            elif self.text.startswith('"$@"', self.at):
                self.at += 4
                fields.expand(self.variables["@"], splits=False)
            elif character == '"':
                self.double_quoted(fields)
            elif match := _ESCAPED.match(self.text, self.at):
                fields.add(self.mark(self.at, match.end()))
            elif self.text.startswith('$"', self.at):
                self.at += 1  # a text that may be translated
            elif character == "\\":
                fields.add(self.text[self.at + 1 : self.at + 2].replace("\n", ""))
                self.at += 2
            else:
                fields.expand(self.expansion(), splits)
        return ["".join(parts) for parts in fields.words]

    def single_quoted(self) -> str:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise self.fail("a quote ' is not closed", self.at)
        inner, self.at = self.text[self.at + 1 : end], end + 1
        return inner

    def double_quoted(self, fields: _Fields) -> None:
        start = self.at
        self.at += 1
        fields.add("")
        while self.at < len(self.text):
            if self.text[self.at] == '"':
                self.at += 1
                return
            if match := _QUOTED.match(self.text, self.at):
                # A backslash at the end of a line joins it with the next one.
                fields.add(re.sub(r"\\(.)", r"\1", match[0].replace("\\\n", "")))
                self.at = match.end()
            elif self.text[self.at] in "$`":
                fields.expand(self.expansion(), splits=False)
            else:  # a backslash before a character that needs none
                fields.add("\\")
                self.at += 1
        raise self.fail('a quote " is not closed', start)

    def expansion(self) -> list[str]:
        """The value of `$…` or of backticks; an array has several items."""
        start = self.at
        if self.text[start] == "`":
            end = self.text.find("`", start + 1)
            if end < 0:
                raise self.fail("a backtick is not closed", start)
            return [self.mark(start, end + 1)]
        if self.text.startswith("$((", start):
            return [self.arithmetic(start)]
        if self.text.startswith("$(", start):
            return [self.mark(start, self.closing(start + 1, "(", ")"))]
        if self.text.startswith("${", start):
            return self.braced(start)
        if match := _VARIABLE.match(self.text, start + 1):
            self.at = match.end()
            return self.value_of(match[0], start)
        following = self.text[start + 1 : start + 2]
        if following in ("@", "*"):
            self.at += 2
            return self.variables["@"]
        if following.isdigit():
            self.at += 2
            return self.value_of(following, start)
        if following in tuple("#?$!-"):
            return [self.mark(start, start + 2)]
        self.at += 1
        return ["$"]

    def braced(self, start: int) -> list[str]:
        end = self.closing(start + 1, "{", "}")
        match = _BRACED.fullmatch(self.text, start + 2, end - 1)
        self.at = end
        if not match:
            return [self.mark(start, end)]
        if match[3] is not None and not "".join(self.variables.get(match[1], [])):
            return [match[3]]
        items = self.value_of(match[1], start)
        # `"${A}"` is the first item of an array, `"${A[@]}"` all of them.
        return items if match[2] else items[:1]

    def value_of(self, name: str, start: int) -> list[str]:
        value = self.variables.get(name) or [self.mark(start, self.at)]
        self.count(sum(map(len, value)), start)
        return value

    def count(self, size: int, start: int) -> None:
        """Stop texts that become far longer than they are written."""
        self.produced += size
        if self.produced > MAX_EXPANDED:
            raise self.fail(f"its words have more than {MAX_EXPANDED:,} characters", start)

    def arithmetic(self, start: int) -> str:
        """The value of `$((A * 2))`, if it contains known integers and + - * / only."""
        end = self.closing(start + 1, "(", ")")
        inner = self.text[start + 3 : end - 2]
        names = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
        # A long value is not a number, and would be repeated for each place that uses it.
        value = calculate(names.sub(lambda match: self.text_of(match[1])[:MAX_NUMBER], inner))
        self.at = end
        return self.mark(start, end) if value is None else str(value)

    def text_of(self, name: str) -> str:
        return " ".join(self.variables.get(name, ["?"]))

    def closing(self, start: int, opening: str, closing: str) -> int:
        """The position behind the bracket that closes the one at `start`."""
        depth, quote = 0, ""
        for at in range(start, len(self.text)):
            character = self.text[at]
            if quote:
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            else:
                depth += (character == opening) - (character == closing)
                if depth == 0:
                    return at + 1
        raise self.fail(f"{opening} is not closed", start)

    def mark(self, start: int, end: int) -> str:
        """A part that is not known, as it is written."""
        self.at = end
        self.unknown.append(self.text[start:end])
        return f"{MARK}{len(self.unknown) - 1}{END}"


class _Fields:
    """Collects the words that one word of the text becomes."""

    def __init__(self) -> None:
        self.words: list[list[str]] = []
        self.is_open = False  # whether the last word can still grow

    def add(self, text: str) -> None:
        if not self.is_open:
            self.words.append([])
            self.is_open = True
        self.words[-1].append(text)

    def expand(self, items: list[str], splits: bool) -> None:
        """Add the value of a variable; unquoted, it is split at blanks."""
        for number, item in enumerate(items):
            self.is_open = self.is_open and not number
            if not splits:
                self.add(item)
                continue
            self.is_open = self.is_open and not item[:1].isspace()
            for place, part in enumerate(item.split()):
                self.is_open = self.is_open and not place
                self.add(part)
            self.is_open = self.is_open and not item[-1:].isspace()
