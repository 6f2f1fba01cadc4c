"""The one package that imports vLLM's engine and its hashing.

Used by: the workers (inprocess.py) and the ingress (codec.py, hashing.py). Importing it fixes the
process environment that vLLM and torch read at their own import, hence before either of them.
Must not: import ray, or be imported by kvcache or router.
"""

from deployments.engine.environment import prepare_environment

prepare_environment()
