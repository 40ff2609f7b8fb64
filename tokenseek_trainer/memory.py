"""Count tensors in bytes of distinct storages: what autograd keeps for the backward, and what is alive at once."""

import collections
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


MIB = 2**20


class SavedBytes:
    """Context manager that counts the tensors which autograd saves inside it.

    A storage counts once, whole, however many views of it are saved. The model's parameters do not count: they exist
    anyway. Inside an activation checkpoint nothing is saved but the checkpoint's inputs, and that is what is counted. What is freed
    again before the end does not count.

    ```python
    with SavedBytes(model) as saved:
        loss = model(**batch).loss
    saved.total  # bytes
    ```
    """

    def __init__(self, model: nn.Module):
        self._not_counted = {_key(p) for p in model.parameters()}
        self._storages: dict[int, weakref.ref] = {}
        self.total = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> "SavedBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._hooks.__exit__(*exception)
        alive = [storage for reference in self._storages.values() if (storage := reference()) is not None]
        self.total = sum(storage.nbytes() for storage in alive)
        self._storages.clear()

    def _pack(self, tensor):
        self.add(tensor)
        return tensor

    def add(self, *tensors: torch.Tensor) -> None:
        """Count tensors that are kept for the backward by other means than autograd (recorded keys and values)."""
        for tensor in tensors:
            if (key := _key(tensor)) not in self._not_counted:
                self._storages[key] = weakref.ref(tensor.untyped_storage())


def _key(tensor: torch.Tensor) -> int:
    """Tells storages apart; a tensor without data has no address."""
    storage = tensor.untyped_storage()
    return storage._cdata if isinstance(tensor, FakeTensor) else storage.data_ptr()


class LiveTensors(TorchDispatchMode):
    """Context manager that follows every tensor made inside it until its storage is freed.

    It works on any device, and on tensors without data. It slows each operation down, so it is not for timed runs. Memory that
    a kernel allocates and frees within itself is not seen.

    ```python
    with LiveTensors(model) as live:
        model(**batch).loss.backward()
    live.peak  # bytes, the model's weights not included
    ```

    Args:
        model: its weights and buffers do not count.
        others: tensors that do not count either, such as the optimizer's state.
        kind: names the kind of a new tensor, for `peak_by_kind`. None: all are of one kind.

    Attributes:
        now: bytes alive now.
        history: bytes alive after each allocation.
        peak_by_kind: bytes of each kind alive at the peak.
    """

    def __init__(self, model: nn.Module, others=(), kind: Callable[[torch.Tensor], str] | None = None):
        super().__init__()
        weights = (*model.parameters(), *model.buffers(), *others)
        self._known = {t.untyped_storage()._cdata: (0, "") for t in weights}  # they exist anyway
        self._kind = kind or (lambda tensor: "")
        self._by_kind: collections.Counter = collections.Counter()
        self.now = 0
        self.history: list[int] = []
        self._greatest = 0
        self.peak_by_kind: dict[str, int] = {}

    @property
    def peak(self) -> int:
        """Greatest sum of bytes alive at once."""
        return max(self.history, default=0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:  # a sparse one is made of such
                self._follow(tensor)
        return output

    def _follow(self, tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        self._known[storage._cdata] = storage.nbytes(), self._kind(tensor)
        self._count(storage._cdata, 1)
        self.history.append(self.now)
        if self.now > self._greatest:
            self._greatest, self.peak_by_kind = self.now, +self._by_kind
        weakref.finalize(storage, self._forget, storage._cdata)

    def _count(self, key: int, sign: int) -> None:
        n_bytes, kind = self._known[key]
        self.now += sign * n_bytes
        self._by_kind[kind] += sign * n_bytes

    def _forget(self, key: int) -> None:
        self._count(key, -1)
        del self._known[key]

    def mark(self, kind: str, *tensors: torch.Tensor) -> None:
        """Count these tensors as of another kind from now on, if they are followed."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if self._known.get(key, (0, ""))[0]:
                self._count(key, -1)
                self._known[key] = self._known[key][0], kind
                self._count(key, 1)


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


def llama_layer_elements(config, n_tokens: int, n_kept: int | None = None, checkpointing: bool = False) -> int:
    """Elements that one Llama block keeps for the backward: the closed form of what `SavedBytes` counts.

    Per token that is trained: 2 inputs of the norms, 2 normalised ones and 2 scaled ones, queries and attention output
    (8 E), gate, its activation, up and their product (4 I), one log-sum-exp a head and two root mean squares; a second
    copy of the attention output when heads are folded (E). Keys and values (2 G D) stay for *every* token, since the
    kept queries attend to all of them: the term that token-dropping memory models leave out. A checkpointed block keeps
    its input (E) instead of all but those.

    Args:
        config: a Llama-like config: hidden_size E, intermediate_size I, num_attention_heads H, num_key_value_heads G,
            head_dim D.
        n_tokens: tokens of the batch.
        n_kept: kept tokens of the batch; None for ordinary training.
        checkpointing: activation checkpointing of the block.
    """
    width, inner = config.hidden_size, config.intermediate_size
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    trained = n_tokens if n_kept is None else n_kept
    keys_and_values = 2 * groups * head_dim * n_tokens
    if checkpointing:
        return trained * width + (keys_and_values if n_kept is not None else 0)
    per_token = 8 * width + 4 * inner + heads + 2 + (width if n_kept is not None else 0)
    return trained * per_token + keys_and_values
