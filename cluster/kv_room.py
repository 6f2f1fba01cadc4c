"""Whether an engine's KV cache holds one request of full length, asked before anything starts.

Called by serve, prepare and the doctor, and by cluster/auto_values.py, which chooses its size.
"""

from __future__ import annotations

from cluster.config import MIB, Config
from cluster.errors import ConfigError
from cluster.model_store import ModelFigures


def kv_mib(tokens: int, dtype: str, model: ModelFigures) -> int:
    """Whole MiB that hold so many tokens; 0 where the model's figures are not known."""
    return -(-tokens * model.kv_bytes_per_token(dtype) // MIB)


def full_length_mib(config: Config, dtype: str, model: ModelFigures) -> int:
    """For one request of full length, in whole blocks; vLLM keeps one more block for itself."""
    block = config.engine.block_size_tokens
    blocks = -(-config.model.max_model_len // block) + 1
    return kv_mib(blocks * block, dtype, model)


def check_kv_room(config: Config, model: ModelFigures) -> None:
    """Raises ConfigError if an engine's KV cache is too small for one request of full length.

    The engine would refuse too, half a minute later and inside a worker. A model whose figures are
    not known is not judged.
    """
    needed_mib = full_length_mib(config, config.model.resolved_dtype, model)
    if needed_mib * MIB > config.engine.kv_cache_bytes:
        message = (
            f"engine.kv_cache_mib is {config.engine.kv_cache_mib}, but one request of "
            f"model.max_model_len ({config.model.max_model_len}) tokens takes {needed_mib} MiB: "
            "raise the one or lower the other"
        )
        raise ConfigError(message)
