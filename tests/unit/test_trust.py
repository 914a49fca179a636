"""Which files may decide what runs. Oracle: a table of owners and modes, judged by hand."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gptctl.cli.trusting import show_doubts
from gptctl.planning.render import render
from gptctl.planning.user_templates import found_templates, named_templates, template_sources
from gptctl.spec import trust
from gptctl.spec.check import check_config
from gptctl.spec.cluster import load_profile, own_folder, profile_source
from gptctl.spec.resources import named_files
from gptctl.spec.trust import Source, command_with_flag, doubts, foreign, remember, require_trust
from trainer.config import Override
from trainer.config.tree import ReadFile, read_once
from trainer.errors import UserError

ME, EVE = 1000, 1001
FILE, FOLDER = stat.S_IFREG, stat.S_IFDIR


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "records"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "records"


@pytest.mark.parametrize(
    ("uid", "mode", "expected"),
    [
        (ME, FILE | 0o644, ""),
        (0, FILE | 0o644, ""),
        (EVE, FILE | 0o644, "belongs to user 1001"),
        (ME, FILE | 0o646, "is writable by everybody"),
        (0, FILE | 0o666, "is writable by everybody"),
        (ME, FILE | 0o664, "is writable by group 4242"),
        (ME, FOLDER | 0o775, "is writable by group 4242"),
        (ME, FOLDER | 0o755, ""),
        # /tmp: others can create files there, but not replace those of the user.
        (0, FOLDER | stat.S_ISVTX | 0o777, ""),
        (EVE, FOLDER | stat.S_ISVTX | 0o777, "belongs to user 1001"),
    ],
)
def test_who_else_can_write(monkeypatch: pytest.MonkeyPatch, uid: int, mode: int, expected: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    assert trust._others("no-such-file", uid, 4242, mode) == expected


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_the_folder_counts_also_behind_a_link(tmp_path: Path) -> None:
    mine, hers = tmp_path / "mine", tmp_path / "hers"
    for place in (mine, hers):
        place.mkdir(mode=0o755)
    (hers / "a.yaml").write_text("kind: local\n")
    (mine / "link.yaml").symlink_to(hers / "a.yaml")
    assert foreign(read_once(mine / "link.yaml")) == ""
    os.chown(hers, 65534, -1)
    for path in (hers / "a.yaml", mine / "link.yaml"):
        assert foreign(read_once(path)) == "is in a folder that belongs to user nobody"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_every_link_on_the_way_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mine/link -> hers/link -> mine/real: the first folder and the last are the user's, and so is the file."""
    mine, hers, shared = (tmp_path / name for name in ("mine", "hers", "shared"))
    for place in (mine, hers, shared, mine / "real"):
        place.mkdir(mode=0o755)
    (mine / "real/a.yaml").write_text("kind: local\n")
    (hers / "link").symlink_to("../mine/./real")
    (mine / "link").symlink_to(hers / "link")
    (mine / "file.yaml").symlink_to("link/../real/a.yaml")
    (shared / "link").symlink_to(mine)
    shared.chmod(0o1777)
    monkeypatch.chdir(mine)
    through_hers = ["link/a.yaml", str(mine / "link/a.yaml"), "file.yaml", str(hers / "link/a.yaml")]
    through_shared = [str(shared / "link/real/a.yaml"), "../shared/link/real/a.yaml"]
    for path in (*through_hers, *through_shared):
        assert foreign(read_once(Path(path))) == "", path
    os.chown(hers, 65534, -1)
    os.lchown(shared / "link", 65534, -1)
    for path in through_hers:
        expected = "is reached by a link in a folder that belongs to user nobody"
        assert foreign(read_once(Path(path))) == expected, path
    for path in through_shared:
        assert foreign(read_once(Path(path))) == "is reached by a link that belongs to user nobody", path
    assert foreign(read_once(Path("real/a.yaml"))) == ""


def profile(name: str, is_typed: bool = True) -> Source:
    return profile_source(load_profile(name), name, is_typed)


def test_which_profiles_take_the_place_of_a_bundled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "config/gptctl/clusters"
    for place in (tmp_path / "clusters", own):
        place.mkdir(parents=True)
    (own / "local.yaml").write_text("gpus_per_node: 4\n")
    assert not doubts([profile("local")])
    (tmp_path / "clusters/local.yaml").write_text("gpus_per_node: 5\n")
    assert str(*doubts([profile("local")])) == (
        f"cluster profile clusters/local.yaml replaces your own profile local ({own}/local.yaml)"
    )
    (own / "local.yaml").unlink()
    assert str(*doubts([profile("local")])) == (
        "cluster profile clusters/local.yaml replaces the bundled profile local"
    )
    # A path that was typed is the user's choice; one that a config names is not.
    assert not doubts([profile("clusters/local.yaml")])
    assert doubts([profile("clusters/local.yaml", is_typed=False)])
    (tmp_path / "clusters/mine.yaml").write_text("gpus_per_node: 5\n")
    assert not doubts([profile("mine", is_typed=False)])
    (tmp_path / "clusters/local.yaml").write_bytes(named_files("clusters")["local"].read_bytes())
    assert not doubts([profile("local")])


def test_a_link_that_changes_after_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts are the bytes that were read, which the job uses, and not where the link leads by now."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clusters").mkdir()
    (tmp_path / "evil.yaml").write_text("setup: [touch pwned]\n")
    (tmp_path / "clusters/local.yaml").symlink_to(tmp_path / "evil.yaml")
    source = profile("local")
    (tmp_path / "clusters/local.yaml").unlink()
    (tmp_path / "clusters/local.yaml").symlink_to(named_files("clusters")["local"])
    assert not doubts([profile("local")])
    assert doubts([source])


def test_which_profiles_take_the_place_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is not bundled: the user has typed it for the profile in the config folder."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "config/gptctl/clusters"
    for place in (tmp_path / "clusters", own):
        place.mkdir(parents=True)
        (place / "lab.yaml").write_text("gpus_per_node: 4\n")
    assert not doubts([profile("lab")])  # they say the same
    (tmp_path / "clusters/lab.yaml").write_text("setup: [touch pwned]\n")
    assert str(*doubts([profile("lab")])) == (
        f"cluster profile clusters/lab.yaml replaces your own profile lab ({own}/lab.yaml)"
    )
    assert doubts([profile("clusters/lab.yaml", is_typed=False)])
    assert not doubts([profile("clusters/lab.yaml")])
    # Whatever the user's own is: it would have been taken.
    (own / "lab.yaml").unlink()
    (own / "lab.yaml").symlink_to("nowhere")
    assert doubts([profile("lab")])
    remember([profile("lab")])
    assert not doubts([profile("lab")])


def test_a_relative_config_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG standard says: a folder of the repository is never the user's own."""
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for value in ("config", "./config", ""):
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
        assert own_folder() == tmp_path / "me/.config/gptctl/clusters"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/elsewhere")
    assert own_folder() == Path("/elsewhere/gptctl/clusters")


def test_a_config_names_a_profile_and_the_command_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local.yaml").write_text("gpus_per_node: 5\n")
    (tmp_path / "base.yaml").write_text("Launch: {cluster: ./local.yaml}\n")
    (tmp_path / "run.yaml").write_text("_base_: base.yaml\n")
    checked = check_config(Path("run.yaml"), [])
    assert [each.file.path for each in checked.sources] == ["run.yaml", "base.yaml", "local.yaml"]
    assert [doubt.source.file.path for doubt in doubts(checked.sources)] == ["local.yaml"]
    typed = check_config(Path("run.yaml"), [Override("Launch.cluster", "./local.yaml", "--cluster")])
    assert not doubts(typed.sources)


def test_what_is_remembered(home: Path, tmp_path: Path) -> None:
    """Path and content; with mode 0600; a changed file is asked about again."""
    source = Source("template", ReadFile(str(tmp_path / "a.j2"), b"one"), "the bundled template a.j2")
    moved = source._replace(file=source.file._replace(path=str(tmp_path / "b.j2")))
    changed = source._replace(file=source.file._replace(data=b"two"))
    with pytest.raises(UserError, match=r"a\.j2 replaces the bundled template a\.j2") as raised:
        require_trust([source])
    assert raised.value.exit_code == 2
    remember([source])
    assert not doubts([source])
    assert "has changed" not in str(*doubts([moved]))
    assert str(*doubts([changed])).endswith("bundled template a.j2 and has changed since you trusted it")
    remember([changed])
    assert doubts([source])
    assert {entry.stat().st_mode & 0o777 for entry in (home / "trusted").iterdir()} == {0o600}
    assert (home / "trusted").stat().st_mode & 0o777 == 0o700
    # What somebody else wrote there by mistake does not count as trust.
    for entry in (home / "trusted").iterdir():
        entry.write_text("{}")
    assert "has changed" not in str(*doubts([changed]))


def test_what_a_dry_run_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --trust, it would be accepted; but a dry run remembers nothing."""
    source = Source("template", ReadFile(str(tmp_path / "a.j2"), b"one"), "template a.j2")
    show_doubts([source], trust=False)
    assert "to submit it, add --trust" in " ".join(capsys.readouterr().err.split())
    show_doubts([source], trust=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "add --trust" not in said
    assert said.endswith("a submit with --trust trusts it")
    assert doubts([source])


def test_the_command_to_type() -> None:
    assert command_with_flag(["/bin/gptctl", "submit", "my run.yaml"]) == "gptctl submit 'my run.yaml' --trust"
    assert command_with_flag(["gptctl", "submit", "--", "x.py", "--", "a"]) == "gptctl submit --trust -- x.py -- a"


def test_templates_are_used_as_they_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever changes the file after it was trusted changes nothing. Oracle: the text that is rendered."""
    from tests.unit.test_render import JOB, LOCAL, plan_of

    plan = plan_of(tmp_path, LOCAL, [], JOB)
    own = tmp_path / "templates"
    own.mkdir()
    (own / "launch.sh.j2").write_text("{% include 'part.j2' %}")
    (own / "part.j2").write_text("echo good\n")
    read = found_templates(own)
    assert [each.file.path for each in template_sources(read)] == [
        str(own / name) for name in ("launch.sh.j2", "part.j2")
    ]
    (own / "part.j2").write_text("echo evil\n")
    assert render(plan, "launch.sh", read) == "echo good\n"


def test_a_folder_of_templates_for_something_else(tmp_path: Path) -> None:
    (tmp_path / "page.html.j2").write_text("<html>")
    assert found_templates(tmp_path) == []


def test_a_profile_is_used_as_it_was_read(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("kind: local\nsetup: ['good']\n")
    read = load_profile(str(file))
    file.write_text("kind: local\nsetup: ['evil']\n")
    assert check_config(None, [Override("Launch.cluster", str(file), "x")], read).cluster.setup == ("good",)


def test_unreadable_templates_are_explained(tmp_path: Path) -> None:
    (tmp_path / "launch.sh.j2").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not UTF-8"):
        named_templates(tmp_path)
    (tmp_path / "launch.sh.j2").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(UserError, match="is larger than 1 MiB"):
        named_templates(tmp_path)
    (tmp_path / "launch.sh.j2").unlink()
    os.mkfifo(tmp_path / "launch.sh.j2")
    with pytest.raises(UserError, match="is not a regular file"):
        named_templates(tmp_path)
