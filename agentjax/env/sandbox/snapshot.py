"""What lies in the writable folders of a sandbox, to compare and to go on from.

Floor 1, env/sandbox. Records alone; `transfer.py` makes and restores them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Entry:
  """A regular file or a folder of a sandbox.

  Attributes:
    path: absolute, in the sandbox.
    mode: permission bits.
    size: bytes; 0 of a folder.
    sha256: of the contents, in hex; empty of a folder.
    link: path of the entry that is the same file (a hard link); its contents
      stand there alone.
  """

  path: str
  mode: int
  size: int
  sha256: str
  link: str = ''


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """Every regular file and folder of workdir and /tmp, in the order of paths.

  Two are equal if the trees are: times and owners are not in it. Neither are
  /dev/shm, processes and the variables of sessions: a session cannot be
  copied, its calls are run again.

  Attributes:
    workdir: of the sandbox that it is of.
    entries: sorted by path. workdir and /tmp themselves are none of them.
    tar: the contents, as `archive.write` has them: names are paths without
      the slash in front, modes are 0644 or 0755.
    refused: path -> reason of what is there and not in it: symbolic links,
      pipes, sockets, names that no archive can hold, files beyond the limit.
  """

  workdir: str
  entries: tuple[Entry, ...]
  tar: bytes = dataclasses.field(repr=False)
  refused: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def complete(self) -> bool:
    """True if a sandbox that begins with it has all that was there."""
    return not self.refused
