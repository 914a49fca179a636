"""Any text is answered: with findings or with a config, never with a traceback, never late.

The oracle is the absence of surprises: only UserError may leave the reader, within two seconds, and what is accepted loads
back from its own resolved JSON.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptctl.spec.check import check_config
from gptctl.spec.resources import named_files
from gptctl.spec.summary import as_json, resolved_yaml
from trainer.config import Override, load
from trainer.config.read import paths_of
from trainer.config.resolve import sections
from trainer.errors import UserError

TEMPLATES = [file.read_text(encoding="utf-8") for file in named_files("templates/configs").values()]
KEYS = sorted({path for name, cls in sections().items() for path in paths_of(cls, name)})
LATE = 2.0

ODD = [
    "",
    "~",
    "null",
    "0",
    "-1",
    "1",
    "2",
    "8",
    "1.5",
    "1e-5",
    "true",
    "no",
    "nan",
    ".inf",
    "12:00:00",
    "010",
    "0x10",
    "9" * 400,
]
ODD += [
    "'8 '",
    '"\\x07"',
    "[1, 2",
    "[949, 50, 1]",
    "{a: 1}",
    "&a [1]",
    "*a",
    "!!str 1",
    "- 1",
    "gpt2-en",
    "345M",
    "GPT",
    "s3://b/k",
]
ODD += ["2:4", "'949,50,1'", "None", "|\n  a\n  b", "cpu", "a=b", "数据", "\u202e", "?", ":", "#", "%", "@", "`", "\t"]

odd_values = st.sampled_from(ODD) | st.text(max_size=12) | st.integers().map(str) | st.floats().map(str)
known_keys = st.sampled_from(KEYS)


@st.composite
def nested(draw: st.DrawFn) -> str:
    """A config of known keys with odd values, as flow or block mappings."""
    lines = []
    for path in draw(st.lists(known_keys, max_size=6)):
        names, value = path.split("."), draw(odd_values)
        if draw(st.booleans()):
            lines.append(
                f"{names[0]}: " + "".join(f"{{{name}: " for name in names[1:]) + value + "}" * (len(names) - 1)
            )
        else:
            lines += [f"{'  ' * depth}{name}:" for depth, name in enumerate(names)]
            lines[-1] += f" {value}"
    return "\n".join(lines) + "\n"


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A real config with some of its text replaced."""
    text = draw(st.sampled_from(TEMPLATES))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        length = draw(st.integers(0, 12))
        text = text[:start] + draw(odd_values) + text[start + length :]
    return text


texts = st.text(max_size=200) | nested() | damaged()


def examine(file: Path, data: bytes) -> bool:
    """Checks one text; True when it was accepted."""
    file.write_bytes(data)
    start = time.perf_counter()
    try:
        checked = check_config(file, [])
    except UserError as error:
        assert error.message
        return False
    finally:
        assert time.perf_counter() - start < LATE
    for finding in checked.findings:
        assert finding.code
        assert finding.message
        assert "\x1b" not in str(finding)
    as_json(checked, with_config=True)
    if checked.is_valid:
        assert checked.resolved is not None
        again = file.with_suffix(".json")
        again.write_text(checked.resolved.as_json(), encoding="utf-8")
        assert load(again, machines=checked.machines).run == checked.resolved.run
        again.write_text(resolved_yaml(checked), encoding="utf-8")
        assert load(again, machines=checked.machines).run == checked.resolved.run
    return checked.is_valid


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(texts)
def test_any_text_is_answered(tmp_path: Path, text: str) -> None:
    examine(tmp_path / "run.yaml", text.encode("utf-8", "surrogatepass"))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes_are_answered(tmp_path: Path, data: bytes) -> None:
    examine(tmp_path / "run.yaml", data)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(known_keys | st.text(min_size=1, max_size=8), odd_values), max_size=3))
def test_any_override_is_answered(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("Global: {seed: 1}\n")
    try:
        check_config(file, [Override.parse(f"{key}={value}") for key, value in pairs])
    except UserError as error:
        assert error.exit_code == 2


@pytest.mark.long
def test_ten_thousand_generated_configs(tmp_path: Path) -> None:
    """Seeded, so that a failure can be repeated; prints how many were examined and how long the slowest took."""
    from hypothesis import Phase

    examined, accepted, slowest = 0, 0, 0.0

    @settings(
        max_examples=10_000,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(texts)
    def examine_many(text: str) -> None:
        nonlocal examined, accepted, slowest
        start = time.perf_counter()
        accepted += examine(tmp_path / "run.yaml", text.encode("utf-8", "surrogatepass"))
        slowest = max(slowest, time.perf_counter() - start)
        examined += 1

    examine_many()
    for seed in range(max(0, 10_000 - examined)):  # hypothesis may stop early when it runs out of new texts
        words = random.Random(seed).choices(ODD + KEYS + ["\n", ": ", "  ", "- "], k=30)
        accepted += examine(tmp_path / "run.yaml", "".join(words).encode("utf-8", "surrogatepass"))
        examined += 1
    print(f"\n{examined} generated configs: {accepted} accepted, 0 tracebacks, slowest {slowest:.2f} s")
    assert examined >= 10_000
