"""What runs inside pods: installation, the question. In real shells, beside stand-ins."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deployments.edge.live_page import page_files
from helm import layer
from helm.files import question
from tests.helm.chart import CHART, Json

FILES = CHART / "files"


def run(script: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(FILES / script), *words],
        env={"PATH": os.environ["PATH"], **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("script", sorted(path.name for path in FILES.glob("*.sh")))
def test_bash_understands_each_script(script: str) -> None:
    assert subprocess.run(["bash", "-n", str(FILES / script)], check=False).returncode == 0


# ---- installation ---------------------------------------------------------------------------


def packed(folder: Path, launcher: str) -> Path:
    path = folder / "layer.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        content = f"#!/bin/bash\n{launcher}\n".encode()
        entry = tarfile.TarInfo("code/headwater")
        entry.size, entry.mode = len(content), 0o755
        tar.addfile(entry, io.BytesIO(content))
    return path


def install(folder: Path, archive: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    given = {
        "HOME": str(folder / "home"),
        "HEADWATER_ROOT": str(folder / "root"),
        "HEADWATER_LAYER": str(archive),
        "HEADWATER_BUILD": "gpu",
        **environ,
    }
    return run("install.sh", **given)


def test_the_launcher_of_the_unpacked_layer_makes_the_environment(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    archive = packed(tmp_path, f'echo "$@" >{tmp_path}/told')
    done = install(tmp_path, archive)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "told").read_text() == "config\n"
    assert (tmp_path / "home").is_dir()


def test_a_failed_installation_fails_the_pod(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    assert install(tmp_path, packed(tmp_path, "exit 3")).returncode == 3


def test_a_configmap_without_the_layer_is_told(tmp_path: Path) -> None:
    done = install(tmp_path, tmp_path / "nothing")
    assert done.returncode == 1
    assert "lacks the key layer.tar.xz" in done.stderr


NO_NUMA = """
case "$*" in
    *libnuma*) ls "$HEADWATER_ROOT"/lib/libnuma.so.1 >/dev/null 2>&1 ;;
    *) exec {python} "$@" ;;
esac"""


def test_a_missing_library_is_fetched_without_root(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    bin_folder = tmp_path / "bin"
    program(bin_folder, "python3", NO_NUMA.format(python=sys.executable))
    program(bin_folder, "apt-get", 'case "$*" in *download*) touch libnuma1_2.deb ;; esac')
    program(bin_folder, "dpkg-deb", 'mkdir -p "$3/usr/lib"; touch "$3/usr/lib/libnuma.so.1"')
    path = f"{bin_folder}:{os.environ['PATH']}"
    archive = packed(tmp_path, "true")
    done = install(tmp_path, archive, HEADWATER_BUILD="cpu", PATH=path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "root/lib/libnuma.so.1").is_file()
    (tmp_path / "root/lib/libnuma.so.1").unlink()
    program(bin_folder, "apt-get", "exit 100")
    done = install(tmp_path, archive, HEADWATER_BUILD="cpu", PATH=path)
    assert done.returncode == 1
    assert "build an image from helm/images" in done.stderr


# ---- the model ------------------------------------------------------------------------------


def test_the_model_is_prepared_by_the_pods_own_configuration(tmp_path: Path) -> None:
    told = tmp_path / "told"
    program(
        tmp_path / "code", "headwater", f'echo "$@" >{told}; cat "$HOME/headwater.yaml" >>{told}'
    )
    text = "model:\n  path_or_name: a/b # %s"
    home = tmp_path / "home"
    done = run("prepare-model.sh", HOME=str(home), HEADWATER_ROOT=str(tmp_path), MODEL_CONFIG=text)
    assert done.returncode == 0, done.stderr
    words, _, config = told.read_text().partition("\n")
    assert words.startswith(f"prepare --config {home}/headwater.yaml --set state.cache_dir=")
    assert config == f"{text}\n"


# ---- the layer ------------------------------------------------------------------------------


@pytest.mark.parametrize("build", sorted(layer.LOCKS))
def test_the_layer_is_equal_each_time_and_a_configmap_holds_it(build: str) -> None:
    first = layer.archive(build)
    assert layer.archive(build) == first
    assert len(first) <= layer.BYTES_MAX
    with tarfile.open(fileobj=io.BytesIO(first)) as tar:
        entries = {entry.name: entry for entry in tar.getmembers()}
    assert entries["code/headwater"].mode == 0o755
    assert {entry.mtime for entry in entries.values()} == {0}
    for name in (
        "code/cluster/application.py",
        "code/deployments/workers/worker.py",
        "code/loadtests/planner/memory.py",
        *(f"code/deployments/edge/page/{name}" for name in page_files()),
        *(f"code/requirements/{lock}" for lock in layer.LOCKS[build]),
    ):
        assert name in entries
    assert not [name for name in entries if "__pycache__" in name or name.startswith("code/tests")]


def test_the_commands_of_the_init_containers_run_from_the_layer(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(layer.archive("cpu"))) as tar:
        tar.extractall(tmp_path, filter="data")
    for words in (["config"], ["prepare", "--help"]):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "cluster.cli", *words],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "code"), "HOME": "/tmp"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_a_layer_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "BYTES_MAX", 1000)
    with pytest.raises(ValueError, match="build an image instead"):
        layer.archive("cpu")


# ---- the question ---------------------------------------------------------------------------


@contextmanager
def service(statuses: list[int], content: str | None) -> Iterator[tuple[str, list[Json]]]:
    """An endpoint whose /ready gives these statuses in turn, the last for good."""
    asked: list[Json] = []

    class Answer(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.reply(statuses.pop(0) if len(statuses) > 1 else statuses[0], {"waiting": "x"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append({"body": body, "authorization": self.headers["authorization"]})
            if content is None:
                self.reply(401, {"error": {"message": "no key"}})
            else:
                self.reply(200, {"choices": [{"message": {"content": content}}]})

        def reply(self, status: int, answer: Json) -> None:
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def environ_for(endpoint: str, **more: str) -> dict[str, str]:
    return {"ENDPOINT": endpoint, "MODEL": 'a"b', "QUESTION": "Why?", "TIMEOUT_S": "30", **more}


def test_a_question_is_asked_once_the_service_is_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(question, "POLL_S", 0.01)
    with service([503, 503, 200], "Because.") as (endpoint, asked):
        assert question.main(environ_for(endpoint)) == 0
    assert capsys.readouterr().out == "Q: Why?\nA: Because.\n"
    (only,) = asked
    assert only["body"]["model"] == 'a"b'
    assert only["authorization"] is None


def test_the_key_of_the_file_is_sent(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("key-1\n")
    with service([200], "Yes.") as (endpoint, asked):
        assert question.main(environ_for(endpoint, KEY_FILE=str(key))) == 0
    assert asked[0]["authorization"] == "Bearer key-1"


@pytest.mark.parametrize(
    ("statuses", "content", "timeout_s", "words"),
    [
        ([503], "Yes.", "0", "is not ready after 0 s: status 503"),
        ([200], " \n", "30", "the answer is empty"),
        ([200], None, "30", "keys are set: name a Secret with one"),
    ],
)
def test_what_is_no_answer_fails_the_test_with_one_line(
    statuses: list[int],
    content: str | None,
    timeout_s: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with service(statuses, content) as (endpoint, _):
        assert question.main(environ_for(endpoint, TIMEOUT_S=timeout_s)) == 1
    assert words in capsys.readouterr().err


def test_nobody_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with service([200], "x") as (endpoint, _):
        pass
    assert question.main(environ_for(endpoint, TIMEOUT_S="0")) == 1
    assert "is not ready" in capsys.readouterr().err
