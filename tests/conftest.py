"""Settings shared by all tests."""

import os
import sys

if "numpy" not in sys.modules:  # the oracle's many small products are slower on several BLAS threads
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
from hypothesis import settings

torch.set_num_threads(min(2, torch.get_num_threads()))
settings.register_profile("lamina", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("lamina")
