import os


os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test may reach for a hub

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
