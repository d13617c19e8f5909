"""Which limits were hit: the kernel's own counters, and full file systems."""

import os

_FILES = (
  ('oom', 'oom_kill', ('memory/memory.oom_control', 'memory.events')),
  ('pids', 'max', ('pids/pids.events', 'pids.events')),
)


def read_counter(text, key):
  """The number after `key` in the lines of a cgroup file; None if absent."""
  for line in text.splitlines():
    words = line.split()
    if len(words) == 2 and words[0] == key:
      return int(words[1])
  return None


class Counters:
  """Refusals of a cgroup; its files are held open, and read before each call.

  The kernel's counters are the evidence for a limit that was hit: version 1
  and version 2 of cgroups name the files differently.
  """

  def __init__(self, root='/sys/fs/cgroup'):
    self._files = {}
    for name, key, paths in _FILES:
      self._files[name] = None, key
      for path in paths:
        try:
          fd = os.open(os.path.join(root, path), os.O_RDONLY)
          self._files[name] = fd, key
          break
        except OSError:
          continue

  def read(self):
    """{'oom': n, 'pids': n} so far, None of what is not counted here."""
    out = {}
    for name, (fd, key) in self._files.items():
      out[name] = None
      if fd is not None:
        out[name] = read_counter(os.pread(fd, 4096, 0).decode(), key)
    return out


def disk_full(folders):
  """True if one of these file systems has no block or no inode left."""
  for folder in folders:
    info = os.statvfs(folder)
    if info.f_bavail == 0 or (info.f_files and info.f_favail == 0):
      return True
  return False
