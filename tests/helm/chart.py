"""Rendering the chart, and finding one's way in what came out."""

from __future__ import annotations

import copy
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
VALUES_FILES = sorted((CHART / "values").glob("*.yaml"))
# As a cluster with KubeRay's and the Prometheus operator tells.
KINDS = ("ray.io/v1/RayService", "monitoring.coreos.com/v1")
Json = dict[str, Any]


class Refused(Exception):
    """Helm did not render; its words."""


class Helm:
    """The program, with folders of its own. Equal calls are made once."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._program = program
        self._environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "KUBECONFIG": os.devnull,
        }
        self._rendered: dict[tuple[str, ...], str] = {}
        self._read: dict[str, list[Json]] = {}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self._program), *words],
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def text(
        self,
        *flags: str,
        release: str = "hw",
        kinds: tuple[str, ...] = KINDS,
        chart: Path = CHART,
    ) -> str:
        """What `helm template` prints. Raises Refused."""
        words = ["template", release, str(chart), "--namespace", "serving", *flags]
        for kind in kinds:
            words += ["--api-versions", kind]
        key = tuple(words)
        if key not in self._rendered:
            done = self.run(*words)
            if done.returncode != 0:
                raise Refused(done.stderr)
            self._rendered[key] = done.stdout
        return self._rendered[key]

    def render(
        self,
        *flags: str,
        release: str = "hw",
        kinds: tuple[str, ...] = KINDS,
        chart: Path = CHART,
    ) -> Manifests:
        """The objects, the caller's own."""
        text = self.text(*flags, release=release, kinds=kinds, chart=chart)
        if text not in self._read:
            found = yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            self._read[text] = [one for one in found if one]
        return Manifests(copy.deepcopy(self._read[text]))


class Manifests(list[Json]):
    """Rendered objects."""

    def of(self, kind: str) -> list[Json]:
        return [one for one in self if one["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> Json:
        (found,) = [one for one in self.of(kind) if name in {None, one["metadata"]["name"]}]
        return found

    @property
    def service(self) -> Json:
        """The RayService's spec."""
        found: Json = self.one("RayService")["spec"]
        return found

    @property
    def cluster(self) -> Json:
        found: Json = self.service["rayClusterConfig"]
        return found

    @property
    def serve_config(self) -> Json:
        found: Json = yaml.safe_load(self.service["serveConfigV2"])
        return found

    @property
    def application(self) -> Json:
        (found,) = self.serve_config["applications"]
        assert isinstance(found, dict)
        return found

    @property
    def groups(self) -> dict[str, Json]:
        """Groups of pods by name, the head among them."""
        workers = {group["groupName"]: group for group in self.cluster["workerGroupSpecs"]}
        return {"head": self.cluster["headGroupSpec"], **workers}

    def pod(self, group: str) -> Json:
        """The pod template of a group."""
        found: Json = self.groups[group]["template"]
        return found

    def container(self, group: str) -> Json:
        """Ray's container in it."""
        found: Json = self.pod(group)["spec"]["containers"][0]
        return found

    def all_pods(self) -> Iterator[tuple[str, Json]]:
        """Each pod template, whoever makes the pods of it, by a name for messages."""
        for name, group in self.groups.items():
            yield name, group["template"]
        for one in self.of("StatefulSet"):
            yield one["metadata"]["name"], one["spec"]["template"]
        for one in self.of("Pod"):
            yield one["metadata"]["name"], one


def sets(*assignments: str) -> tuple[str, ...]:
    """Flags for KEY=VALUE."""
    return tuple(word for one in assignments for word in ("--set", one))


def mebibytes(quantity: str) -> int:
    """Of a memory quantity as the chart writes them."""
    assert quantity.endswith("Mi"), quantity
    return int(quantity.removesuffix("Mi"))
