"""The commands in the groups of the help: name, summary, options and examples of each.

Called by cluster/cli.py. Imports the standard library alone: the help must appear on a machine
where nothing is installed yet. What a command does is `run(arguments) -> exit code` in the module
of its name in cluster/commands.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster import cli_options as options
from cluster.commands import test


@dataclass(frozen=True, slots=True)
class Command:
    """A command for the help and the parser. examples: command lines, each with a remark."""

    name: str
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    examples: tuple[tuple[str, str], ...] = ()


GROUPS: Mapping[str, tuple[Command, ...]] = {
    "Run": (
        Command(
            "serve",
            "start the cluster and answer until Ctrl-C",
            options.serve,
            (
                ("serve", "the bundled model, at http://127.0.0.1:8000/v1"),
                ("serve ./my-model --port 9000", "a folder, or a hub name such as owner/name"),
                ("serve --decode-workers 2", ""),
                ("serve --detach", "in the background; ./headwater stop ends it"),
            ),
        ),
        Command(
            "stop",
            "stop the running cluster; running requests may finish",
            options.stop,
            (
                ("stop", "what serve started here"),
                ("stop --address HOST:PORT", "what a killed serve left on that Ray cluster"),
            ),
        ),
        Command(
            "chat",
            "talk with the running model; shows TTFT, tokens/s and cached tokens",
            options.chat,
            (
                ("chat", ""),
                ('chat --system "Answer in one sentence."', ""),
                ("echo Hello | ./headwater chat", ""),
            ),
        ),
        Command(
            "demo",
            "one minute, narrated: cold and warm, a shared prompt, a worker killed in mid-sentence",
            options.demo,
            (("demo --no-kill", "without the scene that kills a worker"),),
        ),
    ),
    "Inspect": (
        Command(
            "status",
            "show workers, requests and blocks of the running cluster",
            options.status,
            (
                ("status", "live, until Ctrl-C"),
                ("status --once --ledger", "once, with all that is held"),
                ("status --json", "for machines"),
            ),
        ),
        Command(
            "logs",
            "show the logs of the running cluster: serve's own, or a worker's",
            options.logs,
            (
                ("logs", "what serve says"),
                ("logs decode-abcdefgh", "a worker, by its name in ./headwater status"),
                ("logs decode -f", "all decode workers, also those that replace them"),
            ),
        ),
        Command(
            "explain",
            "tell what happened to a request (the id is in the header x-headwater-request)",
            options.explain,
            (("explain", "the newest request"), ("explain ID", "")),
        ),
        Command(
            "diagnose",
            "name what binds the running cluster now, with evidence and the setting to change",
            options.diagnose,
            (("diagnose --seconds 30", ""),),
        ),
        Command(
            "doctor",
            "check this machine, and say what to do",
            options.doctor,
            (
                ("doctor", "as serve would start with the same options"),
                ("doctor --quick --json", ""),
            ),
        ),
        Command(
            "config",
            "show each configuration value with its source",
            options.config,
            (("config", ""), ("config --yaml >headwater.yaml", "a file to start from")),
        ),
    ),
    "Measure": (
        Command(
            "load",
            "load tests: run, replay, sweep, report, compare",
            options.load,
            (
                ("load run --rate 0.5 --requests 100", "on the cluster that runs here"),
                ("load run --url URL --concurrency 4 --requests 50", "on any server"),
                ("load run --help", "each of run, replay, sweep, report, compare has its own"),
            ),
        ),
        Command(
            "profile",
            "measure what plans are made from: prefill, decode step, hand-over",
            options.profile,
            (("profile --quick", ""),),
        ),
        Command(
            "plan",
            "plan capacity: KV memory of a model, workers for an SLA",
            options.plan,
            (
                ("plan --model FOLDER --context 4096 --device-memory 80GB --concurrent 64", ""),
                ("plan --ttft-ms 2000 --tpot-ms 100 --rate 0.5", "from ./headwater profile"),
            ),
        ),
        Command(
            "lessons",
            "inference explained, each answer measured here on a real engine",
            options.lessons,
            (("lessons --list", ""), ("lessons --quick", "a few minutes for all")),
        ),
        Command(
            "accept",
            "check equality, hand-off, resume, bandwidth and ledger on the running cluster",
            options.accept,
            (("accept --kill", "kills a decode worker, to check resume"),),
        ),
    ),
    "Administer": (
        Command(
            "prepare",
            "fetch, convert and check the model, without starting anything",
            options.prepare,
            (("prepare owner/name", ""),),
        ),
        Command(
            "keys",
            "make, list and revoke API keys",
            options.keys,
            (
                ("keys add ann --tenant blue", "shows the key, once"),
                ("keys list", ""),
                ("keys revoke ann", ""),
            ),
        ),
        Command(
            "dashboards",
            "bring the dashboards to a Grafana, compare them, or fetch them from it",
            options.dashboards,
            (("dashboards push --url http://127.0.0.1:3000", ""),),
        ),
        Command(
            "test",
            test.SUMMARY,
            test.add_arguments,
            (("test", ""), ("test tests/unit -k router", "")),
        ),
    ),
}
COMMANDS: Mapping[str, Command] = {
    command.name: command for group in GROUPS.values() for command in group
}
