"""The page of `gptctl report`. Oracles: the numbers that went in, read back from the page by Python's own parser of HTML;
of the picture, a library for pictures."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gptctl.cli import cli
from gptctl.jobs.costs import JobTimes
from gptctl.jobs.ledger import Ledger
from gptctl.pages.curves import HEIGHT, WIDTH, bounds, charts, number_text
from gptctl.pages.heat_picture import LEVELS, colour_of, level_of, picture_of, ratio_of
from gptctl.pages.markup import Markup, element
from gptctl.pages.run_page import page
from gptctl.pages.time_strip import HEIGHT as STRIP
from gptctl.pages.time_strip import time_strip
from tests.job_records import add_job
from tests.reported import METRICS, Elements, assets, ledger_of_parts, rows_of, run_report

KB = 1000


def of_page(*runs: Any) -> Elements:
    return Elements(page(runs, assets(), 2000.0))


def lines_in(figure_html: str) -> list[tuple[dict[str, str | None], list[tuple[float, float]]]]:
    """Each curve with its points, in the units of the data."""
    return [(each, points_of(str(each["d"]))) for each in Elements(figure_html).of("path", "line")]


def points_of(d: str) -> list[tuple[float, float]]:
    numbers = [float(word) for word in re.findall(r"[-+.\de]+", d.replace("h0", ""))]
    return list(zip(numbers[::2], numbers[1::2]))


def test_text_never_becomes_markup() -> None:
    made = element("p", {"title": '"><script>'}, "<b>&amp;", Markup("<i>ours</i>"), None, "\x1b[31mred\x00\ud800")
    assert made.html == '<p title="&quot;&gt;&lt;script&gt;">&lt;b&gt;&amp;amp;<i>ours</i>red?</p>'
    assert (
        element("input", {"checked": True, "hidden": False, "value": None, "max": 3}).html == '<input checked max="3">'
    )


def test_curves_have_the_numbers_of_the_rows() -> None:
    rows = rows_of(40)
    found = {str(each["data-metric"]): points for each, points in lines_in(charts([rows]).html)}
    assert set(found) == {*METRICS}
    for name in METRICS:
        assert found[name] == [(row["step"] - 1, pytest.approx(row[name], rel=1e-5)) for row in rows]


def test_every_curve_is_inside_its_picture() -> None:
    made = Elements(charts([rows_of(300, spike=77)]).html)
    group = None
    for name, attributes in made.found:
        if name == "g":
            group = [float(word) for word in str(attributes["transform"])[len("matrix(") : -1].split()]
        if name == "path" and "line" in str(attributes["class"]).split():
            assert group
            for x, y in points_of(str(attributes["d"])):
                assert -0.01 <= x * group[0] + group[4] <= WIDTH + 0.01
                assert -0.01 <= y * group[3] + group[5] <= HEIGHT + 0.01


def test_what_is_not_finite_is_a_gap_and_is_counted() -> None:
    rows: list[dict[str, Any]] = [{"step": step, "attempt": 0, "loss": 1.0} for step in range(10)]
    rows[3]["loss"] = rows[4]["loss"] = None
    rows[7]["loss"] = 1e300
    html = charts([rows]).html
    (line,) = [each for each, _ in lines_in(html)]
    assert str(line["d"]).count("M") == 3
    assert "3 steps not finite" in html


@pytest.mark.parametrize(
    "values",
    [[0.0], [5.0, 5.0], [-1e29, 1e29], [1e-300, 2e-300], [0.1, 0.1 + 1e-15], [-3.0, -2.0], [1e29, 1e29 * (1 + 1e-12)]],
)
def test_curves_of_strange_values_can_be_drawn(values: list[float]) -> None:
    rows = [{"step": 10**11 + number, "attempt": 0, "loss": value} for number, value in enumerate(values)]
    html = charts([rows]).html
    assert "nan" not in html
    assert "inf" not in html
    assert len(lines_in(html)[0][1]) == len(values)


@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (1.731, 10.88), (0.0, 1e-9), (-5.0, 5e6), (3.0, 3.0)])
def test_bounds_are_round_and_around_the_values(low: float, high: float) -> None:
    bottom, top = bounds(low, high)
    assert bottom <= low <= high <= top
    assert top - bottom <= 6 * (high - low or abs(high))
    assert all(len(f"{bottom + (top - bottom) * part / 4:.6g}") <= 9 for part in range(5))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1.23456, "", "1.235"), (26640.0, "", "26.64k"), (3e-4, "", "3.00e-4"), (0.0, "", "0"), (426.3e6, "B", "426.3 MB"),
     (47.3, "%", "47%"), (0.115, "s", "0.115 s"), (2.5e12, "", "2.5T")],
)  # fmt: skip
def test_numbers_are_short(value: float, unit: str, text: str) -> None:
    assert number_text(value, unit) == text


def test_the_strip_gives_every_account_its_share() -> None:
    """The areas of the colours, against the seconds of the ledger."""
    parts = [
        ("starting", 13.0),
        ("compute", 61.7),
        ("wait", 3.1),
        ("checkpoint", 0.4),
        ("compute", 20.0),
        ("hang", 44.0),
    ]
    ledger = ledger_of_parts("a", parts)
    strip = time_strip([JobTimes(None, ledger)])
    assert strip
    total = sum(seconds for _, seconds in parts)
    for name in dict(parts):
        (path,) = Elements(strip.html).of("path", f"account-{name}")
        boxes = re.findall(r"h([\d.]+)v([\d.]+)h", str(path["d"]))
        share = sum(float(width) * float(height) for width, height in boxes) / (WIDTH * STRIP)
        assert share == pytest.approx(ledger.attempts[0].seconds[name] / total, abs=0.003)


def test_a_long_wait_does_not_hide_the_attempts() -> None:
    """A minute of work, a week in the queue, a minute of work."""
    first = ledger_of_parts("a", [("compute", 60.0)]).attempts[0]
    week = 7 * 86400.0
    segments = [each._replace(began=each.began + week, ended=each.ended + week) for each in first.segments]
    second = first._replace(attempt=1, began=first.began + week, ended=first.ended + week, segments=segments)
    strip = time_strip([JobTimes(None, Ledger("a", 0.0, [first, second]))])
    assert strip
    boxes = Elements(strip.html).of("rect", "attempt")
    assert [float(str(each["width"])) for each in boxes] == pytest.approx([480, 480], abs=5)
    assert "without nodes: 6 d 23:59" in strip.html


def test_the_heat_map_is_a_picture_of_the_ratios() -> None:
    pictures = pytest.importorskip("PIL.Image")
    rows = [[0.5, 1.0, 1.1], [1.25, 2.0, None]]
    picture = pictures.open(io.BytesIO(picture_of(rows))).convert("RGB")
    assert picture.size == (3, 2)
    for y, row in enumerate(rows):
        for x, ratio in enumerate(row):
            wanted = (128, 128, 128) if ratio is None else colour_of(ratio_of(level_of(ratio)))
            assert picture.getpixel((x, y)) == wanted
            assert ratio is None or ratio_of(level_of(ratio)) == pytest.approx(ratio, rel=0.01)


def test_levels_stay_in_the_palette() -> None:
    assert [level_of(None), level_of(0.0), level_of(1e9)] == [0, 1, LEVELS]


def test_slower_is_always_redder_above_the_median() -> None:
    """Red stays, green goes: from pale to orange to red."""
    greens = [colour_of(1.1 + number / 100)[1] for number in range(0, 45, 5)]
    assert greens == sorted(greens, reverse=True)
    assert min(colour_of(1.1 + number / 100)[0] for number in range(0, 45, 5)) >= 200


def test_a_page_has_all_parts_of_a_run() -> None:
    found = of_page(run_report())
    assert [each["id"] for each in found.of("section")] == ["curves", "time", "ranks", "failures", "events", "config"]
    assert len(found.of("img", "heat")) == 1
    assert len(found.of("figure", "chart")) == 9


def test_a_page_of_three_runs_overlays_them() -> None:
    found = of_page(run_report("a"), run_report("b"), run_report("c"))
    losses = [each["data-run"] for each in found.of("path", "line") if each["data-metric"] == "loss"]
    assert losses == ["0", "1", "2"]
    assert [each["data-run"] for each in found.of("input") if "data-run" in each] == ["0", "1", "2"]


def test_the_policy_names_the_page_s_own_script_and_style() -> None:
    """Oracle: the digests of what the parser found between the tags."""
    import hashlib

    found = of_page(run_report())
    (policy,) = [each["content"] for each in found.of("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    for text in assets():
        assert text in found.texts
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in str(policy)
    assert "'unsafe" not in str(policy)


def test_ten_thousand_steps_of_64_ranks_are_small() -> None:
    html = page([run_report(steps=10_000, ranks=64, events=20_000, world=64)], assets(), 2000.0)
    assert len(html.encode()) <= 400 * KB


def test_ten_runs_are_no_ten_times_larger() -> None:
    html = page([run_report(f"run-{number}", steps=3000) for number in range(10)], assets(), 2000.0)
    assert len(html.encode()) <= 1200 * KB


def test_a_run_without_anything_has_a_page() -> None:
    empty = run_report(steps=0)._replace(jobs=[], ranks=None, failures=[], facts={}, notes=[], status=None)
    found = of_page(empty)
    assert "No step has been logged." in found.texts


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def called(*words: str) -> Any:
    return CliRunner().invoke(cli, ["report", *words])


def test_a_report_of_two_jobs_and_a_file(home: Path) -> None:
    for name in ("gpt-1", "gpt-2"):
        add_job(home, name, loss=2.0)
    (home / "metrics.jsonl").write_text('{"step": 1, "loss": 3.5}\n')
    result = called("gpt-1", "gpt-2", "./metrics.jsonl", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["runs"] == ["gpt-1", "gpt-2", "metrics.jsonl"]
    written = Path(facts["file"])
    assert (written.name, written.stat().st_size) == ("report.html", facts["bytes"])
    assert len(Elements(written.read_text()).of("article")) >= 3


def test_a_report_goes_over_an_older_one_but_over_nothing_else(home: Path) -> None:
    add_job(home, "gpt-1", loss=2.0)
    (home / "notes.html").write_text("<p>mine")
    assert called("gpt-1", "--output", "notes.html").exception.exit_code == 2
    assert (home / "notes.html").read_text() == "<p>mine"
    assert [called("gpt-1").exit_code for _ in range(2)] == [0, 0]
    assert (home / "gpt-1.html").exists()


def test_stdout_gets_the_page_and_nothing_else(home: Path) -> None:
    add_job(home, "gpt-1", loss=2.0)
    result = called("gpt-1", "--output", "-")
    assert result.stdout.startswith("<!DOCTYPE html>")
    assert result.stdout.endswith("</html>\n")
    assert not list(home.glob("*.html"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt-1", "--output", "nowhere/x.html"], "cannot write nowhere/x.html"),
        (["./nothing.jsonl"], "./nothing.jsonl does not exist"),
        (["./runs/gpt-1/output"], "./runs/gpt-1/output is a folder"),
        (["/dev/null"], "/dev/null is not a regular file"),
        (["gpt-1", "--json", "--output", "-"], "both use stdout"),
        ([f"gpt-{number}" for number in range(65)], "65 jobs are too many"),
    ],
)
def test_mistakes_are_told(home: Path, words: list[str], said: str) -> None:
    add_job(home, "gpt-1", loss=2.0)
    error = called(*words).exception
    assert said in error.message
    assert error.hint


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 5000, b'{"step": 1, "loss"', b"[" * 99999, b'{"step": 1e400}\n' * 2000]
)
def test_damaged_metrics_make_a_page_too(home: Path, content: bytes) -> None:
    record = add_job(home, "gpt-1")
    for name in ("metrics.jsonl", "events.jsonl", "rank_times.jsonl"):
        Path(record.output_dir, name).write_bytes(content)
    (record.run_folder / "events.jsonl").write_bytes(content)
    assert called("gpt-1").exit_code == 0
