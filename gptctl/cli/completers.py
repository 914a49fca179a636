"""What the shell offers after Tab for keys, rules and styles.

Imports are inside the functions: pressing Tab must answer at once.
"""

from __future__ import annotations

import click


def complete_key(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from gptctl.spec.summary import key_rows

    return [row["key"] for row in key_rows(incomplete)]


def complete_rule(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    # From the pages, not from the rules: collecting those imports ssh and Slurm.
    from gptctl.spec.rule_pages import rule_pages

    return [code for code in sorted(rule_pages()) if code.startswith(incomplete.upper())]


def complete_style(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    from gptctl.spec.launch import STYLES

    return [style for style in STYLES if style.startswith(incomplete)]


def complete_tag(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Keys of tags that are in use; after `key=`, its values."""
    from gptctl.jobs.labels import LabelStore

    known = LabelStore().known_tags()
    if "=" in incomplete:
        words = {str(tag) for tag in known}
    else:
        words = {f"{tag.key}=" if tag.value else tag.key for tag in known}
    return sorted(word for word in words if word.startswith(incomplete))


def complete_state(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    from gptctl.jobs.selection import STATES

    return [state for state in STATES if state.startswith(incomplete.upper())]
