"""What must stand before torch and vLLM are imported by the engines' processes.

Imported first by the fork server and by each engine's process (engine.py), and by nobody else:
importing it changes the environment of the process.
"""

from __future__ import annotations

import logging
import os

import deployments.engine  # noqa: F401 - sets what any engine of ours needs

os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        # The lessons pin the process themselves.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
)
# torch tells at import that Triton is missing, which no CPU engine needs.
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
