"""Runs Ray Serve LLM's prefill and decode application until a signal ends it.

Run: `python -m loadtests.compare.ray_llm_app SETTINGS.json --port N`, by ray_llm.py, with a
PYTHONPATH that holds what Ray Serve LLM needs. On a Ray cluster of its own, which ends with it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

# Ray's logical CPUs, of which it has an actor for each process; cores are bound otherwise.
LOGICAL_CPUS = 16
OBJECT_STORE_BYTES = 256 << 20
SERVING = "the application serves"
"""Printed when it does."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(arguments: list[str] | None = None) -> int:
    """Serve."""
    parser = argparse.ArgumentParser(description="Ray Serve LLM with prefill and decode apart")
    parser.add_argument("settings", type=Path, help="arguments of build_pd_openai_app, as JSON")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(arguments)
    settings = json.loads(options.settings.read_text(encoding="utf-8"))
    _end_on_signals()

    import ray
    from ray import serve
    from ray.serve.llm import build_pd_openai_app

    with tempfile.TemporaryDirectory(prefix="hwc-", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(
                address="local",
                num_cpus=LOGICAL_CPUS,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=True,
                _temp_dir=folder,
                _node_ip_address="127.0.0.1",
            )
            _end_on_signals()  # Ray has set handlers of its own
            serve.start(http_options={"host": "127.0.0.1", "port": options.port})
            serve.run(build_pd_openai_app(settings))
            sys.stdout.write(f"{SERVING}\n")
            sys.stdout.flush()
            while True:
                signal.pause()
        finally:
            if ray.is_initialized():
                serve.shutdown()
            ray.shutdown()
    raise AssertionError("a signal ends it")


def _end_on_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, _end)


def _end(*_: object) -> None:
    """Also while it still starts; the shutdown that follows is not cut short."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
