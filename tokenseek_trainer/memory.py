"""Count what autograd keeps for the backward, in bytes of distinct storages."""

import torch
from torch import nn


class SavedBytes:
    """Context manager that counts the tensors which autograd saves inside it.

    A storage counts once, whole, however many views of it are saved. The model's parameters do not count: they exist
    anyway. Inside an activation checkpoint nothing is saved but the checkpoint's inputs, and that is what is counted.

    ```python
    with SavedBytes(model) as saved:
        loss = model(**batch).loss
    saved.total  # bytes
    ```
    """

    def __init__(self, model: nn.Module):
        self._not_counted = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._storages: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> "SavedBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._hooks.__exit__(*exception)

    def _pack(self, tensor):
        self.add(tensor)
        return tensor

    def add(self, *tensors: torch.Tensor) -> None:
        """Count tensors that are kept for the backward by other means than autograd (recorded keys and values)."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._not_counted:
                self._storages[storage.data_ptr()] = storage.nbytes()

    @property
    def total(self) -> int:
        """Bytes of all storages counted so far."""
        return sum(self._storages.values())


def peak_device_bytes(device: torch.device) -> int | None:
    """Greatest number of bytes allocated on the device since `reset_peak`; None where the device does not count."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return None


def peak_process_bytes() -> int:
    """Greatest resident size of this process so far (Linux counts in KiB, macOS in bytes)."""
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
