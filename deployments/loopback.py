"""Keeps the internal gRPC port of Serve replicas on loopback, where all else is on loopback.

Ray runs ``bind_replicas_to_loopback`` in each worker process of a local cluster before anything
else (runtime_env ``worker_process_setup_hook``; cluster/local_ray sets it). Ray 2.60 hard-codes
``[::]:0`` in ray/serve/_private/replica.py: a port without authentication on every address.
"""

from __future__ import annotations

HOOK = "deployments.loopback.bind_replicas_to_loopback"


def bind_replicas_to_loopback() -> None:
    """Replace the function through which a replica opens its port. Mutates one Ray module.

    Raises AttributeError when Ray has moved it, which ends the worker: better than an open port.
    """
    from ray.serve._private import replica

    original = replica.add_port_to_grpc_server

    def on_loopback(server: object, address: str) -> int:
        port: int = original(server, address.replace("[::]", "127.0.0.1"))
        return port

    replica.add_port_to_grpc_server = on_loopback
