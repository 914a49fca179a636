"""All rules of both programs, gathered from the modules that check them."""

from __future__ import annotations

from importlib import import_module

from trainer.errors import Rule

MODULES = (
    "trainer.config.tree",
    "trainer.config.kinds",
    "trainer.config.layers",
    "trainer.config.dialects",
    "trainer.config.derive",
    "trainer.config.rules",
    "trainer.config.resolve",
    "trainer.layout",
    "gptctl.spec.cluster",
    "gptctl.spec.check",
    "gptctl.spec.launch_rules",
    "gptctl.jobs.preflight",
    "gptctl.backends.local",
    "gptctl.backends.slurm.backend",
    "gptctl.spec.env_lint",
    "gptctl.remote.connection",
)


def all_rules() -> list[Rule]:
    rules = {
        rule
        for name in MODULES
        for rule in vars(import_module(name)).values()
        if isinstance(rule, Rule)
    }
    return sorted(rules, key=lambda rule: rule.code)
