"""What lies in the policy's folder: a program that runs inside its sandbox.

Floor 1, env/judge. The host sends this source as code to be run, so that files
are looked at with the policy's rights and none else. It knows nothing of the
package, and no module of the policy's folder is imported in its place.

stdin: JSON with `skip`, entries to leave out, and `room`, characters for the
answer. stdout: JSON with `now`, `more`, and `entries` in a fixed order, each
[path, kind, size, SHA-256 or null, time of the last change]. Links are told,
never followed. No hash is told of a file that cannot be read or has holes:
hashing these would take as long as the policy likes.
"""

import json
import os
import stat
import sys
import time

_MAX_DEPTH = 32
_MAX_PATH = 500
_KINDS = {stat.S_IFREG: 'file', stat.S_IFDIR: 'folder', stat.S_IFLNK: 'link'}


def walk():
  """(path, lstat) of everything below the working folder; sorted, bounded."""
  folders = ['']
  while folders:
    folder = folders.pop()
    try:
      names = sorted(os.listdir(folder or '.'))
    except OSError:
      try:  # its own, which it has closed
        os.chmod(folder or '.', 0o700)
        names = sorted(os.listdir(folder or '.'))
      except OSError:
        continue
    for name in names:
      path = folder + name
      try:
        info = os.lstat(path)
      except OSError:
        continue
      yield path, info
      if stat.S_ISDIR(info.st_mode) and path.count('/') < _MAX_DEPTH:
        folders.append(path + '/')


def digest(path, info, sha256):
  if info.st_size > info.st_blocks * 512:
    return None
  total = sha256()
  try:
    with open(path, 'rb') as file:
      while True:
        data = file.read(1 << 16)
        if not data:
          return total.hexdigest()
        total.update(data)
  except OSError:
    return None


def main():
  sys.path[:] = [p for p in sys.path if p and os.path.abspath(p) != os.getcwd()]
  # Not before the policy's folder is off the path.
  from hashlib import sha256

  request = json.loads(sys.stdin.buffer.read())
  entries, room, more = [], request['room'], False
  for index, (path, info) in enumerate(walk()):
    if index < request['skip']:
      continue
    kind = _KINDS.get(stat.S_IFMT(info.st_mode), 'special')
    if len(path) > _MAX_PATH:
      path, kind = path[:_MAX_PATH] + '...', 'special'
    hashed = digest(path, info, sha256) if kind == 'file' else None
    entry = [path, kind, info.st_size, hashed, info.st_mtime]
    room -= len(json.dumps(entry)) + 2
    if room < 0 and entries:
      more = True
      break
    entries.append(entry)
  answer = {'now': time.time(), 'more': more, 'entries': entries}
  sys.stdout.write(json.dumps(answer))


if __name__ == '__main__':
  main()
