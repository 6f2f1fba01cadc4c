"""The flags of common configuration values: which key each one sets, and what the help says.

Called by cluster/cli_options.py, which names the flags that a command reads, and by
config_sources.py, which takes their values. Imports the standard library alone: the help must
appear on a machine where nothing is installed yet.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MODEL = "model"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag by the key that it sets, the word for its value, and a line of help."""

    key: str
    metavar: str
    help: str

    @property
    def dest(self) -> str:
        """Its attribute of the parsed arguments."""
        return f"set:{self.key}"


FLAGS: Mapping[str, Flag] = types.MappingProxyType(
    {
        MODEL: Flag(
            "model.path_or_name",
            "MODEL",
            "a folder with a Hugging Face model, a hub name (owner/name), or the bundled model",
        ),
        "served-name": Flag("model.served_name", "NAME", "the model's name for clients"),
        "dtype": Flag("model.dtype", "DTYPE", "precision of weights and KV"),
        "max-model-len": Flag(
            "model.max_model_len", "N", "longest request in tokens, prompt and output together"
        ),
        "host": Flag("http.host", "HOST", "address to listen on; by default this machine only"),
        "port": Flag("http.port", "PORT", "TCP port; 0 takes a free one"),
        "prefill-workers": Flag("workers.prefill.replicas", "N", "number of prefill workers"),
        "decode-workers": Flag("workers.decode.replicas", "N", "number of decode workers"),
        "cores-per-worker": Flag("workers.cores_per_worker", "N", "cores of one worker"),
        "kv-mib": Flag("engine.kv_cache_mib", "MIB", "KV cache of one engine"),
        "slab-mib": Flag("slab.mib", "MIB", "shared memory for KV blocks on each node"),
        "address": Flag(
            "ray.address", "HOST:PORT", "a running Ray cluster, instead of one started here"
        ),
        "dashboard-port": Flag("ray.dashboard_port", "PORT", "of Ray's dashboard; 0: a free one"),
        "state-dir": Flag(
            "state.dir", "FOLDER", "where the running cluster keeps its address, logs and keys"
        ),
        "cache-dir": Flag("state.cache_dir", "FOLDER", "where prepared models are kept"),
    }
)


def add_arguments(
    parser: argparse.ArgumentParser, *flags: str, model_positional: bool = False
) -> None:
    """Adds --config, --set and the named flags. Mutates the parser.

    model_positional: the model may be named without its flag, too; argparse rejects both at once.
    """
    group = parser.add_argument_group("configuration", "all values: ./headwater config")
    for name in flags:
        flag = FLAGS[name]
        place = group.add_mutually_exclusive_group() if name == MODEL else group
        place.add_argument(
            f"--{name}", dest=flag.dest, metavar=flag.metavar, help=f"{flag.help} ({flag.key})"
        )
        if name == MODEL and model_positional:
            place.add_argument(
                flag.dest,
                nargs="?",
                metavar=flag.metavar,
                default=argparse.SUPPRESS,  # absent, it must not erase the flag's value
                help="the same, without the flag",
            )
    group.add_argument("--config", metavar="FILE", type=Path, help="default: ./headwater.yaml")
    group.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any value, for example --set workers.decode.replicas=2",
    )
