"""`headwater doctor`: whether this machine can run it, and what to do where it cannot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from cluster import config_sources
from cluster.auto_values import resolve
from cluster.machine_checks import IMPORTS, SPEED, Finding, Level, judge
from cluster.machine_facts import gather


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 if one is a failure. Raises ConfigError."""
    config = config_sources.load(arguments).config
    if not arguments.quick and sys.stderr.isatty():
        sys.stderr.write(
            "Importing ray, torch and vllm as serve will (--quick leaves it out) ...\n"
        )
    facts = gather(config, imports=not arguments.quick)
    resolved = resolve(config, [facts.node], facts.model.figures)
    findings = judge(facts, resolved.config)
    if arguments.quick:
        findings = [finding for finding in findings if finding.check not in {IMPORTS, SPEED}]
    failed = any(finding.level is Level.FAILURE for finding in findings)
    sys.stdout.write(as_json(findings) if arguments.json else as_table(findings))
    return 1 if failed else 0


def as_json(findings: Sequence[Finding]) -> str:
    """An object: ok, and the checks in order."""
    ok = all(finding.level is not Level.FAILURE for finding in findings)
    return json.dumps({"ok": ok, "checks": [asdict(one) for one in findings]}, indent=2) + "\n"


def as_table(findings: Sequence[Finding]) -> str:
    """A line a check, and a last one that counts."""
    width = max(len(finding.check) for finding in findings)
    lines = [
        f"{finding.level.upper() if finding.level is Level.FAILURE else finding.level:<7}  "
        f"{finding.check:<{width}}  {finding.message}"
        for finding in findings
    ]
    counts = {level: sum(one.level is level for one in findings) for level in Level}
    told = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    verdict = "Mend the failures first." if counts[Level.FAILURE] else "./headwater serve can run."
    return "\n".join([*lines, "", f"{told}. {verdict}"]) + "\n"
