"""File I/O: atomic writes, and reads that raise FileFormatError for every malformed file."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from qframework.errors import FileFormatError, QFrameworkError

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]


_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces ``path`` when the block ends, and is removed when the block raises.

    The temporary file is ``.NAME.*.partial`` beside ``path``; the next write of ``path`` removes those that killed
    processes left there. Symbolic links are followed. An existing file keeps its mode, owner and extended attributes;
    its other hard links keep the old content.

    Raises:
        QFrameworkError: ``path`` is a FIFO, a device, a folder or anything else but a regular file.
        OSError: the file cannot be written, for example because the disk is full; the old file is intact.
    """
    target = Path(os.path.realpath(os.fspath(path)))
    old = _existing(target, path)
    _remove_abandoned(target)
    try:
        partial, file = _create_beside(target, old)
    except OSError as error:  # its message would name the partial file
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    try:
        yield file
        file.finish()
        partial.replace(target)
    finally:
        with contextlib.suppress(OSError):  # from flushing the rest; the first failure is already being raised
            file.close()
        partial.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``path`` in UTF-8 with ``atomic_write``; a missing folder is created."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(text.encode())


def write_json(path: str | os.PathLike[str], document: Any, indent: int | None = 1) -> None:
    """Write ``path`` with ``write_text``; NaN and infinity, which JSON lacks, raise ValueError."""
    write_text(path, json.dumps(document, indent=indent, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str], kind: str) -> Any:
    """The JSON document in ``path``; ``kind`` says in errors what the file should be, with its article.

    Raises:
        FileFormatError: it is not strict JSON, or not a regular file.
        FileNotFoundError: there is no such file.
    """
    with open_regular(path) as file:
        data = file.read()
    try:
        return parse_json(data)
    except FileFormatError as error:
        raise FileFormatError(f"{path} is not {kind}: {error}") from error


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open ``path`` for reading.

    Raises:
        FileFormatError: it is a FIFO, on which opening or reading might block forever, a device or a folder.
        FileNotFoundError: there is no such file.
    """
    path = os.fspath(path)  # rejects a number, which open() takes for a file descriptor
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise FileFormatError(f"{path} must be a regular file, got {_kind(os.stat(path).st_mode)}")
    return open(path, "rb")


def parse_json(data: bytes | str) -> Any:
    """Parse strict JSON: no NaN or infinity, no name twice in an object.

    Raises:
        FileFormatError: ``data`` is not strict JSON.
    """
    try:
        return json.loads(data, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except FileFormatError:
        raise
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError, and numbers of thousands of digits
        raise FileFormatError(f"not JSON: {str(error) or type(error).__name__}"[:200]) from error


def _refuse_constant(name: str) -> NoReturn:
    raise FileFormatError(f"not JSON: {name} is not a number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise FileFormatError(f"an object holds {next(n for n in names if names.count(n) > 1)[:40]!r} more than once")
    return values


class _Output(io.BufferedRandom):
    """A file whose ``write`` does not raise; ``seek`` and ``finish`` raise its first failure.

    PyTorch writes archives from a C++ destructor, where an exception would abort the process.
    """

    failure: BaseException | None = None

    def write(self, data: Any) -> int:
        if self.failure is None:
            try:
                return super().write(data)
            except BaseException as error:  # noqa: BLE001 (raised by the next call)
                self.failure = error
        return memoryview(data).nbytes

    def seek(self, *arguments: int) -> int:
        self._raise_failure()
        return super().seek(*arguments)

    def finish(self) -> None:
        """Flush everything to the disk, or raise the first failure."""
        self._raise_failure()
        self.flush()
        os.fsync(self.fileno())

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


def _existing(target: Path, path: str | os.PathLike[str]) -> os.stat_result | None:
    try:
        found = os.stat(target)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise QFrameworkError(f"{os.fspath(path)} must be a regular file or a new name, got {_kind(found.st_mode)}")
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    return found


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _create_beside(target: Path, old: os.stat_result | None) -> tuple[Path, _Output]:
    """A new file in the folder of ``target``, with the mode and the owner of the one that it will replace."""
    mode = 0o666 if old is None else 0o600  # private until the old mode is copied
    while True:
        partial = target.with_name(f"{_prefix(target)}{secrets.token_hex(4)}.partial")
        file = _Output(io.FileIO(os.open(partial, _CREATE, mode), "r+"))
        try:
            _lock(file)
            if os.fstat(file.fileno()).st_nlink == 0:  # another writer removed it before it was locked
                file.close()
                continue
            if old is not None:
                _copy_attributes(target, partial, old)
        except BaseException:
            file.close()
            partial.unlink(missing_ok=True)
            raise
        return partial, file


def _lock(file: _Output) -> None:
    """Mark a file as being written. Without locks on the file system, nothing ever counts as abandoned."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)


def _copy_attributes(target: Path, partial: Path, old: os.stat_result) -> None:
    new = os.stat(partial)
    same_owner = (old.st_uid, old.st_gid) == (new.st_uid, new.st_gid)
    if not same_owner:
        try:
            os.chown(partial, old.st_uid, old.st_gid)
        except OSError:  # only root may change the owner; without it, nobody else may gain access
            partial.chmod(stat.S_IMODE(old.st_mode) & 0o700)
            return
    shutil.copystat(target, partial)


def _prefix(target: Path) -> str:
    """The prefix of the temporary files of ``target``; short enough for every file system."""
    return f".{os.fsencode(target.name)[:200].decode(errors='ignore')}."


def _remove_abandoned(target: Path) -> None:
    """Remove temporary files of ``target`` that killed processes left behind: their lock is free."""
    if fcntl is None or not target.parent.is_dir():
        return
    prefix = _prefix(target)
    for entry in os.scandir(target.parent):
        if entry.name.startswith(prefix) and entry.name.endswith(".partial") and entry.is_file(follow_symlinks=False):
            with contextlib.suppress(OSError):  # a lock that is held, or a file that is gone
                _remove_unlocked(entry.path)


def _remove_unlocked(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(descriptor)
