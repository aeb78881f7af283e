"""Where the files of a CIFAR data set may lie: in a folder, or still in the archive as it was downloaded."""

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The largest real file has 155 MB; protocol 2 of Python 3 can make twice of it.
MAX_FILE_BYTES = 512 * 2**20
MAX_ARCHIVE_BYTES = 1024 * 2**20
BLOCK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class FoundFile:
    """A file's name within the data set, where it lies (for errors), and its content."""

    name: str
    source: str
    content: bytes


class LimitedReader(gzip.GzipFile):
    """A gzip file, read up to a limit of unpacked bytes: a small file can claim to hold any number of them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self.path = path
        self.bytes_left = MAX_ARCHIVE_BYTES

    def read(self, size: int | None = BLOCK_BYTES) -> bytes:
        """The next bytes, at most a block of them."""
        block = super().read(BLOCK_BYTES if size is None or size < 0 else min(size, BLOCK_BYTES))
        self.bytes_left -= len(block)
        if self.bytes_left < 0:
            raise ValueError(f"{self.path} unpacks to more than {MAX_ARCHIVE_BYTES} bytes; it is no CIFAR archive")
        return block


def files_in_folder(folder: Path, names: tuple[str, ...]) -> Iterator[FoundFile]:
    """The named files of a folder."""
    for name in names:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes; it is no CIFAR file")
        yield FoundFile(name, str(path), content)


def files_in_archive(archive: Path, folder: str, names: tuple[str, ...]) -> Iterator[FoundFile]:
    """The named files of `folder` in a `.tar.gz`, in the archive's order; nothing is written to disk."""
    wanted = {f"{folder}/{name}": name for name in names}
    try:
        # "r|": forwards only, so that every byte passes the limit once.
        with LimitedReader(archive) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as members:
            for member in members:
                name = wanted.pop(member.name.removeprefix("./"), None)
                if name is not None:
                    yield FoundFile(name, f"{archive}:{member.name}", _content(archive, members, member))
    # A gzip file may end early, be none, or decode to nonsense.
    except (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{archive} is no .tar.gz archive, or damaged: {error}; download it again") from error
    if wanted:
        raise ValueError(f"{archive} lacks {', '.join(sorted(wanted))}; download it again")


def _content(archive: Path, members: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if not member.isfile():
        raise ValueError(f"{archive}: {member.name} is not a plain file; download the archive again")
    if member.size > MAX_FILE_BYTES:
        raise ValueError(f"{archive}: {member.name} claims {member.size} bytes; it is no CIFAR file")
    file = members.extractfile(member)
    content = b"" if file is None else file.read()
    if len(content) != member.size:
        raise ValueError(f"{archive}: {member.name} ends early; download the archive again")
    return content
