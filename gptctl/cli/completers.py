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
