"""The runner's side of a session: its process, its pipes, what it is asked."""

import os

from . import interpreter, shell
from .processes import become_program, set_signals
from .streams import drain, make_pipe


class Session:
  """Pipes of one session; `pid` is None until its process is there."""

  def __init__(self, kind):
    self.kind, self.pid = kind, None
    self.text = os.memfd_create('call')
    self.theirs = {0: 0}
    self.out, self.theirs[1] = make_pipe()
    self.err, self.theirs[2] = make_pipe()
    self.theirs[shell.REQUEST], self.request = os.pipe()
    self.done, self.theirs[shell.DONE] = os.pipe()
    self.theirs[shell.TEXT] = self.text
    self.end_of_text = b''
    for fd in (self.out, self.err, self.done, self.request):
      os.set_blocking(fd, False)
    if kind == 'shell':
      self.argv, self.end_of_text = shell.program()

  def become(self, limits):
    """In the child: the interpreter. For Python, what is to be called."""
    set_signals(self.kind == 'shell')
    if self.kind == 'shell':
      become_program(self.argv, limits['env'])
    fds = shell.REQUEST, shell.TEXT, shell.DONE
    return interpreter.Session(*fds).serve

  def started(self, pid):
    """In the runner: the child has its ends of the pipes."""
    self.pid = pid
    for number, fd in self.theirs.items():
      if number not in (0, shell.TEXT):
        os.close(fd)

  def ask(self, token, text):
    """Gives it a call; False if it cannot be given one any more."""
    # What it wrote while it was not asked belongs to no call.
    for fd in (self.out, self.err, self.done):
      drain(fd)
    if self.kind == 'shell':
      text = text.replace(b'\0', b'')  # as bash does
    try:
      os.ftruncate(self.text, 0)
      os.pwrite(self.text, text + self.end_of_text, 0)
      os.lseek(self.text, 0, os.SEEK_SET)
      os.write(self.request, token.encode() + b'\n')
    except OSError:
      return False  # it filled or closed what it is asked through
    return True

  def close(self):
    for fd in (self.out, self.err, self.done, self.request, self.text):
      os.close(fd)
