"""Write docs/config-reference.md, and a table of docs/parallelism.md.

    python docs/generate.py            writes the files
    python docs/generate.py --check    exits with 1 if one is out of date, and writes nothing

The reference has the definitions that `gptctl keys` prints: edit the texts where the keys are
defined, in trainer/config/sections.py, gptctl/spec/launch.py and gptctl/spec/cluster.py. The table
has what `gptctl topo --collectives` prints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that the script also works where gptctl is not installed

from gptctl.spec.cluster import Cluster, Host  # noqa: E402
from gptctl.spec.collective_rows import reasons, size_text, totals  # noqa: E402
from gptctl.spec.summary import key_rows  # noqa: E402
from trainer.collectives import collectives  # noqa: E402
from trainer.config import Override, load  # noqa: E402
from trainer.config.kinds import Section, keys_of  # noqa: E402
from trainer.config.presets import PRESETS  # noqa: E402
from trainer.config.sections import RunConfig  # noqa: E402
from trainer.layout import AXES, DEGREE_KEYS, Machines  # noqa: E402

TARGET = ROOT / "docs" / "config-reference.md"
PARALLELISM = ROOT / "docs" / "parallelism.md"
BEGIN, END = "<!-- written by docs/generate.py -->\n", "<!-- end -->\n"
COPIES_OF_TRAIN = ("Data.Eval.", "Data.Test.")

INTRODUCTION = """\
<!-- Written by `python docs/generate.py`. Do not edit: tests/unit/test_docs.py compares them. -->

# Config reference

Every key of a run config and of a cluster profile, with its default and its meaning.
`gptctl keys` prints the same list, `gptctl keys Distributed` one section.
`gptctl validate --resolved` shows where each value of your config came from.

- An empty value means "not set": the key has its default, or a derived value where the meaning says
  so.
- `-o Section.key=value` overrides any key on the command line. `-o Data.Train.dataset.split.0=900`
  sets one item of a list.
- `_base_: other.yaml` at the top of a file loads that file first. `_inherited_: False` in a section
  replaces the section of the base file instead of merging with it.
- An unknown key is an error, and the message names the closest key. Keys that only Paddle uses are
  accepted with a notice: see [Migration guide](coming-from.md).
- `gptctl schema` prints a JSON Schema of run configs, for completion in editors.
"""

DATA_NOTE = """\
`Data.Eval` and `Data.Test` have the same keys. An empty key has the value of `Data.Train`.
"""

PROFILE_INTRODUCTION = """\
A cluster profile says where jobs run. `--cluster NAME` reads the first `NAME.yaml` found in
`./clusters`, in `~/.config/gptctl/clusters`, or among the bundled profiles. A path works too. The
bundled `clusters/local.yaml`, `clusters/slurm-example.yaml` and `clusters/ssh-example.yaml` show
every key of their kind. See [Slurm](slurm.md) and [ssh](ssh.md). A profile in `./clusters` that has
the name of a bundled one needs `--trust` once: see [security](security.md#files-of-others).
"""

HOSTS_NOTE = """\
An entry of `hosts` is a host name, or a mapping with these keys:
"""

PRESETS_INTRODUCTION = """\
`Model.name` takes one of these names, or `GPT` with the sizes written out. Written sizes win.
"""

COLUMNS = ("key", "default", "meaning")

# The model of the table of collectives, and its layouts on 8 GPUs: degrees and other keys.
MODEL = {
    "Model.name": "1.3B",
    "Model.vocab_size": 50304,
    "Model.use_recompute": True,
    "Model.hidden_dropout_prob": 0,
    "Engine.mix_precision.enable": True,
    "Engine.mix_precision.level": "O2",
    "Data.Train.dataset.max_seq_len": 1024,
    "Data.Train.dataset.input_dir": "data",
    "Global.global_batch_size": 64,
    "Global.micro_batch_size": 2,
}
STAGE = "Distributed.sharding.sharding_stage"
SEQUENCE = "Model.sequence_parallel"
LAYOUTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("dp 8", {}),
    ("sharding 8, stage 1", {"sharding": 8, STAGE: 1}),
    ("sharding 8, stage 2", {"sharding": 8, STAGE: 2}),
    ("sharding 8, stage 3", {"sharding": 8, STAGE: 3}),
    ("sharding 4 × dp 2, stage 2", {"sharding": 4, STAGE: 2}),
    ("mp 8", {"mp": 8}),
    ("mp 8, `sequence_parallel`", {"mp": 8, SEQUENCE: True}),
    ("pp 8", {"pp": 8}),
    ("mp 2 × pp 2 × sharding 2, stage 1", {"mp": 2, "pp": 2, "sharding": 2, STAGE: 1}),
    ("the same, `sequence_parallel`", {"mp": 2, "pp": 2, "sharding": 2, STAGE: 1, SEQUENCE: True}),
)


def reference() -> str:
    parts = [INTRODUCTION, *run_config(), *profile(), *presets()]
    return "\n".join(parts)


def run_config() -> Iterator[str]:
    rows = [row for row in key_rows("") if not row["key"].startswith(COPIES_OF_TRAIN)]
    about = {name: key.doc for name, key in keys_of(RunConfig).items()}
    sections = dict.fromkeys(row["key"].partition(".")[0] for row in rows)
    yield "## Run config\n"
    for section in sections:
        yield f"### {section}\n"
        if about.get(section):
            yield f"{sentence(about[section])}\n"
        own = [row for row in rows if row["key"].startswith(f"{section}.")]
        cells = [[code(row["key"]), code(row["default"]), prose(row["meaning"])] for row in own]
        yield table(COLUMNS, cells)
        if section == "Data":
            yield DATA_NOTE


def profile() -> Iterator[str]:
    yield "## Cluster profile\n"
    yield PROFILE_INTRODUCTION
    yield table(COLUMNS, profile_rows(Cluster, ""))
    yield HOSTS_NOTE
    yield table(COLUMNS, profile_rows(Host, ""))


def profile_rows(cls: type, path: str) -> Iterator[list[str]]:
    for name, key in keys_of(cls).items():
        if isinstance(key.kind, Section):
            yield from profile_rows(key.kind.cls, f"{path}{name}.")
        else:
            yield [code(f"{path}{name}"), code(plain(key.default)), prose(key.doc)]


def presets() -> Iterator[str]:
    yield "## Model presets\n"
    yield PRESETS_INTRODUCTION
    columns = ["name", "layers", "hidden size", "heads", "vocabulary", "positions"]
    rows = [[code(name), *map(str, preset)] for name, preset in PRESETS.items()]
    yield table(columns, rows)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(in_a_cell, line))} |" for line in lines) + "\n"


def in_a_cell(text: str) -> str:
    return text.replace("|", "\\|")


def prose(text: str) -> str:
    """Escape what Markdown would take for a tag or for emphasis, outside of backticks."""
    parts = text.split("`")
    outside = [part.replace("<", "&lt;").replace("*", "\\*") for part in parts[::2]]
    parts[::2] = outside
    return "`".join(parts)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def plain(value: object) -> str:
    """A default as YAML writes it; nothing for an empty one."""
    if value is None or value == ():
        return ""
    return "{}" if value == {} else str(value)


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def sent_by_layout() -> str:
    """What the rank that sends most sends per update, by layout."""
    columns = ["layout", "sent by axis", "total", "minimum", "why more"]
    return table(columns, [[name, *_sent(keys)] for name, keys in LAYOUTS])


def _sent(keys: dict[str, object]) -> list[str]:
    paths = {axis: DEGREE_KEYS[axis] for axis in AXES}
    overrides = {**MODEL, **{paths.get(key, key): value for key, value in keys.items()}}
    resolved = load(
        None,
        [Override(key, str(value), "docs/generate.py") for key, value in overrides.items()],
        Machines(1, 8),
    )
    tables = [collectives(resolved.run, resolved.layout, rank) for rank in range(8)]
    rows = max(tables, key=lambda rows: sum(row.sent for row in rows))
    # The summary of a step is 32 bytes: not worth a column.
    *axes, (_, sent, needed) = totals([row for row in rows if row.axis != "world"])
    by_axis = ", ".join(f"{axis} {size_text(own)}" for axis, own, _ in axes)
    return [by_axis, size_text(sent), size_text(needed), prose("; ".join(reasons(rows)))]


def parallelism() -> str:
    """The page with its table written again."""
    before, rest = PARALLELISM.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{sent_by_layout()}\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
    code = 0
    for file, text in ((TARGET, reference()), (PARALLELISM, parallelism())):
        if "--check" not in arguments:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            print(f"{file} is out of date: run python docs/generate.py", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
