import os

import pytest
import torch


os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
