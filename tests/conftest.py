"""What every test shares: the import path and JAX's compilation cache.

The variables are set before any test imports JAX. Nothing here asks for
virtual devices: a test that needs eight of them starts a subprocess.
"""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]

if str(ROOT) not in sys.path:
  sys.path.insert(0, str(ROOT))

os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(ROOT / '.cache/jax'))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '0')
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('MPLBACKEND', 'Agg')
