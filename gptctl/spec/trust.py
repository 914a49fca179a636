"""Which files of others may decide what runs here: cluster profiles, templates, configs, sweeps.

They can name any command, and gptctl finds some of them by itself in the current folder, which may
be a cloned repository or a folder that others can write to. Such a file needs `--trust` once. What
was trusted is remembered by path and content: a changed file needs it again.

The program that a job runs is not among them: to run it is what the user asks for.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.file_reading import read_json
from gptctl.spec.resources import folder, home
from trainer.config.tree import ReadFile
from trainer.errors import OUT_OF_REACH, WRONG_USAGE, UserError
from trainer.named_tuple import NamedTuple

FLAG = "--trust"
PROFILE, TEMPLATE, CONFIG, SWEEP = "cluster profile", "template", "run config", "sweep file"
BUNDLED_FOLDERS = ("clusters", "templates")
MOST_LINKS = 40  # on the way to a file; the system follows no more
ACL = "system.posix_acl_access"


class Source(NamedTuple):
    """A file that decides what runs, with the bytes that are used."""

    what: str
    file: ReadFile
    replaces: str = ""  # which file it takes the place of, although nobody named it
    is_announced: bool = False  # whether `submit` names it


class Doubt(NamedTuple):
    """A source that the user has not trusted yet, and why that is needed."""

    source: Source
    reason: str

    def __str__(self) -> str:
        return f"{self.source.what} {self.source.file.path} {self.reason}"


def doubts(sources: Iterable[Source]) -> list[Doubt]:
    """The sources that need `--trust` and have not got it, each once."""
    # By content, too: the runs of a sweep may have read a file before and after it changed.
    asked = {(source.file.path, source.file.data, source.what): source for source in sources}
    found = [Doubt(source, reason) for source in asked.values() if (reason := reason_for(source))]
    return [
        doubt._replace(reason=f"{doubt.reason}{_change(doubt.source.file)}")
        for doubt in found
        if not is_remembered(doubt.source.file)
    ]


def require_trust(sources: Sequence[Source]) -> None:
    """Raise UserError with the command to type, if a source is not trusted."""
    found = doubts(sources)
    if not found:
        return
    # A file that changed while it was being trusted is asked about again, in the same words.
    command = command_with_flag(sys.argv)
    hint = f"such a file can run any command as you. Read it, then run: {command}"
    raise UserError("\n".join(map(str, found)), hint, WRONG_USAGE)


def settle_trust(sources: Sequence[Source], trust: bool) -> None:
    """Remember that the user trusts these files, or refuse those that need it."""
    if trust:
        remember(sources)
    require_trust(sources)


def remember(sources: Sequence[Source]) -> None:
    """Trust these sources from now on, as they are."""
    for doubt in doubts(sources):
        file = doubt.source.file
        try:
            with private_files():
                _trust_file(file).parent.mkdir(parents=True, exist_ok=True)
                with replacing(_trust_file(file)) as stream:
                    facts = {"path": os.path.abspath(file.path), "sha256": digest(file)}
                    stream.write(json.dumps(facts).encode() + b"\n")
        except OSError as error:
            message = f"cannot write {_trust_file(file)}: {error.strerror}"
            hint = "set GPTCTL_HOME to a writable folder"
            raise UserError(message, hint, OUT_OF_REACH) from None


def is_remembered(file: ReadFile) -> bool:
    facts = read_json(_trust_file(file)) or {}
    return facts == {"path": os.path.abspath(file.path), "sha256": digest(file)}


def _change(file: ReadFile) -> str:
    """What else to say of a file that is not trusted as it is now, but was trusted before."""
    facts = read_json(_trust_file(file)) or {}
    was_trusted = facts.get("path") == os.path.abspath(file.path) and "sha256" in facts
    return " and has changed since you trusted it" if was_trusted else ""


def _trust_file(file: ReadFile) -> Path:
    """Where it is remembered: one file per path, so that two gptctl cannot disturb each other."""
    name = hashlib.sha256(os.fsencode(os.path.abspath(file.path))).hexdigest()[:32]
    return home() / "trusted" / f"{name}.json"


def digest(file: ReadFile) -> str:
    return hashlib.sha256(file.data).hexdigest()


def command_with_flag(argv: Sequence[str]) -> str:
    """The command that was typed, with `--trust`; what follows `--` belongs to a script."""
    import shlex

    words = list(argv[1:])
    at = words.index("--") if "--" in words else len(words)
    return shlex.join(["gptctl", *words[:at], FLAG, *words[at:]])


def announced(sources: Iterable[Source]) -> list[str]:
    """What `submit` says about files that are neither bundled nor in the user's config folder."""
    shown = [each for each in sources if each.is_announced and not is_bundled(each.file)]
    return [*dict.fromkeys(f"{each.what}: {os.path.abspath(each.file.path)}" for each in shown)]


def reason_for(source: Source) -> str:
    """Why the source needs trust; empty if it does not."""
    if is_bundled(source.file):
        return ""
    if source.replaces:
        return f"replaces {source.replaces}"
    return foreign(source.file)


def is_bundled(file: ReadFile) -> bool:
    """Whether it is a file of gptctl itself, or says the same as the one that it would replace."""
    # A checkout is both: its ./clusters/local.yaml is the bundled one.
    real = Path(os.path.realpath(file.path))
    for name in BUNDLED_FOLDERS:
        ours = folder(name).resolve()
        for same in (ours / real.name, *(each / real.name for each in ours.glob("*/"))):
            if same.is_file() and same.read_bytes() == file.data:
                return True
    return False


def foreign(file: ReadFile) -> str:
    """Who else can decide what the file says: `belongs to eve`; empty if nobody."""
    # Of the file that was read, not of what its name means now.
    if who := _others(file.path, file.uid, file.gid, file.mode):
        return who
    # A pipe of the shell, <(command), is in no folder.
    if not stat.S_ISREG(file.mode):
        return ""
    # The folder of a symbolic link and that of its target. Further up only links matter: whoever
    # can rename a folder of the user's can only put another one in its place, which does not belong
    # to the user, but a link can be made to lead to any other folder of the user's.
    places = (os.path.dirname(file.path) or ".", os.path.dirname(os.path.realpath(file.path)))
    for place in dict.fromkeys(places):
        found = os.stat(place)
        if who := _others(place, found.st_uid, found.st_gid, found.st_mode):
            return f"is in a folder that {who}"
    return _who_decides_links(file.path)


def _who_decides_links(path: str) -> str:
    """Who else can change a link on the way to a file; empty if nobody."""
    for number, link in enumerate(_links(path)):
        if number == MOST_LINKS:
            return f"is reached by more than {MOST_LINKS} links"
        folder, owner = os.stat(os.path.dirname(link)), os.lstat(link).st_uid
        if who := _others(os.path.dirname(link), folder.st_uid, folder.st_gid, folder.st_mode):
            return f"is reached by a link in a folder that {who}"
        # In a folder such as /tmp: the link is not the user's.
        if owner not in (os.geteuid(), 0):
            return f"is reached by a link that belongs to {_user_name(owner)}"
    return ""


def _links(path: str) -> Iterator[str]:
    """The symbolic links that the system follows to open a path, in order, with their places."""
    place, names = "/" if path.startswith("/") else os.getcwd(), path.split("/")
    while names:
        name = names.pop(0)
        here = os.path.dirname(place) if name == ".." else os.path.join(place, name)
        if name in ("", ".") or not os.path.islink(here):
            place = place if name in ("", ".") else here
            continue
        yield here
        target = os.readlink(here)
        place = "/" if target.startswith("/") else place
        names = [*target.split("/"), *names]


def _others(path: str, uid: int, gid: int, mode: int) -> str:
    if uid not in (os.geteuid(), 0):
        return f"belongs to {_user_name(uid)}"
    # In a folder such as /tmp nobody can replace the files of others.
    if stat.S_ISDIR(mode) and mode & stat.S_ISVTX:
        return ""
    if mode & stat.S_IWOTH:
        return "is writable by everybody"
    if mode & stat.S_IWGRP and not _is_private_group(path, gid):
        return f"is writable by group {_group_name(gid)}"
    return ""


def _is_private_group(path: str, gid: int) -> bool:
    """Whether the group has no other members: many systems give each user such a group."""
    import grp
    import pwd

    # With an access list, the group's bits are those of everybody whom it names.
    if ACL in _attributes(path):
        return False
    try:
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return gid == 0
    is_own = group.gr_name == name and set(group.gr_mem) <= {name}
    return is_own or (gid == 0 and set(group.gr_mem) <= {name, "root"})


def _attributes(path: str) -> list[str]:
    try:
        return os.listxattr(path)
    except OSError:  # not every file system has them
        return []


def _user_name(uid: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
