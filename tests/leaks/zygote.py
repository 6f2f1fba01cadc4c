"""Starts the processes of the leak tests in milliseconds: forks of one that has imported it all.

`python -m tests.leaks.zygote` reads JSON lines {"module", "args"} on standard input, forks a child
that runs module.main(**args), and prints its pid. It ends with its standard input.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback

from deployments.engine.environment import prepare_environment

MODULES = ("cluster_process", "ingress_process", "worker_process")


def main() -> None:
    prepare_environment()
    modules = {name: importlib.import_module(f"tests.leaks.{name}") for name in MODULES}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: no zombies
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while line := sys.stdin.readline():
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(modules[order["module"]].main, order["args"])
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def _child(run: object, args: dict[str, object]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # the zygote's own output is pids
    try:
        run(**args)  # type: ignore[operator]
    except BaseException:  # noqa: BLE001 - a child must not go on as the zygote
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
