"""Shell text that is read and never run. The oracle of words is bash itself, for text without side effects."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gptctl.spec.shell_text import MAX_TEXT, ShellScript, read_script
from trainer.errors import UserError

PRINT = f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"


def words_of(script: ShellScript) -> list[list[str]]:
    return [[script.shown(word) for word in command.words] for command in script.commands]


@pytest.mark.parametrize(
    "text",
    [
        r"P a 'b c' \"d\" 'e'\''f' g\ h i\
j",
        'A="x  y"; P $A "$A" pre$A"post" ${A} "${A}" \'$A\' "\\$A" "a\\b"',
        "A=1 B=$((A * 3 + 10 / 2 - 1)); P $B $(( B*B )) ${NOT_SET:-default} ${A:-other}",
        'A=(one "two three" # a comment\n  four)\nA+=(five)\nP "${A[@]}" ${A[@]} "${A}" pre"${A[@]}"post',
        'A="--x 1"\nA+=" --y 2"\nA="$A --z \\\n 3"\nP $A',
        "cat > /dev/null <<END\nP \"wrong\n$NOTHING `\nEND\nP right 2>&1 > /dev/stdout",
        "if true; then P in-if; fi && for i in 1; do P in-for; done",
        "export A=1 B='2 3' && P $A \"$B\" # P comment",
        "P '' \"\" a'' ''b x=y '#' a#b",
        "P a;P b|cat; P c && P d; (P f); ! P g",
        "E=; P $E\"$E\" $E",
        'P "$@" a $@ $*',
        'A=7; P x\u3000A a\u00a0b "$Aé" $"c d" $(((1-4)/2)) $(( (1 - 4) / (1 - 3) ))',
    ],
)  # fmt: skip
def test_words_are_those_of_bash(text: str) -> None:
    ours = [command[1:] for command in words_of(read_script(text, {})) if command[0] == "P"]
    lines = subprocess.run(["bash", "-c", f'P() {{ {PRINT} "$@"; }}\n{text}'], capture_output=True, text=True).stdout
    theirs = [json.loads(line) for line in lines.splitlines()]
    assert ours == theirs


def test_what_only_a_shell_knows_is_marked_and_shown_as_written() -> None:
    text = 'H=$(hostname | head -n "1)")\nP `date` $1 $? $UNSET ${A%.*} x-$H:29 "a $(b \'c)\' d) e" $((H * 2))'
    script = read_script(text, {})
    (words,) = words_of(script)
    assert words[1:5] == ["`date`", "$1", "$?", "$UNSET"]
    assert words[5:] == ["${A%.*}", 'x-$(hostname | head -n "1)"):29', "a $(b 'c)' d) e", "$((H * 2))"]


def test_parts_of_words_that_bash_would_compute() -> None:
    text = "P $'a\\tb' <(date) --x 1 $((" + "B+" * 20_000 + "1))"
    (words,) = words_of(read_script(f"B={'1' * 20_000}\n{text}", {}))
    assert words[1:5] == ["$'a\\tb'", "<(date)", "--x", "1"]
    assert len(words[5]) == 40_006


def test_sbatch_takes_its_lines_literally() -> None:
    """sbatch expands nothing; quotes and comments count."""
    script = read_script("#SBATCH --output=$(date).log -J `x`$A # $B\nP $C", {})
    assert script.sbatch == ("--output=$(date).log", "-J", "`x`$A")
    assert words_of(script) == [["P", "$C"]]


def test_sbatch_lines_and_exports() -> None:
    text = (
        "#!/bin/bash\n#SBATCH -N 2 --comment='a b' # why\n #SBATCH -x no\nexport A=1\nB=2\nexport B\nC=3 P x\nB=4\nP y"
    )
    script = read_script(text, {})
    assert script.sbatch == ("-N", "2", "--comment=a b")
    first, second = script.commands
    assert dict(first.environment) == {"A": "1", "B": "2", "C": "3"}
    assert (dict(second.environment), second.line) == ({"A": "1", "B": "4"}, 9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n\n#SBATCH -J 'x\n", "line 3: a quote is not closed"),
        ("a\nP 'b", "line 2: a quote ' is not closed"),
        ('P "b', 'line 1: a quote " is not closed'),
        ("P `b", "line 1: a backtick is not closed"),
        ("P $(b", "line 1: ( is not closed"),
        ("P ${b", "line 1: { is not closed"),
        ("A=(b", "line 1: a parenthesis is not closed"),
        ("A=(b;", "line 1: unexpected ';'"),
        ("cat <<E\nx", "line 2: the here-document E has no end"),
        ("P \0", "the text contains control characters"),
        ("P \ue0005\ue001", "the text contains control characters"),
        ("x" * (MAX_TEXT + 1), "the text has more than 65,536 characters"),
        ("A=0123456789abcdef\n" + "A=$A$A\n" * 60, "line 17: its words have more than 1,048,576 characters"),
        (f"A={'x' * 1000}\nP {'$A' * 20_000}", "line 2: its words have more than 1,048,576 characters"),
        # Each of these small texts would need gigabytes.
        (f"A={'1' * 30_000}\nB={'$A' * 30}\nexport B\n" + "B+=x;P\n" * 3000, "line 4: its words have more"),
        ("".join(f"export A{n}=1;P\n" for n in range(3500)), "line 1448: its words have more"),
    ],
)
def test_text_that_is_no_script(text: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        read_script(text, {})
    assert error.value.message.startswith(said)
    assert error.value.hint


@pytest.mark.parametrize("part", ["a;", "a'b'", "$a", "#\n", "$(", "&>", "<<<"])
def test_reading_takes_linear_time(part: str) -> None:
    """As much of one thing as fits: quadratic time would be minutes, and the test would not end."""
    for text in (part * (MAX_TEXT // len(part)), f'P "{part * 1000}"'):
        try:
            assert read_script(text, {}) is not None
        except UserError as error:
            assert "is not closed" in error.message
