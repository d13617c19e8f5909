"""What every test shares: the import path and JAX's compilation cache.

The variables are set before any test imports JAX. Nothing here asks for
virtual devices: a test that needs eight of them starts a subprocess.
"""

import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

if str(ROOT) not in sys.path:
  sys.path.insert(0, str(ROOT))

os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(ROOT / '.cache/jax'))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '0')
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('MPLBACKEND', 'Agg')

# Tests compile many small programs and run each a few times, so that XLA's
# optimiser is most of what they would wait for: without it an update of the
# tiny model compiles in a sixth of the time. Long tests keep it.
QUICK = (
  '--xla_backend_optimization_level=0',
  '--xla_cpu_use_fusion_emitters=false',
  '--xla_cpu_parallel_codegen_split_count=1',
)


def pytest_configure(config: pytest.Config) -> None:
  """Where long tests are left out, programs are compiled quickly."""
  if config.option.markexpr == 'not long':
    os.environ.setdefault('XLA_FLAGS', ' '.join(QUICK))
