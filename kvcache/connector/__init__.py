"""vLLM's side of the block store: the only part of kvcache that imports torch and vllm.

vLLM loads `kvcache.connector.block_connector.HeadwaterConnector` by its module path, once for the
scheduler and once for the worker; both are in the engine's own process and share one session.
Import the modules directly: this file stays free of vllm so that reading a setting costs nothing.
"""
