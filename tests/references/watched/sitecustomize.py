"""On PYTHONPATH of a plain vLLM server, writes down how clear each choice of a token was.

Each call of vLLM 0.32's `Sampler.sample` adds a line to the file that HEADWATER_LEADS names: a JSON
list with one lead a row of the batch, in nats. A lead is by how much the chosen token's logit could
be lowered before another token is chosen, after penalties, biases, grammar, temperature and the
noise of a seed. It is rounded down to one of LEVELS. Only tests/references/record.py starts such a
server. It costs three more samplings a step.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

WATCHED = "vllm.v1.sample.sampler"
LEVELS = (0.0, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)


def watch(module: Any) -> None:
    """Wrap Sampler.sample."""
    sample, path = module.Sampler.sample, Path(os.environ["HEADWATER_LEADS"])

    def watched(self: Any, logits: Any, metadata: Any, *more: Any, **named: Any) -> Any:
        whole = logits.clone()
        states = {row: one.get_state() for row, one in metadata.generators.items()}
        result = sample(self, logits, metadata, *more, **named)
        after = {row: one.get_state() for row, one in metadata.generators.items()}
        winners = result[0].long().unsqueeze(1)
        low, high = [0] * len(winners), [len(LEVELS)] * len(winners)
        while any(most - least > 1 for least, most in zip(low, high, strict=True)):
            middle = [(least + most) // 2 for least, most in zip(low, high, strict=True)]
            less = whole.new_tensor([-LEVELS[m] for m in middle]).unsqueeze(1)
            for row, one in metadata.generators.items():
                one.set_state(states[row])
            lowered = whole.clone().scatter_add_(1, winners, less)
            again = sample(self, lowered, metadata, *more, **named)[0].long().unsqueeze(1)
            for row, kept in enumerate((again == winners).squeeze(1).tolist()):
                low[row], high[row] = (middle[row], high[row]) if kept else (low[row], middle[row])
        for row, one in metadata.generators.items():
            one.set_state(after[row])
        with path.open("a") as file:
            file.write(json.dumps([LEVELS[place] for place in low]) + "\n")
        return result

    module.Sampler.sample = watched


class WatchingFinder:
    """Finds vLLM's sampler alone; the other finders find the rest."""

    @staticmethod
    def find_spec(name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == WATCHED else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_watch(module: Any) -> None:
            execute(module)
            watch(module)

        spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, WatchingFinder)
