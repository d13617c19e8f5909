"""Files in and out of a sandbox: a program that runs inside of it.

Floor 1, env/sandbox. The host sends this source as code to be run, so that
files are touched with the policy's rights and none else; it imports only what
the runner has loaded already, because a module of that name may lie in the
policy's folder. It knows nothing of the package, and keeps to Python 3.8.

stdin: a line of JSON, then the contents of what is put. stdout: a line of
JSON, then the contents of what is got. Paths are relative to the request's
`root` and are followed through no link. No other process runs meanwhile.
"""

import errno
import json
import os
import signal
import stat
import sys

_PAGE = 4096
_ZEROS = bytes(_PAGE)


def open_at(folder, name, flags):
  """(fd, mode to restore or None); opens what its owner may not read too."""
  flags |= os.O_NOFOLLOW
  try:
    return os.open(name, flags, dir_fd=folder), None
  except PermissionError:
    info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
      raise
    mode = stat.S_IMODE(info.st_mode)
    os.chmod(name, mode | 0o700, dir_fd=folder)
    return os.open(name, flags, dir_fd=folder), mode


def shut(fd, mode):
  if mode is not None:
    os.fchmod(fd, mode)
  os.close(fd)


class Parent:
  """The folder that holds `path`, while it is used: (fd, name)."""

  def __init__(self, root, path, make=False):
    *self.folders, self.name = path.split('/')
    self.make = make
    self.open = [(os.open(root, os.O_RDONLY | os.O_DIRECTORY), None)]

  def __enter__(self):
    try:
      for part in self.folders:
        folder = self.open[-1][0]
        if self.make:
          make_folder(folder, part)
        self.open.append(open_at(folder, part, os.O_RDONLY | os.O_DIRECTORY))
    except BaseException:
      self.__exit__()
      raise
    return self.open[-1][0], self.name

  def __exit__(self, *exc):
    while self.open:
      shut(*self.open.pop())


def make_folder(folder, name):
  try:
    os.mkdir(name, 0o777, dir_fd=folder)
  except FileExistsError:
    pass


def write(fd, data, at):
  """Writes at a place; pages of zeros stay holes, as they may have been."""
  for start in range(0, len(data), _PAGE):
    page = data[start : start + _PAGE]
    if page != _ZEROS[: len(page)]:
      while page:
        done = os.pwrite(fd, page, at + start)
        start, page = start + done, page[done:]
  if os.fstat(fd).st_size < at + len(data):
    os.ftruncate(fd, at + len(data))


def put(root, path, mode, size, at, source):
  """Makes a folder (no size), or writes a part of a file.

  The first part takes the place of whatever is there.
  """
  with Parent(root, path, make=True) as (folder, name):
    if size is None:
      make_folder(folder, name)
      # Not where a file or a link of that name is in the way.
      shut(*open_at(folder, name, os.O_RDONLY | os.O_DIRECTORY))
      os.chmod(name, mode, dir_fd=folder)
      return
    flags = os.O_WRONLY
    if at == 0:
      try:  # a link or a pipe shall not be written through
        os.unlink(name, dir_fd=folder)
      except FileNotFoundError:
        pass
      flags |= os.O_CREAT | os.O_EXCL
    fd = os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=folder)
    try:
      write(fd, source.read(size), at)
    finally:
      os.close(fd)


def link(root, path, target):
  with Parent(root, target) as (there, old), Parent(root, path) as (here, new):
    os.link(old, new, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)


def change_mode(root, path, mode):
  with Parent(root, path) as (folder, name):
    os.chmod(name, mode, dir_fd=folder)


def get(root, path, at, size, most):
  """Bytes of a regular file, all of them if no size, or why not."""
  try:
    with Parent(root, path) as (folder, name):
      # Without O_NONBLOCK a pipe would be waited on for ever.
      fd, mode = open_at(folder, name, os.O_RDONLY | os.O_NONBLOCK)
      try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
          return 'not a regular file'
        if size is None:
          size = info.st_size
        if size > most:
          return f'too big: {size} bytes'
        return os.pread(fd, size, at)
      finally:
        shut(fd, mode)
  except OSError as error:
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
      return 'not a regular file'
    return os.strerror(error.errno)


class Walk:
  """Lists what is below some paths: [path, mode, size, link, refusal].

  `size` is None of a folder; `link` is the path of the same file, or None.
  """

  def __init__(self, root, max_entries, max_path):
    self.root, self.max_entries, self.max_path = root, max_entries, max_path
    self.found, self.inodes = [], {}

  def path(self, path):
    if path == '.':
      folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
      self.inside(folder, '')
      os.close(folder)
      return
    try:
      with Parent(self.root, path) as (folder, name):
        self.entry(folder, name, path)
    except OSError as error:
      self.refuse(path, os.strerror(error.errno))

  def inside(self, folder, prefix):
    for name in sorted(os.listdir(folder)):
      if len(self.found) > self.max_entries:
        return
      self.entry(folder, name, prefix + name)

  def entry(self, folder, name, path):
    if len(self.found) >= self.max_entries:
      self.refuse(path, 'too many files')
      return
    if len(os.fsencode(path)) > self.max_path:
      self.refuse(path, 'its name is too long')
      return
    try:
      info = os.stat(name, dir_fd=folder, follow_symlinks=False)
      mode = stat.S_IMODE(info.st_mode)
      if stat.S_ISDIR(info.st_mode):
        self.found.append([path, mode, None, None, None])
        flags = os.O_RDONLY | os.O_DIRECTORY
        inner, restore = open_at(folder, name, flags)
        try:
          self.inside(inner, path + '/')
        finally:
          shut(inner, restore)
      elif stat.S_ISREG(info.st_mode):
        same = None
        if info.st_nlink > 1:
          key = info.st_dev, info.st_ino
          same = self.inodes.setdefault(key, path)
        same = None if same == path else same
        self.found.append([path, mode, info.st_size, same, None])
      else:
        link = stat.S_ISLNK(info.st_mode)
        self.refuse(path, 'a symbolic link' if link else 'not a regular file')
    except OSError as error:
      self.refuse(path, os.strerror(error.errno))

  def refuse(self, path, reason):
    self.found.append([path, 0, None, None, reason])


def answer(request, source):
  """(JSON, contents) that answer a request."""
  root, answers, contents = request['root'], [], []
  if request['op'] == 'put':
    path = '.'
    try:
      for path, mode, size, at in request['files']:
        put(root, path, mode, size, at, source)
      for path, target in request['links']:
        link(root, path, target)
      for path, mode in request['modes']:
        change_mode(root, path, mode)
    except OSError as error:
      print(f'{path}: {os.strerror(error.errno)}', file=sys.stderr, flush=True)
      if error.errno == errno.EFBIG:  # as it ends a program that is no Python
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGXFSZ)
      sys.exit(1)
  elif request['op'] == 'get':
    left = request['max_bytes']
    for path, at, size in request['pieces']:
      found = get(root, path, at, size, left)
      if isinstance(found, bytes):
        left -= len(found)
        contents.append(found)
        found = len(found)
      answers.append(found)
  else:
    walk = Walk(root, request['max_entries'], request['max_path'])
    for path in request['paths']:
      walk.path(path)
    answers = walk.found
  return answers, contents


def main():
  source = sys.stdin.buffer
  answers, contents = answer(json.loads(source.readline()), source)
  sys.stdout.buffer.write(json.dumps(answers).encode() + b'\n')
  sys.stdout.buffer.writelines(contents)


if __name__ == '__main__':
  main()
