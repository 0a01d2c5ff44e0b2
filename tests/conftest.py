"""Settings shared by all tests.

One thread each for torch, numpy and numba: the tests' products are too small for more, and threads of three libraries
that wait for each other are many times slower on a busy machine. `test_paths.py` covers the threaded case.
"""

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "numpy" not in sys.modules:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numba
import torch
from hypothesis import settings

# Read when triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
numba.set_num_threads(1)
settings.register_profile("lamina", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("lamina")
