"""Settings shared by all tests."""

import os
import sys

if "numpy" not in sys.modules:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
from hypothesis import settings

torch.set_num_threads(1)  # the tests' products are too small for more, and threads of several libraries collide
settings.register_profile("lamina", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("lamina")
