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


def counters(root='/sys/fs/cgroup'):
  """Refusals of this cgroup so far: {'oom': n, 'pids': n}, None if unknown.

  The kernel's counters are the evidence for a limit that was hit: version 1
  and version 2 of cgroups name the files differently.
  """
  out = {}
  for name, key, paths in _FILES:
    out[name] = None
    for path in paths:
      try:
        with open(os.path.join(root, path)) as file:
          out[name] = read_counter(file.read(), key)
        break
      except OSError:
        continue
  return out


def disk_full(folders):
  """True if one of these file systems has no block or no inode left."""
  for folder in folders:
    info = os.statvfs(folder)
    if info.f_bavail == 0 or (info.f_files and info.f_favail == 0):
      return True
  return False
