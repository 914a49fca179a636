"""The documentation agrees with the code. Oracles: the code's own tables of keys, dialects, commands and variables."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gptctl.cli import cli
from gptctl.spec.launch import STYLES
from gptctl.spec.rules import all_rules
from gptctl.spec.summary import key_rows
from tests.conftest import ROOT
from tests.pages import FENCE, commands, pages
from trainer.config.dialects import IGNORED, RENAMED, SPECIAL
from trainer.config.tasks import AUTO_KEYS, NOT_SUPPORTED_YET

PAGES = pages()
ENGLISH = [page for page in PAGES if page.parent.name != "zh-CN" and not page.name.endswith(".zh-CN.md")]
TWINS = {
    "README.md": "README.zh-CN.md",
    "docs/quickstart.md": "docs/zh-CN/quickstart.md",
    "docs/coming-from.md": "docs/zh-CN/coming-from.md",
    "docs/profiling.md": "docs/zh-CN/profiling.md",
    "docs/data.md": "docs/zh-CN/data.md",
    "docs/evaluate-generate-export.md": "docs/zh-CN/evaluate-generate-export.md",
    "docs/watching.md": "docs/zh-CN/watching.md",
}
MACHINE_PATH = re.compile(r"(?<![\w.~])/(work|root|tmp|home)(/|\b)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PLACEHOLDER = re.compile(r"…|<|\bCOMMAND\b|\bARGS\b|[\u4e00-\u9fff]")
SECTIONS = {row["key"].partition(".")[0] for row in key_rows("")}
KEY = re.compile(rf"(?:{'|'.join(SECTIONS)})\.[A-Za-z0-9_.*]+")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def inline_commands(page: Path) -> list[str]:
    """`gptctl …` in running text and tables, but for those with a placeholder in the place of the command."""
    text = FENCE.sub("", page.read_text(encoding="utf-8")).replace("\\|", "|")
    return [code for code in re.findall(r"`(gptctl [^`]+)`", text) if not PLACEHOLDER.search(code)]


def anchors(page: Path) -> set[str]:
    """The names that a forge gives to headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def ids(pages: list[Path]) -> list[str]:
    return [name_of(page) for page in pages]


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_no_page_names_a_path_of_one_machine(page: Path) -> None:
    for line in page.read_text(encoding="utf-8").splitlines():
        assert not MACHINE_PATH.search(line), line


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_shown_commands_exist(page: Path) -> None:
    """Every command and option is known to click; nothing is run."""
    for line in [*(command.line for command in commands(page)), *inline_commands(page)]:
        words = shlex.split(line.partition(" > ")[0].partition(" | ")[0])
        if words[:1] == ["gptctl"] and len(words) > 1:
            parse(words[1:])


def parse(words: list[str]) -> None:
    """Fails where the command or one of its options is unknown."""
    command: click.Command = cli
    context = click.Context(cli, info_name="gptctl")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        assert found is not None, words
        command, words = found, words[1:]
        context = click.Context(command, parent=context)
    named = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    own = words[: words.index("--")] if "--" in words else words
    unknown = {word for word in own if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in named}
    assert not unknown - {"--help", "-h", "--version"}, words


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_named_keys_exist(page: Path) -> None:
    """As keys, as sections, or as keys of a dialect; in backticks, or after -o."""
    text = page.read_text(encoding="utf-8")
    keys = {row["key"] for row in key_rows("")}
    known = {*keys, *RENAMED, *SPECIAL, *IGNORED, *of_other_tasks()} | {key.rpartition(".")[0] for key in keys}
    known |= {section.rpartition(".")[0] for section in known}
    known |= {key.replace("Data.Train", "Data.*") for key in known}
    codes = [*re.findall(r"`([^`\n]+)`", text), *re.findall(r"-o ([A-Za-z_.]+)=", text)]
    named = [found[0] for found in map(KEY.match, codes) if found and not re.search(r"\.(py|yaml)$", found[0])]
    for key in named:
        key = key.rstrip(".").removesuffix(".*")
        assert key in known or key.startswith(("Launch.env.", "Launch.slurm.extra.")), key


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_named_rules_exist(page: Path) -> None:
    codes = {rule.code for rule in all_rules()}
    named = re.findall(r"`([A-Z]\d{3})`", page.read_text(encoding="utf-8"))
    assert set(named) <= codes


def of_other_tasks() -> set[str]:
    keys = [*AUTO_KEYS, *(key for other in NOT_SUPPORTED_YET for key in (*other.signs, *other.belongs))]
    return {re.sub(r"^Data\.\w+\.(collate_fn|sample_split)", r"Data.*.\1", key) for key in keys}


@pytest.mark.parametrize("page", ["docs/coming-from.md", "docs/zh-CN/coming-from.md"])
def test_every_foreign_key_is_mapped(page: str) -> None:
    words = set(re.findall(r"[\w.*]+", (ROOT / page).read_text(encoding="utf-8")))
    ours = {row["key"] for row in key_rows("")}
    assert {*RENAMED, *SPECIAL, *IGNORED, *of_other_tasks()} - ours - words == set()


def test_every_launch_style_is_shown() -> None:
    text = (ROOT / "docs" / "launch-forms.md").read_text(encoding="utf-8")
    assert all(f"--style {style}" in text for style in STYLES)


def test_named_variables_exist() -> None:
    """`GPTCTL_…` in the contract are set or read somewhere in the code."""
    named = set(re.findall(r"GPTCTL_[A-Z_]+", (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")))
    files = [*ROOT.glob("gptctl/**/*.py"), *ROOT.glob("trainer/**/*.py"), *ROOT.glob("templates/**/*.*")]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    assert {name for name in named if name not in code} == set()


def test_named_files_of_the_code_exist() -> None:
    text = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8").partition("## Where would I change X?")[2]
    named = re.findall(r"`((?:gptctl|trainer)/[\w/.]+)`", text)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_config_reference_is_what_the_script_writes() -> None:
    script = ROOT / "docs" / "generate.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readme_stays_a_first_page(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 900


def test_the_readme_names_the_test_command() -> None:
    """CI runs the test command of the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^make test +# the test command", readme, re.MULTILINE)
    assert "exec make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "run: make test" in (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize(("english", "chinese"), TWINS.items(), ids=list(TWINS))
def test_twins_show_the_same_commands_and_headings(english: str, chinese: str) -> None:
    one, other = ROOT / english, ROOT / chinese
    assert commands(one) == commands(other)
    depths = [
        re.findall(r"^(#+) ", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE) for page in (one, other)
    ]
    assert depths[0] == depths[1]


def test_pictures_are_well_formed() -> None:
    from xml.etree import ElementTree

    pictures = list((ROOT / "docs" / "img").glob("*.svg"))
    assert pictures
    for picture in pictures:
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_english_pages_are_english() -> None:
    """But for the names of their twins."""
    for page in ENGLISH:
        text = page.read_text(encoding="utf-8").replace("[中文]", "")
        assert not re.search(r"[\u4e00-\u9fff]", text), name_of(page)


@pytest.mark.parametrize(
    "name", ["README.zh-CN.md", *(f"docs/zh-CN/{name}.md" for name in ("quickstart", "watching", "data"))]
)
def test_chinese_pages_have_one_word_for_a_job(name: str) -> None:
    """作业. 任务 is a task, which these pages have no need for."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if "任务" in line] == []


def test_extras_are_installed_by_one_command() -> None:
    """`pip install 'gptctl[…]'` works in any folder, `'.[…]'` only in a checkout: that is how gptctl itself is installed."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    allowed = {f"'gptctl[{extra}]'" for extra in re.findall(r"^([\w-]+) = ", table, re.MULTILINE)}
    allowed |= {"'gptctl[{extra}]'"}  # of `install_line`
    allowed |= {".", "'.[train]'"}  # gptctl itself
    allowed |= {"torch"}  # for nodes without gptctl
    sources = [file for folder in ("gptctl", "trainer", "templates") for file in (ROOT / folder).rglob("*.*")]
    for file in [*PAGES, *(file for file in sources if file.suffix in (".py", ".md", ".yaml", ".j2"))]:
        text = file.read_text(encoding="utf-8")
        named = {word.rstrip('"),;:') for word in re.findall(r"pip install\s+([^\s`]+)", text)}
        assert named <= allowed, file


def test_messages_name_extras_in_one_way() -> None:
    """Two modules have the line itself: the engine, which hosts get without the trainer, and the constants of `top`."""
    written = {
        name_of(file)
        for folder in ("gptctl", "trainer")
        for file in (ROOT / folder).rglob("*.py")
        if "pip install 'gptctl[" in file.read_text(encoding="utf-8")
    }
    own = {"gptctl/engine/webhook.py", "gptctl/cli/top.py", "gptctl/cli/top_view.py"}
    assert written - own == {"trainer/errors.py"}
