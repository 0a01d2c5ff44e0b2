"""Settings shared by all tests."""

import torch
from hypothesis import settings

torch.set_num_threads(min(2, torch.get_num_threads()))
settings.register_profile("lamina", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("lamina")
