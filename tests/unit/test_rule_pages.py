"""The pages of `gptctl rules CODE`. The oracle is the checker: it finds in each example what the page says."""

from __future__ import annotations

import shlex

import pytest

from gptctl.spec.cluster import load_profile
from gptctl.spec.rule_pages import RuleExample, parse_pages, rule_pages
from gptctl.spec.rules import all_rules
from gptctl.spec.sweep import load_sweep
from tests.conftest import codes

PAGES = rule_pages()
SHOWN = sorted(code for code, page in PAGES.items() if page.wrong)


def test_every_rule_has_a_page_and_every_page_a_rule() -> None:
    assert sorted(PAGES) == [rule.code for rule in all_rules()]
    assert all(page.meaning for page in PAGES.values())


def test_only_rules_that_look_outside_a_config_have_no_example() -> None:
    without = {code for code, page in PAGES.items() if not page.wrong}
    assert {code for code in without if code[0] != "S"} == {"C004", "C005", "W003"}
    assert all("This happens" in PAGES[code].meaning for code in without)


@pytest.mark.parametrize("code", SHOWN)
def test_an_example_breaks_its_rule_and_the_fix_mends_it(check, tmp_path, code: str) -> None:
    page = PAGES[code]
    assert page.wrong is not None
    assert page.fixed is not None

    def found(example: RuleExample) -> list[str]:
        if example.form == "sh":
            words = shlex.split(example.text)
            return codes(check("Global: {seed: 1}\n", *words[words.index("-o") + 1 :: 2]))
        if not example.document:
            return codes(check(example.text))
        if example.document == "sweep":
            (tmp_path / "sweep.yaml").write_text(example.text)
            return [finding.code for finding in load_sweep(tmp_path / "sweep.yaml").findings]
        (tmp_path / "mine.yaml").write_text(example.text)
        return [finding.code for finding in load_profile(str(tmp_path / "mine.yaml")).findings]

    assert set(found(page.wrong)) == {code, *page.wrong.also}
    assert set(found(page.fixed)) == set(page.fixed.also)


def test_pages_are_read_as_written() -> None:
    text = "# Title\n\n## L001\nSome\ntext.\n```yaml profile wrong also E001 E002\na: 1\n```\n## L002\nMore.\n"
    first, second = parse_pages(text)
    assert first.wrong == RuleExample("yaml", "a: 1", "profile", ("E001", "E002"))
    assert (first.meaning, first.fixed) == ("Some text.", None)
    assert (second.code, second.meaning, second.wrong) == ("L002", "More.", None)
