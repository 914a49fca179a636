"""Hostile text in a report: whatever somebody else could have written. Oracle: the elements of the same page with harmless
text, as Python's parser of HTML finds them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gptctl.pages.run_page import page
from gptctl.text import clean
from tests.reported import Elements, assets, run_report

HOSTILE = [
    "<script>alert(1)</script>", "</script><script>alert(1)", "</style><img src=x onerror=alert(1)>", '" onload="alert(1)',
    "'><svg/onload=alert(1)>", "<!--", "-->", "]]>", "<![CDATA[", "&lt;script&gt;", "javascript:alert(1)", "http://example.com/x.png",
    "\x1b]0;title\x07", "\u202e", "\x00", "</pre></article></main>", "data:text/html,<script>1</script>", "<?php", "{{7*7}}", "\ud800", "\r\n",
]  # fmt: skip
# Elements whose attributes would make a browser load something.
LOADING = {"src", "href", "srcset", "data", "action", "poster", "background", "xlink:href", "formaction"}
TEXTS = st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30)), min_size=1, max_size=4).map("".join)


@settings(max_examples=60, deadline=None)
@given(TEXTS.filter(bool))
def test_no_text_becomes_an_element_or_an_attribute(text: str) -> None:
    found, harmless = (Elements(page([run_report(each), run_report(each)], assets(), 2000.0)) for each in (text, "x"))
    assert [name for name, _ in found.found] == [name for name, _ in harmless.found]
    assert [set(each) for _, each in found.found] == [set(each) for _, each in harmless.found]
    assert found.others == harmless.others
    for _, attributes in found.found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        assert all(str(attributes[name]).startswith("data:image/png;base64,") for name in LOADING & set(attributes))
    # The text is there, as text.
    shown = clean(text).encode("utf-8", "replace").decode()
    assert not shown.strip() or shown in "".join(found.texts)
