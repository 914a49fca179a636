"""Reports in a real browser without a window. Oracles: what the browser drew, and what its console says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gptctl.pages.run_page import page
from tests.browser import LACKING, Page, browser_page, chromedriver
from tests.reported import assets, run_report

pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)} (make tools)")

HOSTILE = """</script><script>window.hit = 1</script><img src=x onerror="window.hit = 2"><svg onload="window.hit = 3">'" onclick='x"""
# What each curve covers on the screen.
BOXES = """return [...document.querySelectorAll(".plot")].map((plot) => {
  const frame = plot.getBoundingClientRect();
  const lines = [...plot.querySelectorAll(".line")].map((line) => line.getBoundingClientRect());
  return [frame.width, frame.height, lines.length, Math.max(...lines.map((each) => each.width)), Math.max(...lines.map((each) => each.height))];
})"""
LABELS = (
    "return [...document.querySelectorAll('#charts figure:first-child .x-axis span')].map((each) => each.textContent)"
)
LOSS = "return document.querySelector('#charts .line:not(.pale)').getAttribute('d')"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with chromedriver(tmp_path_factory.mktemp("driver")) as address:
        yield address


def opened(runs: list[Any], folder: Path, on: Page) -> None:
    file = folder / "report.html"
    file.write_text(page(runs, assets(), 2000.0), encoding="utf-8")
    on.open(file.as_uri())


def assert_every_plot_has_its_curve(on: Page, lines: int) -> None:
    boxes = on.run(BOXES)
    assert len(boxes) == 9
    for width, height, found, longest, tallest in boxes:
        assert found in (lines, 2 * lines)  # two metrics in some
        assert longest > 0.95 * width
        assert 0.2 * height < tallest <= 1.05 * height


@pytest.mark.parametrize(("width", "is_phone"), [(1280, False), (400, True)])
@pytest.mark.parametrize("number", [1, 3])
def test_every_plot_has_its_curve_and_the_console_is_silent(
    driver: str, tmp_path: Path, width: int, is_phone: bool, number: int
) -> None:
    runs = [run_report(f"gpt-{each}", steps=99, ranks=8) for each in range(number)]
    with browser_page(driver, tmp_path, width, is_phone) as on:
        opened(runs, tmp_path, on)
        assert_every_plot_has_its_curve(on, number)
        # Nothing is wider than the screen: one scrolls down, not sideways.
        assert on.run("return document.documentElement.scrollWidth") <= width
        assert on.run("return document.querySelector('.heat').naturalWidth") == 99
        assert on.messages() == []


def test_what_a_reader_does(driver: str, tmp_path: Path) -> None:
    """Zoom, hover, choose runs, another axis, smoothing, a logarithm, the other theme, printing."""
    with browser_page(driver, tmp_path) as on:
        opened([run_report("gpt-1", steps=401), run_report("gpt-2", steps=401)], tmp_path, on)
        assert on.run(LABELS) == ["1", "101", "201", "301", "401"]
        on.drag("#charts .plot", 0.25, 0.5)
        assert [int(text) for text in on.run(LABELS)] == pytest.approx([101, 126, 151, 176, 201], abs=2)
        on.run("document.querySelector('#reset').click()")
        assert on.run(LABELS)[-1] == "401"
        on.hover("#charts .plot", 0.5)
        said = on.run("return document.querySelector('.tip:not([hidden])').textContent")
        assert "step 201" in said
        assert "gpt-2" in said
        whole = on.run(LOSS)
        for change, value in (("smooth", "'60'"), ("log", "null")):
            on.run(f"const e = document.querySelector('#{change}'); e.checked = true; if ({value}) e.value = {value};"
                   "e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('change'))")  # fmt: skip
            assert on.run(LOSS) != whole
            whole = on.run(LOSS)
        on.run("const e = document.querySelector('#axis'); e.value = 'tokens'; e.dispatchEvent(new Event('change'))")
        assert on.run(LABELS)[-1] == "1.642M"
        on.run("document.querySelector('#choose input').click()")
        assert on.run(LOSS) == ""
        on.run("document.querySelector('#theme').click()")
        assert on.run("return document.documentElement.dataset.theme") in ("dark", "light")
        on.hover(".heat", 0.5)
        assert "× the median" in on.run("return document.querySelector('.tip:not([hidden])').textContent")
        assert on.messages() == []


def test_hostile_text_neither_runs_nor_loads(driver: str, tmp_path: Path) -> None:
    """Also if it did become an element: the policy of the page forbids it, and the console would say so."""
    with browser_page(driver, tmp_path) as on:
        opened([run_report(HOSTILE), run_report("gpt")], tmp_path, on)
        assert on.run("return window.hit ?? null") is None
        assert HOSTILE in on.run("return document.body.textContent")
        assert (
            on.run(
                "return performance.getEntriesByType('resource').filter((each) => !each.name.startsWith('data:')).length"
            )
            == 0
        )
        assert on.messages() == []
        # The oracle of this test: the console does report what the policy stops.
        on.run("const s = document.createElement('script'); s.textContent = 'window.hit = 4'; document.body.append(s)")
        assert on.run("return window.hit ?? null") is None
        assert any("Content Security Policy" in text for text in on.messages())


def test_without_a_script_the_curves_are_there(driver: str, tmp_path: Path) -> None:
    file = tmp_path / "still.html"
    still = page([run_report("gpt-1", steps=99)], assets()._replace(script=""), 2000.0)
    file.write_text(still, encoding="utf-8")
    with browser_page(driver, tmp_path) as on:
        on.open(file.as_uri())
        assert_every_plot_has_its_curve(on, 1)
        assert on.run("return getComputedStyle(document.querySelector('#controls')).display") == "none"
