"""Python code of the policy: what a forked child becomes.

Either one program, as if given to `python3 -c`, or a session, whose variables
live on from call to call. It runs with the policy's rights, in the policy's
process: nothing that it says is believed to be more than that.
"""

import atexit
import gc
import os
import sys
import types


def run_program(source):
  """Runs Python source as an interpreter's `-c` would; the exit code."""
  module = _main_module()
  return _at_exit(execute(source, module, '<code>'), module)


class Session:
  """Answers calls until its process ends.

  Args:
    request: descriptor of lines, a token each. text: file of the call's
      source. done: where `TOKEN CODE` is said at the end of each.
  """

  def __init__(self, request, text, done):
    self.request, self.text, self.done = request, text, done
    for fd in (request, text, done):
      os.set_inheritable(fd, False)  # not for the programs that it starts

  def serve(self):
    """The exit code of a process that the policy's code forked off."""
    module, pid, buffer = _main_module(), os.getpid(), b''
    calls = -1  # the empty one that opened it is none of the policy's
    while True:
      try:
        while b'\n' not in buffer:
          data = os.read(self.request, 4096)
          if not data:
            return 0
          buffer += data
      except BaseException as error:  # of the policy's handler of a signal
        _show(error)
        continue
      token, _, buffer = buffer.partition(b'\n')
      calls += 1
      code = 1
      try:
        size = os.fstat(self.text).st_size
        source = os.pread(self.text, size, 0).decode('utf-8', 'replace')
        code = execute(source, module, f'<code {calls}>')
        code = _flush(code)
      except BaseException as error:
        _show(error)
      if os.getpid() != pid:
        return _at_exit(code, module)
      os.write(self.done, token + b' %d\n' % (code & 0xFF))


def execute(source, module, name):
  """Runs source in a module; the exit code. Shows what was not caught."""
  try:
    exec(compile(source, name, 'exec', dont_inherit=True), module.__dict__)
  except SystemExit as end:
    if isinstance(end.code, (int, type(None))):
      return end.code or 0
    print(end.code, file=sys.stderr)
    return 1
  except BaseException as error:
    _show(error)
    return 1
  return 0


def _main_module():
  module = types.ModuleType('__main__')
  module.__builtins__ = __builtins__
  sys.modules['__main__'] = module
  sys.argv = ['-c']
  return module


def _show(error):
  trace = error.__traceback__.tb_next  # without the frame of this file
  sys.excepthook(type(error), error.with_traceback(trace), trace)


def _flush(code):
  for stream in (sys.stdout, sys.stderr):
    try:
      stream.flush()
    except (AttributeError, OSError, ValueError):
      code = code or 120  # as an interpreter says it
  return code


def _at_exit(code, module):
  # What an interpreter does at its end, without tearing down the runner's
  # modules, which would take longer than most calls.
  if 'threading' in sys.modules:
    sys.modules['threading']._shutdown()
  atexit._run_exitfuncs()
  module.__dict__.clear()
  gc.collect()
  return _flush(code) & 0xFF
