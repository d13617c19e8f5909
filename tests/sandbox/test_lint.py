"""The image lint finds what is planted, and nothing in our own images."""

import io
import pathlib
import shutil
import subprocess
import sys
import tarfile

import pytest
from requirements import require
from test_build import BUILD, IMAGES, NAMES

LINT = BUILD.lint
SCRIPT = pathlib.Path(LINT.__file__)


def tar(*members):
  """A tar of (name, changes to its TarInfo, content)."""
  out = io.BytesIO()
  with tarfile.open(fileobj=out, mode='w') as made:
    for name, changes, content in members:
      info = tarfile.TarInfo(name)
      info.size = len(content)
      for key, value in changes.items():
        setattr(info, key, value)
      made.addfile(info, io.BytesIO(content))
  out.seek(0)
  return out


def found(name, content=b'', patterns=(), **changes):
  return LINT.archive(tar((name, changes, content)), patterns)


DIR, LINK, DEVICE = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE


@pytest.mark.parametrize(
  ('name', 'changes', 'why'),
  [
    ('./usr/bin/gcc', {}, 'a compiler'),
    ('usr/bin/x86_64-linux-gnu-gcc-12', {}, 'a compiler'),
    ('usr/local/bin/cc', {'type': LINK, 'linkname': 'tcc'}, 'a compiler'),
    ('bin/ld', {}, 'a compiler'),
    ('usr/bin/as', {}, 'a compiler'),
    ('usr/bin/clang++-16', {}, 'a compiler'),
    ('usr/lib/gcc/x86_64-linux-gnu/12/cc1', {}, 'a compiler'),
    ('work/.git', {'type': DIR}, 'a repository, and its history'),
    ('work/.git', {}, 'a repository, and its history'),  # of a worktree
    ('srv/upstream.git', {'type': DIR}, 'a repository, and its history'),
    ('srv/fix.bundle', {}, 'a repository, perhaps'),
    ('task/answers.json', {}, 'its name is that of answers'),
    ('task/Expected', {'type': DIR}, 'its name is that of answers'),
    ('task/solution.patch', {}, 'its name is that of answers'),
    ('logs/reward.txt', {}, 'its name is that of answers'),
    ('tests/hidden_tests.tar', {}, 'its name is that of answers'),
    ('root/.ssh/known_hosts', {}, 'a key'),
    ('home/u/id_ed25519', {}, 'a key'),
    ('root/.netrc', {}, 'a key'),
    ('var/lib/apt/lists/deb_main_Packages', {}, 'a package list'),
    ('var/cache/apt/archives/git.deb', {}, 'a package'),
    ('root/.cache/pip/http/x', {}, 'a cache'),
    ('var/cache/apt/pkgcache.bin', {}, 'a cache'),
    ('opt/wheels/fix-1-py3-none-any.whl', {}, 'a package of Python'),
    ('usr/bin/su', {'mode': 0o4755}, 'runs as its owner or group (mode 4755)'),
    ('var/mail', {'mode': 0o2775, 'type': DIR}, 'runs as its owner or group'),
    ('etc/passwd', {'mode': 0o666}, 'anybody may change it (mode 666)'),
    ('srv', {'mode': 0o1777, 'type': DIR}, 'anybody may change it'),
    ('x', {'type': LINK, 'linkname': '../etc/shadow'}, 'a link out of'),
    ('a/b', {'type': LINK, 'linkname': '../../../x'}, 'a link out of'),
    ('../etc/passwd', {}, 'is outside of the root'),
    ('usr/bin/x', {'type': DEVICE}, 'a device'),
    (
      'usr/bin/ping',
      {'pax_headers': {'SCHILY.xattr.security.capability': 'x'}},
      'has capabilities',
    ),
  ],
)
def test_what_is_planted_is_found(name, changes, why):
  lines = found(name, **changes)
  assert any(why in line for line in lines), lines


@pytest.mark.parametrize(
  ('name', 'changes'),
  [
    ('usr/bin/python3', {'mode': 0o755}),
    ('usr/bin/ld.so', {}),
    ('usr/bin/git', {}),
    ('usr/lib/python3.11/asyncio/as.py', {}),
    ('usr/share/git-core/templates/HEAD', {}),
    ('tmp', {'mode': 0o1777, 'type': DIR}),
    ('etc/mtab', {'type': LINK, 'linkname': '/proc/mounts'}),
    ('usr/bin/awk', {'type': LINK, 'linkname': '../../etc/alternatives/awk'}),
    ('usr/lib/x.so', {'type': LINK, 'linkname': 'x.so.1', 'mode': 0o777}),
    ('dev/null', {'type': DEVICE, 'mode': 0o666}),
    ('var/lib/apt/lists/lock', {}),
    ('usr/lib/.wh.answers.json', {}),
  ],
)
def test_what_belongs_there_is_let_through(name, changes):
  assert found(name, **changes) == []


def test_a_private_key_is_found_by_what_it_holds():
  key = b'-----BEGIN OPENSSH PRIVATE KEY-----\nx'
  assert found('etc/ssl/own.pem', key) == ['etc/ssl/own.pem: a key']
  assert found('etc/ssl/ca.pem', b'-----BEGIN CERTIFICATE-----') == []


def test_what_is_meant_to_be_there_is_allowed_by_its_path(tmp_path):
  (tmp_path / 'allowed').write_text(
    '# why\nusr/bin/gcc*  # the task builds\n\n'
  )
  patterns = LINT.allowed(tmp_path)
  assert patterns == ['usr/bin/gcc*']
  assert found('usr/bin/gcc-12', patterns=patterns) == []
  assert found('usr/bin/ld', patterns=patterns) == ['usr/bin/ld: a compiler']
  assert LINT.allowed(tmp_path / 'none') == []


def test_what_a_later_layer_removes_is_found_but_rights_are_the_last_ones():
  lower = LINT.layer(
    tar(
      ('task/answers.json', {}, b'{}'),
      ('usr/bin/su', {'mode': 0o4755}, b''),
      ('usr/bin/mount', {'mode': 0o4755}, b''),
      ('srv/a/b', {'mode': 0o666}, b''),
      ('srv/c', {'mode': 0o666}, b''),
    )
  )
  upper = LINT.layer(
    tar(
      ('usr/bin/su', {'mode': 0o755}, b''),
      ('task/.wh.answers.json', {}, b''),
      ('srv/.wh.a', {}, b''),
    )
  )
  assert LINT._together([lower, upper]) == [
    'srv/c: anybody may change it (mode 666)',
    'task/answers.json: its name is that of answers',
    'usr/bin/mount: runs as its owner or group (mode 4755)',
  ]
  assert len(LINT._together([upper, lower])) == 5


def test_the_command_line_wants_an_image(capsys):
  assert LINT.main([]) == 2
  assert 'python sandbox/lint.py IMAGE' in capsys.readouterr().out


# ---- with the engine ------------------------------------------------------


def engine():
  """Skips, or fails, where none answers."""
  answers = shutil.which('docker') and docker('version')
  require('docker', bool(answers), 'no engine answers')


def docker(*arguments, **options):
  done = subprocess.run(['docker', *arguments], capture_output=True, **options)
  return done.stdout.decode().strip() if done.returncode == 0 else None


@pytest.mark.parametrize('name', NAMES)
def test_nothing_is_found_in_our_own_images(name):
  image = BUILD.tag_of(name)
  engine()
  # Older ones have no label, and programs that run as root.
  made = (BUILD.label(image) or '').startswith('sha256:')
  require(image, made, 'it is of an older script: python3 sandbox/build.py')
  assert LINT.image(image, LINT.allowed(IMAGES / name)) == []


def test_an_image_with_an_answer_is_refused():
  engine()
  image = 'agentjax-lint-test:planted'
  planted = tar(('task/answers.json', {}, b'{}'), ('bin/sh', {}, b''))
  try:
    made = docker(
      'import', '--change=ENV HF_TOKEN=x', '-', image, input=planted.read()
    )
    assert made is not None
    done = subprocess.run(
      [sys.executable, str(SCRIPT), image], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
      f'{image}: task/answers.json: its name is that of answers',
      f'{image}: variable HF_TOKEN: a secret',
    ]
  finally:
    docker('image', 'rm', image)
  with pytest.raises(SystemExit) as error:
    LINT.image('agentjax-none:such')
  assert 'docker save agentjax-none:such failed' in str(error.value)
