"""vLLM's request and output structs, under our roof: other modules of the package import them here.

Called by: engine_client, engine_loop. Must not: hold anything else.
"""

from __future__ import annotations

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

__all__ = ["EngineCoreOutput", "EngineCoreRequest"]
