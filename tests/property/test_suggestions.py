"""What is suggested for an unknown key. The oracle: the keys of the section it stands in, read from the dataclasses."""

from __future__ import annotations

import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptctl.spec.cluster import Cluster
from gptctl.spec.launch import Launch
from trainer.config.dialects import IGNORED, RENAMED, SPECIAL, translate
from trainer.config.kinds import Section, keys_of
from trainer.config.read import OTHER_WORDS, Reading, read_root, read_section
from trainer.config.resolve import sections
from trainer.config.tree import Map, Node, Scalar
from trainer.errors import Finding, Place

HERE = Place("run.yaml", 1)


def all_sections() -> dict[str, list[str]]:
    """The keys of every section by its path, without the sections that are lists or mappings of names."""
    found: dict[str, list[str]] = {}

    def visit(cls: type, path: str) -> None:
        found[path] = list(keys_of(cls))
        for name, key in keys_of(cls).items():
            if isinstance(key.kind, Section):
                visit(key.kind.cls, f"{path}.{name}")

    for name, cls in {**sections(), "Launch": Launch}.items():
        visit(cls, name)
    return found


SECTIONS = all_sections()
WORDS = sorted(
    {key for keys in SECTIONS.values() for key in keys}
    | {name.rpartition(".")[2] for name in (*RENAMED, *SPECIAL, *IGNORED)}
    | {*OTHER_WORDS, *keys_of(Cluster)}
)


def hint_for(section: str, word: str) -> str:
    """What is said of one unknown key in a section; empty if the key is known there after all."""
    node: Node = Map({word: Scalar("1", HERE)}, HERE)
    for name in reversed(section.split(".") if section else []):
        node = Map({name: node}, HERE)
    found: list[Finding] = []
    assert isinstance(node, Map)
    read_root(translate(node, found).written, Reading(found, {**sections(), "Launch": Launch}))
    unknown = [finding for finding in found if finding.code == "C010"]
    return unknown[0].hint if unknown else ""


def assert_sensible(section: str, word: str) -> None:
    hint = hint_for(section, word)
    if meant := re.match(r"did you mean (\S+)\?", hint):
        old = {name.rpartition(".")[2] for name in RENAMED if name.rpartition(".")[0] == section}
        assert meant[1].rpartition(".")[2] != word, (section, word, hint)
        assert not section or meant[1] in {*SECTIONS[section], *old}, (section, word, hint)
    if there := re.match(r"move it to (\S+)", hint):
        assert there[1] != section
        assert word in SECTIONS[there[1]], (section, word, hint)


def test_every_known_word_in_every_section() -> None:
    """Also where it does not belong, and at the root. Eval and Test have the keys of Train."""
    for section in ["", *(path for path in SECTIONS if not path.startswith(("Data.Eval", "Data.Test")))]:
        for word in WORDS:
            assert_sensible(section, word)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["", *SECTIONS]), st.sampled_from(WORDS), st.integers(0, 40), st.sampled_from("drs_x"))
def test_misspelt_words(section: str, word: str, at: int, how: str) -> None:
    """A letter less, twice, exchanged, or another one."""
    at %= len(word)
    changed = {"d": word[:at] + word[at + 1 :], "r": word[:at] + word[at] + word[at:], "s": word[:at] + word[at:][::-1]}
    misspelt = changed.get(how, word[:at] + how + word[at + 1 :])
    if misspelt.strip("."):
        assert_sensible(section, misspelt)


def test_a_letter_less_is_recognised_in_its_own_section() -> None:
    """The suggestion is the key itself, wherever the word is long enough to be told from others."""
    for section, keys in SECTIONS.items():
        for key in keys:
            if len(key) > 7 and (misspelt := key[:3] + key[4:]) not in keys:
                assert hint_for(section, misspelt).startswith("did you mean"), (section, misspelt)


def test_a_profile_does_not_suggest_keys_of_a_config() -> None:
    for word in WORDS:
        found: list[Finding] = []
        read_section(Cluster, Map({word: Scalar("1", HERE)}, HERE), found)
        for finding in found:
            if meant := re.match(r"did you mean (\S+)\?", finding.hint):
                assert meant[1] in keys_of(Cluster), (word, finding.hint)
                assert meant[1] != word
