"""Collect all rules of gptctl and the trainer, for `gptctl rules`.

Each rule is defined in the module that checks it.
"""

from __future__ import annotations

from importlib import import_module

from trainer.errors import Rule

# Imported only when the rules are listed. A test checks that no module with a rule is missing.
MODULES = (
    "trainer.config.tree",
    "trainer.config.full_width",
    "trainer.config.kinds",
    "trainer.config.layers",
    "trainer.config.dialects",
    "trainer.config.switches",
    "trainer.config.tasks",
    "trainer.config.derive",
    "trainer.config.rules",
    "trainer.config.schedule_rules",
    "trainer.config.resolve",
    "trainer.layout_rules",
    "gptctl.spec.cluster",
    "gptctl.spec.container_profile",
    "gptctl.spec.check",
    "gptctl.spec.launch_rules",
    "gptctl.spec.notify",
    "gptctl.spec.program_words",
    "gptctl.spec.machine_rules",
    "gptctl.spec.start_checkpoint",
    "gptctl.jobs.preflight",
    "gptctl.jobs.resume",
    "gptctl.backends.local",
    "gptctl.backends.slurm.backend",
    "gptctl.spec.sweep",
    "gptctl.spec.outputs",
    "gptctl.spec.env_lint",
    "gptctl.remote.host_error",
)


def all_rules() -> list[Rule]:
    """All rules, sorted by code."""
    # A set: some modules import rules of others.
    rules = {
        rule
        for name in MODULES
        for rule in vars(import_module(name)).values()
        if isinstance(rule, Rule)
    }
    # Codes are stable, so the list is too.
    return sorted(rules, key=lambda rule: rule.code)
