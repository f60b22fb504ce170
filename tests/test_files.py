"""Files are written completely or not at all, for every kind of path and every kind of failure."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qframework.errors import FileFormatError, QFrameworkError
from qframework.files import atomic_write, open_regular, parse_json, read_json, write_json, write_text

PACKAGE = Path(__file__).parent.parent / "qframework"


def write(path: Path, data: bytes = b"new") -> None:
    with atomic_write(path) as file:
        file.write(data)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    return path


# Kinds of paths


@pytest.mark.parametrize("links", [1, 2])
@pytest.mark.parametrize("exists", [True, False])
def test_symbolic_links_are_followed(tmp_path: Path, links: int, exists: bool) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if exists:
        (folder / "target").write_bytes(b"old")
    path = folder / "target"
    for number in range(links):
        link = tmp_path / f"link{number}"
        link.symlink_to(os.path.relpath(path, tmp_path))
        path = link
    write(path)
    assert path.is_symlink()
    assert (folder / "target").read_bytes() == b"new"
    assert not (folder / "target").is_symlink()
    assert [each.name for each in folder.iterdir()] == ["target"]


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")


def make_socket(path: Path) -> None:
    os.chdir(path.parent)  # the path of a socket has 108 bytes at most
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)


NOT_REGULAR = {"FIFO": make_fifo, "device": make_device, "socket": make_socket, "folder": Path.mkdir}


@pytest.mark.parametrize("through_link", [False, True])
@pytest.mark.parametrize(("kind", "make"), NOT_REGULAR.items(), ids=NOT_REGULAR)
def test_other_than_regular_files_are_refused(tmp_path, monkeypatch, kind, make, through_link) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "odd"
    make(path)
    before = os.lstat(path)
    named = path
    if through_link:
        named = tmp_path / "link"
        named.symlink_to(path)
    with pytest.raises(QFrameworkError, match=rf"{named.name} must be a regular file.*, got a {kind}"):
        write(named)
    with pytest.raises(FileFormatError, match=rf"{named.name} must be a regular file.*, got a {kind}"):
        open_regular(named)
    after = os.lstat(path)
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)


def test_a_link_to_itself_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        write(tmp_path / "loop")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        write(tmp_path / "none" / "file")
    assert error.value.filename == str(tmp_path / "none" / "file")


def test_names_of_any_length(tmp_path: Path) -> None:
    for name in ("n" * 255, "ü" * 127):
        write(tmp_path / name)
        write(tmp_path / name)
        assert (tmp_path / name).read_bytes() == b"new"


# Mode and owner


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o664, 0o755])
def test_a_file_keeps_its_mode(old: Path, mode: int) -> None:
    old.chmod(mode)
    write(old)
    assert stat.S_IMODE(old.stat().st_mode) == mode


def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_private_file_stays_private_while_it_is_written(old: Path) -> None:
    old.chmod(0o600)
    with atomic_write(old) as file:
        file.write(b"secret")
        (partial,) = (each for each in old.parent.iterdir() if each != old)
        assert stat.S_IMODE(partial.stat().st_mode) == 0o600


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_a_file_keeps_its_owner(old: Path) -> None:
    os.chown(old, 12345, 23456)
    write(old)
    assert (old.stat().st_uid, old.stat().st_gid) == (12345, 23456)


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="no extended attributes")
def test_a_file_keeps_its_attributes(old: Path) -> None:
    try:
        os.setxattr(old, "user.note", b"kept")
    except OSError:
        pytest.skip("a file system without extended attributes")
    write(old)
    assert os.getxattr(old, "user.note") == b"kept"


# Failures and interruptions


def test_an_error_leaves_the_old_file(old: Path) -> None:
    def fail() -> None:
        with atomic_write(old) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert old.read_bytes() == b"old"
    assert list(old.parent.iterdir()) == [old]


_LIMITED = """
import io, resource, signal, sys, torch
from pathlib import Path
from qframework.files import atomic_write
path = Path(sys.argv[1])
state, hard = {"a": torch.zeros(3000), "b": [torch.zeros(7)] * 5}, resource.getrlimit(resource.RLIMIT_FSIZE)[1]
whole = io.BytesIO()
torch.save(state, whole)
for limit in range(0, len(whole.getvalue()), 997):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with atomic_write(path) as file:
            torch.save(state, file)
    except OSError as error:
        assert "large" in str(error), error
    else:
        raise SystemExit(f"nothing was raised at {limit}")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
with atomic_write(path) as file:
    torch.save(state, file)
torch.load(path)
"""


def test_a_full_disk_at_any_point_raises(old: Path) -> None:
    # torch writes archives from a C++ destructor, where an exception ends the process
    result = subprocess.run([sys.executable, "-c", _LIMITED, str(old)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


_KILLED = """
import sys, time
from qframework.files import atomic_write
with atomic_write(sys.argv[1]) as file:
    file.write(b"half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_the_next_write_removes_files_of_killed_processes(old: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _KILLED, str(old)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        (partial,) = (each for each in old.parent.iterdir() if each != old)
        write(old, b"meanwhile")
        assert partial.exists()  # its writer lives
        process.send_signal(signal.SIGKILL)
    assert old.read_bytes() == b"meanwhile"
    neighbour = old.with_name(".other.12345678.partial")
    neighbour.write_bytes(b"of another file")
    write(old)
    assert sorted(each.name for each in old.parent.iterdir()) == [neighbour.name, "file"]


def test_two_writers_do_not_disturb_each_other(old: Path) -> None:
    with atomic_write(old) as first:
        first.write(b"first")
        write(old, b"second")
        assert old.read_bytes() == b"second"
    assert old.read_bytes() == b"first"
    assert list(old.parent.iterdir()) == [old]


# JSON


def test_json_round_trip(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "a.json", {"ü": [1, 2.5, None]})
    assert read_json(tmp_path / "new" / "a.json", "test") == {"ü": [1, 2.5, None]}


def test_nan_in_json_leaves_the_old_file(old: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(old, {"a": float("nan")})
    assert old.read_bytes() == b"old"


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"NaN", b"[Infinity]", b'{"a": 1, "a": 2}', b"\xff", b"[" * 100_000, b"1" * 10_000],
    ids=["empty", "cut off", "NaN", "infinity", "a name twice", "no UTF-8", "deep", "long number"],
)
def test_malformed_json_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(FileFormatError, match=r"a\.json is not a plan"):
        read_json(tmp_path / "a.json", "a plan")
    with pytest.raises(FileFormatError):
        parse_json(data)


# One helper writes all files


def test_the_package_writes_files_only_through_this_module() -> None:
    direct = re.compile(r"""\.write_(?:text|bytes)\(|open\((?:[^()]*, )?["'][wax+]|savefig\(path""")
    found = {
        f"{module.relative_to(PACKAGE)}: {line.strip()}"
        for module in PACKAGE.rglob("*.py")
        if module.name != "files.py"
        for line in module.read_text().splitlines()
        if direct.search(line)
    }
    assert found == {
        'tuning/journal.py: with self._path.open("ab", buffering=0) as file:',
        'outputs.py: trial.open("xb").close()',  # created and removed, to see whether a file can be
    }


def test_write_text_makes_the_folder(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b" / "c.txt", "ü")
    assert (tmp_path / "a" / "b" / "c.txt").read_bytes() == "ü".encode()


def test_tensors_round_trip(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "t.pt") as file:
        torch.save(torch.arange(1000), file)
    assert torch.equal(torch.load(tmp_path / "t.pt", weights_only=True), torch.arange(1000))


# Its users


def attention_choice(path: Path) -> None:
    from qframework.attention import AttentionChoice

    AttentionChoice.load(path)


def plan(path: Path) -> None:
    from qframework.tuning.plan import Plan

    Plan.load(path)


@pytest.mark.parametrize("load", [attention_choice, plan])
@pytest.mark.parametrize("content", ["[" * 100_000, "NaN", '{"format": NaN}', '{"format": 1, "format": 1}', "[]", "1"])
def test_readers_of_json_refuse_malformed_files(tmp_path: Path, load, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(FileFormatError, match=r"a\.json"):
        load(tmp_path / "a.json")


def test_a_choice_is_written_through_a_link_and_keeps_the_mode(old: Path) -> None:
    from qframework.attention import AttentionChoice

    old.chmod(0o600)
    (old.parent / "link").symlink_to(old)
    AttentionChoice({}).save(old.parent / "link")
    assert stat.S_IMODE(old.stat().st_mode) == 0o600
    assert AttentionChoice.load(old).layers == {}


@pytest.mark.parametrize("path", [5, None, 1.5])
def test_a_number_is_not_taken_for_an_open_file(path):
    with pytest.raises(TypeError, match="PathLike"):
        open_regular(path)
    with pytest.raises(TypeError, match="PathLike"), atomic_write(path):
        pass
