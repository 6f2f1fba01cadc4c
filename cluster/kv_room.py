"""Whether an engine's KV cache holds one request of full length, asked before anything starts.

Called by serve, and by the doctor.
"""

from __future__ import annotations

from cluster.config import MIB, Config
from cluster.errors import ConfigError
from cluster.model_store import ModelFigures


def check_kv_room(config: Config, model: ModelFigures) -> None:
    """Raises ConfigError if an engine's KV cache is too small for one request of full length.

    The engine would refuse too, half a minute later and inside a worker. A model whose figures are
    not known is not judged.
    """
    token_bytes = model.kv_bytes_per_token(config.model.resolved_dtype)
    needed_mib = -(-config.model.max_model_len * token_bytes // MIB)
    if needed_mib > config.engine.kv_cache_mib:
        message = (
            f"engine.kv_cache_mib is {config.engine.kv_cache_mib}, but one request of "
            f"model.max_model_len ({config.model.max_model_len}) tokens takes {needed_mib} MiB: "
            "raise the one or lower the other"
        )
        raise ConfigError(message)
