from pathlib import Path

import pytest

from deployments.secret import SECRET_BYTES_MIN, read_secret


def test_a_secret_is_the_files_content_without_the_line_end(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef\n")
    assert read_secret(str(path)) == b"0123456789abcdef"


def test_a_file_that_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    with pytest.raises(RuntimeError, match=rf"{path} cannot be read .*; put it there"):
        read_secret(str(path))


@pytest.mark.parametrize("content", [b"", b"short", b" " * 40, b"x" * (SECRET_BYTES_MIN - 1)])
def test_a_secret_that_can_be_guessed_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match=f"it needs {SECRET_BYTES_MIN}"):
        read_secret(str(path))
