"""Loads the configuration and remembers where each value came from.

Later sources win: defaults, one YAML file, the environment (HEADWATER_SECTION__FIELD), flags.
Called by every command that needs a value. Unknown keys are errors that name the
nearest right one; every fault is reported at once, each with its place.
"""

from __future__ import annotations

import difflib
import os
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError

from cluster.config import Config
from cluster.config_flags import FLAGS
from cluster.config_section import AUTO_TAGS
from cluster.errors import ConfigError

if typing.TYPE_CHECKING:
    import argparse

    from pydantic.fields import FieldInfo

DEFAULT_FILE = Path("headwater.yaml")
ENVIRONMENT_PREFIX = "HEADWATER_"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration with the source of each value, by dotted key."""

    config: Config
    sources: Mapping[str, str]


@dataclass(slots=True)
class _Gathered:
    """Values and their places so far, by dotted key; later sources overwrite earlier ones."""

    values: dict[str, object] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def put(self, key: str, value: object, source: str) -> None:
        """Records one value. Mutates."""
        self.values[key] = value
        self.sources[key] = source

    def fault(self, place: str, message: str) -> None:
        """Records what is wrong at a place. Mutates."""
        self.faults.append(f"{place}: {message}")


def leaves(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted key and description of every value, in the order of the models."""
    for name, info in section.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def value_of(config: Config, key: str) -> object:
    """The value of one dotted key."""
    found: object = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


def load(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Loaded:
    """Reads all sources. Raises ConfigError with every fault that was found."""
    gathered = _Gathered()
    _read_file(gathered, arguments.config)
    _read_environment(gathered, environ)
    _read_flags(gathered, arguments)
    config = _validate(gathered)
    if config is None or gathered.faults:
        raise ConfigError("\n".join(gathered.faults))
    sources = {key: gathered.sources.get(key, "default") for key, _ in leaves()}
    return Loaded(config, types.MappingProxyType(sources))


def nearest(key: str) -> str:
    """' (did you mean http.port?)', or nothing if no key resembles this one."""
    keys = [name for name, _ in leaves()]
    same_name = [name for name in keys if name.rpartition(".")[2] == key.rpartition(".")[2]]
    close = same_name or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    if not close:
        last = {name.rpartition(".")[2]: name for name in keys}
        near = difflib.get_close_matches(key.rpartition(".")[2], last, n=1, cutoff=0.6)
        close = [last[name] for name in near]
    return f" (did you mean {' or '.join(close[:2])}?)" if close else ""


def _read_file(gathered: _Gathered, named: Path | None) -> None:
    path = named or DEFAULT_FILE
    if named is None and not path.exists():
        return
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}"
        raise ConfigError(message) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = f"{path} is not YAML: {error}"
        raise ConfigError(message) from error
    if root is not None:
        _read_node(gathered, path, root, "")


def _read_node(gathered: _Gathered, path: Path, node: yaml.Node, prefix: str) -> None:
    place = f"{path}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode):
        gathered.fault(place, f"{prefix.rstrip('.') or 'the file'} must be a mapping")
        return
    keys = {key for key, _ in leaves()}
    sections = {key[: at + 1] for key in keys for at, sign in enumerate(key) if sign == "."}
    seen: set[str] = set()
    for name_node, value_node in node.value:
        key = f"{prefix}{name_node.value}"
        place = f"{path}:{name_node.start_mark.line + 1}"
        if key in seen:
            gathered.fault(place, f"{key} is given twice")
        seen.add(key)
        if f"{key}." in sections:
            _read_node(gathered, path, value_node, f"{key}.")
        elif key not in keys:
            gathered.fault(place, f"unknown key {key}{nearest(key)}")
        else:
            try:
                value = yaml.SafeLoader("").construct_object(value_node, deep=True)
            except yaml.YAMLError as error:
                gathered.fault(place, f"{key}: {getattr(error, 'problem', error)}")
            else:
                gathered.put(key, value, place)


def _read_environment(gathered: _Gathered, environ: Mapping[str, str]) -> None:
    keys = dict(leaves())
    by_variable = {ENVIRONMENT_PREFIX + key.replace(".", "__").upper(): key for key in keys}
    short = {name.replace("-", "_").upper(): flag.key for name, flag in FLAGS.items()}
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if variable in by_variable:
            key = by_variable[variable]
            gathered.put(key, _from_text(environ[variable], keys[key]), f"env {variable}")
        elif "__" in name or name in short:
            key = short.get(name) or name.lower().replace("__", ".")
            guess = difflib.get_close_matches(
                ENVIRONMENT_PREFIX + key.replace(".", "__").upper(), by_variable, n=1, cutoff=0.5
            )
            hint = f" (did you mean {guess[0]}?)" if guess else ""
            gathered.fault(f"env {variable}", f"unknown variable{hint}")


def _read_flags(gathered: _Gathered, arguments: argparse.Namespace) -> None:
    keys = dict(leaves())
    for name, flag in FLAGS.items():
        text = getattr(arguments, flag.dest, None)
        if text is not None:
            gathered.put(flag.key, _from_text(text, keys[flag.key]), f"flag --{name}")
    for assignment in arguments.set:
        key, equals, text = assignment.partition("=")
        if not equals:
            gathered.fault(f"flag --set {assignment}", "must be KEY=VALUE")
        elif key not in keys:
            gathered.fault(f"flag --set {assignment}", f"unknown key {key}{nearest(key)}")
        else:
            gathered.put(key, _from_text(text, keys[key]), "flag --set")


def _from_text(text: str, info: FieldInfo) -> object:
    """A value from the environment or a flag: text stays text where the field takes text.

    A mapping is written as in YAML: {name: 1}; a list likewise, or with commas: a,b.
    """
    if typing.get_origin(info.annotation) is tuple and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if typing.get_origin(info.annotation) in {dict, tuple}:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text  # which is no mapping: the fault is told with its place
    kinds = typing.get_args(info.annotation) or (info.annotation,)
    if type(None) in kinds and text.lower() in {"", "null", "none"}:
        return None
    return text


def _validate(gathered: _Gathered) -> Config | None:
    tree: dict[str, typing.Any] = {}
    for key, value in gathered.values.items():
        *sections, name = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[name] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"] if part not in AUTO_TAGS)
            together = {
                name
                for name in gathered.sources
                if name.startswith(f"{key}.") or key.startswith(f"{name}.")
            }
            places = sorted(
                {gathered.sources[name] for name in {key, *together} & {*gathered.sources}}
            )
            place = ", ".join(places) or "default"
            message = item["msg"].removeprefix("Value error, ")
            given = (
                "" if isinstance(item["input"], dict | BaseModel) else f" (given {item['input']!r})"
            )
            gathered.fault(place, f"{key}: {message}{given}")
        return None
