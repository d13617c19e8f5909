"""Files in and out of a sandbox: a program that runs inside of it.

Floor 1, env/sandbox. The host sends this source as code to be run, so that
files are touched with the policy's rights and none else; it imports only what
the runner has loaded already, because a module of that name may lie in the
policy's folder. It knows nothing of the package.

stdin: a line of JSON, then the contents of the files to put. Where files are
got, stdout: a line of JSON with a size or a reason for each path, then the
contents. Paths are relative and are followed through no link.
"""

import errno
import json
import os
import stat
import sys


def parent_of(path, make=False):
  """(fd of the folder that holds `path`, name)."""
  *folders, name = path.split('/')
  folder = os.open('.', os.O_RDONLY | os.O_DIRECTORY)
  for part in folders:
    if make:
      try:
        os.mkdir(part, 0o777, dir_fd=folder)
      except FileExistsError:
        pass
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    inner = os.open(part, flags, dir_fd=folder)
    os.close(folder)
    folder = inner
  return folder, name


def put(path, data, mode):
  """Writes one file in the place of whatever is there."""
  folder, name = parent_of(path, make=True)
  try:  # a link or a pipe shall not be written through
    os.unlink(name, dir_fd=folder)
  except FileNotFoundError:
    pass
  flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
  fd = os.open(name, flags, mode, dir_fd=folder)
  with os.fdopen(fd, 'wb') as file:
    file.write(data)
  os.close(folder)


def get(path, max_bytes):
  """The bytes of a regular file, or the reason why not."""
  try:
    folder, name = parent_of(path)
    # Without O_NONBLOCK a pipe would be waited on for ever.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(name, flags, dir_fd=folder)
  except OSError as error:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
      return 'not a regular file'
    return os.strerror(error.errno)
  os.close(folder)
  info = os.fstat(fd)
  try:
    if not stat.S_ISREG(info.st_mode):
      return 'not a regular file'
    if info.st_size > max_bytes:
      return f'too big: {info.st_size} bytes'
    return os.read(fd, info.st_size)
  finally:
    os.close(fd)


def main():
  source = sys.stdin.buffer
  request = json.loads(source.readline())
  if request['op'] == 'put':
    try:
      for path, size in request['files']:
        put(path, source.read(size), request['mode'])
    except OSError as error:
      sys.exit(f'{path}: {os.strerror(error.errno)}')
    return
  answers, contents, left = [], [], request['max_bytes']
  for path in request['paths']:
    found = get(path, left)
    if isinstance(found, bytes):
      left -= len(found)
      contents.append(found)
      found = len(found)
    answers.append(found)
  sys.stdout.buffer.write(json.dumps(answers).encode() + b'\n')
  sys.stdout.buffer.writelines(contents)


if __name__ == '__main__':
  main()
