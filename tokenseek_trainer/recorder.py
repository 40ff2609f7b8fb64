"""`AttentionRecorder`: what a model's attention does in the two passes.

In the seek pass it runs as ever, and its keys and values are recorded. In the ditch pass the selected tokens' queries attend to
the recorded keys and values, into which their fresh ones are written, under the selected rows of the recorded masks.

Letters: B batch rows, n tokens of a row, k selected ones, H heads, G key/value heads, D head width.
"""

import contextlib
import functools
import inspect
from collections.abc import Sequence

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from .attention import (
    DenseMask,
    LayerCache,
    LayerRecord,
    MaskRule,
    RowMasks,
    SelectedPositions,
    attend_selected,
    attention_weights,
    chosen_keys,
    eager_function,
    rows_at,
)
from .errors import UnsupportedModelError
from .handwritten import AttentionProducts, mask_tables, table_replaced
from .instances import Instances
from .packing import mixes_documents
from .patching import attention_replaced, forward_replaced, masks_replaced
from .scoring import attention_received
from .selection import TokenSelection
from .structure import ModelStructure, uses_checkpointing


class AttentionRecorder:
    """The attention side of a `TokenSeekSession`.

    Args:
        structure: of the model.
        kv_store: where records wait, "device" or "cpu".
        context_blocks: indices of the blocks whose attention makes the context score.

    Attributes:
        records: keys and values by module and call within its block.
        implementation: the attention that the user chose, known while the recorder is attached.
    """

    def __init__(self, structure: ModelStructure, kv_store: str, context_blocks: set[int]):
        self.structure, self.kv_store, self.context_blocks = structure, kv_store, context_blocks
        self.records: dict[tuple[nn.Module, int], LayerRecord] = {}
        self.implementation: str | None = None
        self._name = f"tokenseek_{id(self)}"
        self._mode: str | None = None  # "seek" or "ditch"
        self._calls: dict[nn.Module, int] = {}
        self._chosen: dict[nn.Module, torch.Tensor | None] = {}  # by indexer; None: it chose all keys
        self._rules: list[MaskRule] = []
        self._used_masks: dict[int, torch.Tensor] = {}
        self._masks: RowMasks | None = None
        self.positions: SelectedPositions | None = None
        self._done: list[SelectedPositions] = []

    def attach(self, stack: contextlib.ExitStack) -> None:
        """Stand in the model's attention until `stack` closes."""
        lm, decoder = self.structure.lm, self.structure.decoder
        self._uses = 2 if uses_checkpointing(lm) else 1
        if self.structure.attention_by_hand:
            self.implementation = stack.enter_context(masks_replaced(lm, decoder, self._mask))
            self._watch_handwritten(stack)
        else:
            self.implementation = stack.enter_context(
                attention_replaced(lm, decoder, self._name, self._attention, self._mask)
            )
        for block in self.structure.blocks:
            stack.callback(block.register_forward_pre_hook(self._enter_block).remove)
        for module in decoder.modules():
            if type(module).__name__.endswith("Indexer"):
                run = functools.partial(self._run_indexer, module, module.forward)
                stack.enter_context(forward_replaced(module, run))

    def clear(self) -> None:
        """Let go of everything."""
        self.records.clear()
        self._chosen.clear()
        self._used_masks.clear()
        self._rules, self._masks, self._mode = [], None, None

    # ---- the two passes ----

    def start_seek(self, instances: Instances, score_context: bool) -> None:
        """Record from here on; with `score_context` the attention that tokens receive, too."""
        self.records.clear()
        self._chosen.clear()
        self._calls.clear()
        self._entered: set[int] = set()
        self._rules, self._masks = [], RowMasks()
        self._rule_of_mask: dict[int | None, tuple] = {}
        self._instances, self._score_context = instances, score_context
        self._context_parts: list[torch.Tensor] = []
        self.positions, self._is_last_part = None, True
        self._mode = "seek"

    def end_seek(self) -> torch.Tensor | None:
        """(B, n) context score, the mean over the blocks that make it; None if it was not asked for.

        Raises:
            UnsupportedModelError: a block ran whose keys and values did not show.
        """
        self._check_all_recorded()
        self._mode = None
        self._rule_of_mask.clear()  # it holds the (n, n) masks of the seek pass
        return torch.stack(self._context_parts).mean(0) if self._score_context else None

    def start_ditch(self, instances: Instances, selection: TokenSelection, to_come: Sequence[TokenSelection]) -> None:
        """Attend for `selection` from here on, the backward included."""
        self._instances = instances
        self._done = [*self._done, self.positions] if self.positions and not self._is_last_part else []
        self._selection = selection
        self.positions = SelectedPositions.of(selection, to_come)
        self._is_last_part = not to_come
        for record in self.records.values():
            record.uses = 0
        self._n_tokens = self._instances.ids.shape[1]
        self._n_masks = 0
        self._used_masks = {}
        self._calls.clear()
        self._mode = "ditch"

    @contextlib.contextmanager
    def set_aside(self):
        """Inside, masks are the model's own: a wrapper may build some although its decoder stands still."""
        mode, self._mode = self._mode, None
        try:
            yield
        finally:
            self._mode = mode

    def recorded(self) -> list[torch.Tensor]:
        """What the last seek left, keys and values (B, G, n, D), and the gradients that wait for the parts to come.

        The ditch pass lets go of them as it uses them.
        """
        records = self.records.values()
        waiting = [carried.values for record in records for carried in (record.at_key, record.at_value)]
        kept = [tensor for record in records for tensor in (record.key, record.value)]
        chosen = [indices for indices in self._chosen.values() if indices is not None]
        return [*kept, *chosen, *(values for values in waiting if values is not None)]

    def mixes_documents(self) -> bool:
        """Whether the masks of the last seek let packed documents of a row attend to each other."""
        return mixes_documents(self._rules, self._instances)

    # ---- what the model calls ----

    def _attention(self, module, query, key, value, attention_mask, **kwargs):
        """The registered attention function."""
        if getattr(module, "indexer", None) is not None and kwargs.get("indices") is None:
            raise UnsupportedModelError(
                f"The {self.structure.model_type!r} model does not give its attention the keys that its indexer chose, so they are "
                "not known."
            )
        if self._mode == "ditch":
            return self._ditch_attention(module, query, key, value, attention_mask, **kwargs), None
        if self._mode == "seek":
            self._record(module, key, value)
            if self._score_context and self.structure.block_index(module) in self.context_blocks:
                self._score(module, query, key, value, attention_mask, **kwargs)
        base = eager_function(module) if self.implementation == "eager" else AttentionInterface()[self.implementation]
        if self.implementation in ("eager", "sdpa"):  # to which the model gives a mask; kernels take the indices
            attention_mask = chosen_keys(attention_mask, kwargs.pop("indices", None))
        return base(module, query, key, value, attention_mask, **kwargs)

    def _record(self, module, key, value):
        n = self._instances.ids.shape[1]
        if key.ndim != 4 or key.shape[2] != n or value.shape[2] != n:
            raise UnsupportedModelError(
                f"The {self.structure.model_type!r} model attends to keys of shape {tuple(key.shape)}, not to one of every "
                "token, so they cannot be recorded."
            )
        self.records[self._call_of(module)] = LayerRecord.of(key, value, self.kv_store)

    def _splice(self, module, key, value):
        record, positions = self._take_record(module), self.positions
        return positions.splice(key, record.key, record.at_key), positions.splice(value, record.value, record.at_value)

    def _take_record(self, module) -> LayerRecord:
        call = self._call_of(module)
        record = self.records[call]
        record.uses += 1
        if record.uses == self._uses and self._is_last_part:
            # From here only autograd holds it, and frees it when the backward has passed the block.
            del self.records[call]
        return record

    def _enter_block(self, block, args) -> None:
        if self._mode != "seek":
            return
        index = self.structure.blocks.index(block)
        if index in self._entered:
            raise UnsupportedModelError(
                f"The {self.structure.model_type!r} model runs one block twice in a forward (shared blocks), which is not supported."
            )
        self._entered.add(index)

    def _call_of(self, module) -> tuple[nn.Module, int]:
        """A module may attend several times in one run of its block (DiffLlama).

        The calls come in the same order in the ditch pass, and again where a checkpointed block is recomputed.
        """
        call = self._calls.get(module, 0)
        if self._mode == "ditch" and (module, call) not in self.records:
            call = 0
        self._calls[module] = call + 1
        return module, call

    @torch.no_grad()
    def _score(self, module, query, key, value, attention_mask, indices=None, **kwargs):
        rule = self._rule_of(attention_mask)

        def rows(queries):
            own = None if indices is None else _gather_rows(indices, queries)
            return chosen_keys(rule.rows(queries), own)

        kwargs.pop("dropout", None)
        received = attention_received(
            lambda queries: attention_weights(module, rows_at(query, queries), key, value, rows(queries), **kwargs),
            self._instances.ids >= 0,
            query.shape[1],
        )
        self._context_parts.append(received)

    def _run_indexer(self, module, forward, *args, **kwargs):
        """Stands for an indexer, which chooses the keys of every query without gradient: in the ditch pass it chooses as before."""
        if self._mode == "ditch":
            chosen, indices = self._chosen[module], self._selection.indices
            if chosen is None:
                return torch.arange(self._n_tokens, device=indices.device).expand(*indices.shape, -1)
            return _gather_rows(chosen, indices)
        chosen = forward(*args, **kwargs)
        if self._mode == "seek":
            rows, n = self._instances.ids.shape
            if not isinstance(chosen, torch.Tensor) or chosen.shape[:2] != (rows, n) or chosen.is_floating_point():
                raise UnsupportedModelError(
                    f"The indexer of the {self.structure.model_type!r} model gives something else than the chosen keys of every "
                    "token, so it cannot be recorded."
                )
            self._chosen[module] = chosen if chosen.shape[2] < n else None
        return chosen

    def _ditch_attention(self, module, query, key, value, attention_mask, indices=None, **kwargs):
        if attention_mask is None or attention_mask.shape[-1] == key.shape[2] != self._n_tokens:
            raise UnsupportedModelError(
                f"The {self.structure.model_type!r} model gives its attention another mask than that of transformers' mask "
                "interface, so the rows of the selected tokens are not known."
            )
        if id(attention_mask) not in self._used_masks:
            self._used_masks[id(attention_mask)] = attention_mask
            self._refuse_sight_of(self._done, attention_mask)
        key, value = self._splice(module, key, value)
        if indices is None:
            return attend_selected(module, query, key, value, attention_mask, self._masks, **kwargs)
        rows = chosen_keys(attention_mask, indices)  # of this layer only
        return attend_selected(module, query, key, value, rows, RowMasks(), **kwargs)

    def _mask(self, *args, **kwargs):
        """The registered mask function: called once per mask, in the same order in both passes."""
        if self._mode == "ditch":
            rule = self._rules[self._n_masks]
            self._n_masks += 1
            rows = rule.rows(self._selection.indices)
            if not self.structure.attention_by_hand:
                return rows  # seen again by each attention that uses it
            self._refuse_sight_of(self._done, rows)
            if self.implementation == "eager":  # it adds the mask itself
                return self._masks.bias(rows, kwargs.get("dtype", torch.float32), 1)
            return rows | ~rows.any(-1, keepdim=True)  # an empty slot may see nothing, which would be NaN
        mask = AttentionMaskInterface()[self.implementation](*args, **kwargs)
        if self._mode == "seek":
            self._rules.append(MaskRule(kwargs))
            # Masks that were not needed (None) stand for plain causal or full attention: any rule that gave None is it.
            self._rule_of_mask[None if mask is None else id(mask)] = (self._rules[-1], mask)
        return mask

    def _refuse_sight_of(self, done: list[SelectedPositions], rows: torch.Tensor) -> None:
        """Keys of the parts that ran before must be hidden from this part: its gradient at them would come too late."""
        empty = ~self._selection.mask
        for positions in done:
            hidden = ~rows[positions.rows, 0, :, positions.positions] | empty[positions.rows]
            if not hidden.all():
                raise UnsupportedModelError(
                    f"Tokens of the {self.structure.model_type!r} model attend to later ones, so their gradient cannot be made in "
                    "parts. Set parts=1."
                )

    def _rule_of(self, mask) -> MaskRule | DenseMask:
        found = self._rule_of_mask.get(None if mask is None else id(mask))
        if found is not None:
            return found[0]
        if mask is not None and (dense := DenseMask(mask)).says_all():
            return dense
        raise UnsupportedModelError(
            f"The {self.structure.model_type!r} model changes its attention masks after building them, so attention "
            "cannot be scored. Use scorer='gradient'."
        )

    # ---- attention that a model file writes out ----

    def _watch_handwritten(self, stack: contextlib.ExitStack) -> None:
        """Give every attention that is written out in the model file a cache, in which its keys and values show.

        They and its probabilities show in its products too. A mask table of its own gives the rows of the selected tokens.
        """
        for module, argument in self.structure.attention_by_hand.items():
            if argument is not None:
                cache = LayerCache(functools.partial(self._keys_and_values, module))
                hook = functools.partial(_with_argument, argument, cache)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            run = functools.partial(self._run_handwritten, module, module.forward, argument is None)
            stack.enter_context(forward_replaced(module, run))
            for name in mask_tables(module):
                stack.enter_context(table_replaced(module, name, self._selected_now))

    def _selected_now(self):
        return (self._selection.indices, self._n_tokens) if self._mode == "ditch" else None

    def _run_handwritten(self, module, forward, has_no_cache, *args, **kwargs):
        """Stands for the forward of an attention that is written out."""
        scored = (
            self._mode == "seek" and self._score_context and self.structure.block_index(module) in self.context_blocks
        )
        if self._mode == "ditch" and has_no_cache:
            record = self._take_record(module)
            put = (
                functools.partial(self.positions.splice, store=store, carried=carried)
                for store, carried in ((record.key, record.at_key), (record.value, record.at_value))
            )
            with AttentionProducts(*self._selection.indices.shape, *put):
                return forward(*args, **kwargs)
        if not (scored or (self._mode == "seek" and has_no_cache)):
            return forward(*args, **kwargs)
        with AttentionProducts(*self._instances.ids.shape) as seen:
            output = forward(*args, **kwargs)
        if has_no_cache and seen.value is not None:
            self._record(module, seen.key, seen.value)
        if scored:
            self._score_handwritten(seen.weights)
        return output

    @torch.no_grad()
    def _score_handwritten(self, weights: list) -> None:
        if len(weights) != 1:
            raise UnsupportedModelError(
                f"The {self.structure.model_type!r} model does not call transformers' attention interface, and forms {len(weights)} "
                "softmaxes of all tokens in one attention, so it cannot be scored. Use scorer='gradient'."
            )
        n_heads = weights[0](torch.zeros_like(self._instances.ids[:, :1])).shape[1]
        self._context_parts.append(attention_received(weights[0], self._instances.ids >= 0, n_heads))

    def _keys_and_values(self, module, key, value):
        """Record (B, G, n, D) keys and values, or write those of the selected tokens into the recorded ones."""
        if self._mode == "ditch":
            return self._splice(module, key, value)
        if self._mode == "seek":
            self._record(module, key, value)
        return key, value

    def _check_all_recorded(self) -> None:
        """Every block that ran must have shown its keys and values; some run only with images (Llama 3.2 Vision)."""
        owners = {self.structure.block_index(module) for module, _ in self.records}
        missing = sorted(self._entered - owners - self.structure.tokenwise_blocks)
        if missing or not self.records:
            raise UnsupportedModelError(
                f"Block {min(missing, default=0)} of the {self.structure.model_type!r} model does not call transformers' attention "
                "interface, and its keys and values show nowhere else, so they cannot be recorded. It mixes tokens in "
                "another way, or writes its attention out in a way that is not known here."
            )


def _gather_rows(values: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """(B, n, t) -> (B, q, t), at (B, q) positions."""
    return values.gather(1, queries[..., None].expand(-1, -1, values.shape[2]))


def _with_argument(name, value, module, args, kwargs):
    """A forward pre-hook that gives `module` an argument, in the place of the one that it is called with."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    place = names.index(name)
    if place < len(args):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}
