"""`TokenSeekSession`: one context manager around a model, in which it can seek and ditch.

Inside it the model's attention goes through the session. Outside, before and after, also after an exception, the model
is exactly what it was: no registered function, hook, replaced forward or changed config stays behind.

Letters: B batch rows, n tokens of a row, k selected ones, S positions that go through the head, E hidden width.
"""

import contextlib
import copy
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
    eager_function,
)
from .classification import classify, positions_read, put_back
from .config import TokenSeekConfig
from .errors import InputError, UnsupportedModelError
from .handwritten import AttentionProducts, mask_tables, table_replaced
from .instances import Instances, find_instances
from .losses import TokenStatistics, losses_and_gradient, weighted_loss
from .packing import mixes_documents
from .patching import (
    attention_replaced,
    depends_on_length,
    dropout_off,
    forward_replaced,
    masks_replaced,
    neftune_scaled,
)
from .positions import OwnPositions
from .quantized import undo_cpu_packing
from .scoring import SeekResult, attention_received, gradient_magnitude, tokens_first
from .selection import TokenSelection
from .structure import ModelStructure, context_blocks, inspect_model, uses_checkpointing


NOT_FOR_MODEL = ("labels", "shift_labels", "token_indices", "token_scores", "num_items_in_batch")
# Lengths of packed documents for flash attention's kernels, which read them off position_ids if they are not given.
PACKING_HINTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class TokenSeekSession:
    """Run the passes of TokenSeek on a model.

    ```python
    with TokenSeekSession(model, TokenSeekConfig()) as session:
        found = session.seek(batch, session.instances(batch))
        instances = found.instances
        selection = select(found.scores(instances, config, step), instances, config)
        session.ditch(batch, instances, selection, num_items_in_batch).backward()
    ```

    The session must stay open until the backward is over: checkpointed blocks run again in it.

    Args:
        model: a transformers model, bare or wrapped by PEFT, DDP or FSDP.
        config: the settings.
        structure: what `inspect_model(model)` returned, if it is already known.
    """

    def __init__(self, model: nn.Module, config: TokenSeekConfig, structure: ModelStructure | None = None):
        self.model = model
        self.config = config
        self.structure = structure or inspect_model(model)
        self.context_blocks = context_blocks(config, self.structure)
        self.records: dict[tuple[nn.Module, int], LayerRecord] = {}  # by module and call within its block
        self._calls: dict[nn.Module, int] = {}
        self._rules: list[MaskRule] = []
        self._masks: RowMasks | None = None
        self._positions: SelectedPositions | None = None
        self._done: list[SelectedPositions] = []
        self._statistics: TokenStatistics | None = None
        self._head_input: torch.Tensor | None = None
        self._open = contextlib.ExitStack()
        self._mode: str | None = None  # "seek", "ditch" or "head"
        self._hidden = None
        self._top = None  # a sequence classifier's last hidden states, from seek to ditch
        self._name = f"tokenseek_{id(self)}"
        self.implementation: str | None = None  # the attention that the user chose, known inside the session

    # ---- entering and leaving ----

    def __enter__(self) -> "TokenSeekSession":
        lm, decoder, outer = self.structure.lm, self.structure.decoder, self.structure.outer
        self._uses = 2 if uses_checkpointing(lm) else 1
        undo_cpu_packing(lm)
        with contextlib.ExitStack() as stack:
            if self.structure.attention_by_hand:
                self.implementation = stack.enter_context(masks_replaced(lm, decoder, self._mask))
                self._watch_handwritten(stack)
            else:
                self.implementation = stack.enter_context(
                    attention_replaced(lm, decoder, self._name, self._attention, self._mask)
                )
            self._model_forward = stack.enter_context(forward_replaced(outer, self._run_model))
            self._decoder_forward = stack.enter_context(forward_replaced(decoder, self._run_decoder))
            for block in self.structure.blocks:
                stack.callback(block.register_forward_pre_hook(self._enter_block).remove)
            for module in decoder.modules():
                if depends_on_length(module):
                    stack.enter_context(forward_replaced(module, functools.partial(self._run_rotary, module.forward)))
            for module in self.structure.position_modules:
                run = functools.partial(self._run_positions, OwnPositions(module.forward))
                stack.enter_context(forward_replaced(module, run))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        self._open.close()
        self.records.clear()
        self._rules, self._masks, self._mode, self._top = [], None, None, None

    # ---- the passes ----

    def instances(self, inputs: dict) -> Instances:
        """Find the documents of a batch and what they are supervised on.

        In sequence classification that is known after `seek`, which finds the positions that the head reads.
        """
        if self.structure.loss_per_row:
            instances = find_instances(inputs, None, shift=False)
            if instances.count > len(instances.ids):
                raise InputError("Sequence classification takes one instance a row. Train without packing.")
            return instances
        if inputs.get("shift_labels") is not None:
            return find_instances(inputs, inputs["shift_labels"], shift=False)
        return find_instances(inputs, inputs.get("labels"), self.structure.shift)

    def seek(
        self, inputs: dict, instances: Instances, *, scoring: bool = True, label_smoothing: float = 0.0
    ) -> SeekResult:
        """Run the ordinary forward on all tokens without grad, dropout off, recording keys and values of every block.

        Dropout is off so that scores, and with them the selection, depend on the instance alone.

        Args:
            inputs: the model's inputs; labels (but those of sequence classification) and token columns are ignored.
            scoring: False if the selection is known already, so that only keys and values are wanted.
        """
        self.records.clear()
        self._calls.clear()
        self._entered: set[int] = set()
        self._rules, self._masks = [], RowMasks()
        self._rule_of_mask: dict[int | None, tuple] = {}
        self._instances, self._smoothing, self._statistics = instances, label_smoothing, None
        self._score_context = scoring and self.config.needs_context
        self._score_gradient = scoring and self.config.needs_gradient
        self._context_parts: list[torch.Tensor] = []
        self._positions, self._is_last_part = None, True
        self._found = SeekResult(instances=instances)
        self._mode = "seek"
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(dropout_off(self.structure.outer))
            self._leaf: torch.Tensor | None = None
            if self._score_gradient:
                hook = self.structure.blocks[-1].register_forward_pre_hook(self._start_gradient, with_kwargs=True)
                stack.callback(hook.remove)
            elif self.structure.loss_per_row:
                stack.callback(self.structure.blocks[-1].register_forward_hook(self._start_head).remove)
            self.model(**self._inputs(inputs, instances))
            self._leaf = None
        self._check_all_recorded()
        if self._score_context:
            self._found.context = torch.stack(self._context_parts).mean(0)
        self._mode = None
        self._rule_of_mask.clear()  # it holds the (n, n) masks of the seek pass
        return self._found

    def ditch(
        self,
        inputs: dict,
        instances: Instances,
        selection: TokenSelection,
        num_items_in_batch=None,
        *,
        label_smoothing: float = 0.0,
        statistics: TokenStatistics | None = None,
        to_come: Sequence[TokenSelection] = (),
    ) -> torch.Tensor:
        """Run the model with grad on the selected tokens only, and return the loss that stands for all tokens.

        loss = (1/N) * sum over selected positions of weight * cross-entropy. Its gradient is that of the same loss in
        the ordinary forward with hidden states, keys and values of all other positions detached.

        Args:
            inputs, instances: those of the preceding `seek`, which returned the instances for sequence classification.
            num_items_in_batch: N, the supervised positions of the whole accumulated, all-rank batch; None for those of
                this batch. A sequence classifier's loss is its own, the mean of this batch's rows.
            statistics: is filled with those of the kept supervised positions, unless None.
            to_come: the parts that follow, if `selection` is one of `TokenSelection.parts`. The gradients of all parts then add
                up to that of the whole selection, if each part's backward is over before the next one starts.

        Returns:
            Scalar loss. With no supervised position it is 0 and its gradients are 0.
        """
        if not self.records:
            raise RuntimeError("ditch() needs the keys and values of a seek() in the same session.")
        if self.structure.loss_per_row and not instances.per_row:
            raise RuntimeError("In sequence classification ditch() needs the instances of seek()'s result.")
        n_items = instances.n_supervised.sum() if num_items_in_batch is None else num_items_in_batch
        self._n_items = num_items_in_batch
        self._loss_scale = 1 / torch.as_tensor(n_items, dtype=torch.float64, device=instances.ids.device).clamp(min=1)
        self._instances, self._smoothing, self._statistics = instances, label_smoothing, statistics
        self._start_ditch(selection, to_come)
        with neftune_scaled(self.structure.lm, selection.indices.shape[1] / instances.ids.shape[1]):
            inputs = self._inputs(inputs, instances)
            if not self.structure.loss_per_row:  # a classifier's head sees all tokens, its decoder the selected ones
                inputs = self._selected(inputs)
            return self.model(**inputs)["loss"]

    def recorded(self) -> list[torch.Tensor]:
        """The keys and values that the last seek left, (B, G, n, D) each. The ditch pass lets go of them as it uses them.

        Of a sequence classifier also the last hidden states (B, n, E).
        """
        tensors = [tensor for record in self.records.values() for tensor in (record.key, record.value)]
        return tensors if self._top is None else [*tensors, self._top]

    def carried(self) -> list[torch.Tensor]:
        """The gradients that wait for the parts to come."""
        both = [carried.values for record in self.records.values() for carried in (record.at_key, record.at_value)]
        return [values for values in both if values is not None]

    def mixes_documents(self) -> bool:
        """Whether the masks of the last seek let packed documents of a row attend to each other."""
        return mixes_documents(self._rules, self._instances)

    # ---- what the model calls ----

    def _run_model(self, *args, **kwargs):
        """Stands for the outer model's forward, inside DDP's and FSDP's hooks."""
        if self._mode not in ("seek", "ditch"):
            return self._model_forward(*args, **kwargs)
        if self.structure.loss_per_row:
            return self._run_classifier(kwargs)
        self._model_kwargs = kwargs
        self._model_forward(*args, **kwargs)
        hidden = self._take_hidden()
        if self._mode == "seek":
            self._finish_seek(hidden)
            return {}
        return {"loss": self._ditch_loss(hidden)}

    def _run_classifier(self, kwargs):
        """`_run_model` for sequence classification: the head runs as the model calls it, on the hidden states of all tokens."""
        if self._mode == "ditch":
            return {"loss": classify(self._model_forward, kwargs, self._smoothing, self._n_items)[1]}
        with torch.enable_grad():
            logits, loss = classify(self._model_forward, kwargs, self._smoothing, None)
        hidden = self._take_hidden()
        self._top = hidden.detach()
        self._found.instances = self._instances.reading(positions_read(logits, hidden, self._instances.ids >= 0))
        if loss is not None:
            self._found.loss_sum = loss.detach() * len(hidden)
        if self._score_gradient:
            if loss is None:
                raise InputError(f"scorer={self.config.scorer!r} needs the loss, but the batch has no labels.")
            self._found.gradient = self._gradient_of(loss, torch.full_like(loss, len(hidden)))
        return {}

    def _take_hidden(self) -> torch.Tensor:
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise UnsupportedModelError(
                f"The {self.structure.model_type!r} model does not call the {type(self.structure.decoder).__name__} that holds its "
                "blocks, so its hidden states cannot be taken."
            )
        return hidden

    def _run_decoder(self, *args, **kwargs):
        """Stands for the decoder's forward: keeps its hidden states, and lets the head see only one position of them.

        A sequence classifier's head sees all.
        """
        if self._mode == "head":
            return _with_hidden(self._decoder_output, self._head_input)
        if self._mode == "ditch" and self.structure.loss_per_row:
            output = self._decoder_forward(**self._selected(_by_name(self.structure.decoder, args, kwargs)))
            top, self._top = self._top, None
            return _with_hidden(output, put_back(output[0], top, self._positions))
        if self._mode == "seek":
            with torch.no_grad():  # ends the grad mode that the last block may have switched on
                output = self._decoder_forward(*args, **kwargs)
        else:
            output = self._decoder_forward(*args, **kwargs)
        self._hidden = output[0]
        if self.structure.loss_per_row:
            return output
        self._decoder_output = _with_hidden(output, None)
        return _with_hidden(output, output[0][:, :1])

    def _run_rotary(self, forward, x, position_ids, *args, **kwargs):
        """Stands for a rotary embedding whose frequencies follow the longest position: it must see that of all tokens."""
        if self._mode != "ditch":
            return forward(x, position_ids, *args, **kwargs)
        longest = self._instances.position_ids.max().expand(len(position_ids), 1)
        cos_and_sin = forward(x, torch.cat([position_ids, longest], dim=1), *args, **kwargs)
        return tuple(values[:, :-1] for values in cos_and_sin)

    def _run_positions(self, positions: OwnPositions, *args, **kwargs):
        """Stands for a module that numbers the tokens it is given."""
        if self._mode == "ditch":
            return positions.of_selected(self._selection)
        return positions.of_all(*args, **kwargs)

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
                functools.partial(self._positions.splice, store=store, carried=carried)
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

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of (1, s, E) hidden states: the model's own forward with its decoder standing still."""
        mode, self._mode, self._head_input = self._mode, "head", hidden
        try:
            return self._model_forward(**self._model_kwargs).logits
        finally:
            self._mode, self._head_input = mode, None

    def _finish_seek(self, hidden) -> None:
        if not (self._score_gradient or self._score_context):
            return
        where = self._instances.supervised
        at_hidden = torch.zeros_like(hidden)
        self._found.loss_sum = torch.zeros((), device=hidden.device)
        if where.any():
            losses, gradient = losses_and_gradient(
                self._head,
                hidden.detach()[where],
                self._instances.targets[where],
                self.structure.vocab_size,
                self._smoothing,
                self._score_gradient,
            )
            self._found.loss_sum = losses.sum()
            if gradient is not None:
                at_hidden[where] = gradient.to(hidden.dtype)
        if self._leaf is not None:
            # Also when it is all zeros: with FSDP every rank must run the same backward.
            self._found.gradient = self._gradient_of(hidden, at_hidden)

    def _gradient_of(self, output, at_output) -> torch.Tensor:
        """Gradient score (B, n): the magnitude at the last block's input of the gradient `at_output` at `output`."""
        assert self._leaf is not None
        (at_leaf,) = torch.autograd.grad(output, self._leaf, at_output)
        at_tokens = tokens_first(at_leaf, self._instances.ids.shape)
        if at_tokens is None:
            raise UnsupportedModelError(
                f"The blocks of the {self.structure.model_type!r} model pass on hidden states of shape "
                f"{tuple(at_leaf.shape)}, in which tokens cannot be told apart. Use scorer='context' or 'random'."
            )
        return gradient_magnitude(at_tokens)

    def _start_gradient(self, block, args, kwargs):
        """Before the last block: make its input a leaf, and keep a graph from here to the hidden states."""
        hidden = args[0] if args else kwargs["hidden_states"]
        self._leaf = hidden.detach().requires_grad_()
        torch.set_grad_enabled(True)
        if args:
            return (self._leaf, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._leaf}

    def _start_head(self, block, args, output):
        """After the last block: keep a graph from here on, in which a classifier's head shows what it reads."""
        torch.set_grad_enabled(True)
        if isinstance(output, torch.Tensor):
            return output.detach().requires_grad_()
        return type(output)([output[0].detach().requires_grad_(), *output[1:]])

    def _ditch_loss(self, hidden) -> torch.Tensor:
        keep = self._selection.supervised
        weights, statistics = self._selection.weights * self._loss_scale, self._statistics
        if not keep.any():  # one position with weight 0, so that every parameter gets a gradient on every rank
            keep, statistics = torch.zeros_like(keep), None
            keep[0, 0] = True
        targets = self._selection.gather(self._instances.targets)[keep].clamp(min=0)
        weights = weights[keep]
        return weighted_loss(
            self._head, hidden[keep], targets, weights, self.structure.vocab_size, self._smoothing, statistics
        )

    def _attention(self, module, query, key, value, attention_mask, **kwargs):
        """The registered attention function."""
        if self._mode == "ditch":
            return self._ditch_attention(module, query, key, value, attention_mask, **kwargs), None
        if self._mode == "seek":
            self._record(module, key, value)
            if self._score_context and self.structure.block_index(module) in self.context_blocks:
                self._score(module, query, key, value, attention_mask, **kwargs)
        base = eager_function(module) if self.implementation == "eager" else AttentionInterface()[self.implementation]
        return base(module, query, key, value, attention_mask, **kwargs)

    def _record(self, module, key, value):
        n = self._instances.ids.shape[1]
        if key.ndim != 4 or key.shape[2] != n or value.shape[2] != n:
            raise UnsupportedModelError(
                f"The {self.structure.model_type!r} model attends to keys of shape {tuple(key.shape)}, not to one of every "
                "token, so they cannot be recorded."
            )
        self.records[self._call_of(module)] = LayerRecord.of(key, value, self.config.kv_store)

    def _splice(self, module, key, value):
        record, positions = self._take_record(module), self._positions
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
    def _score(self, module, query, key, value, attention_mask, **kwargs):
        rule = self._rule_of(attention_mask)
        kwargs.pop("dropout", None)
        received = attention_received(
            lambda queries: attention_weights(module, _at(query, queries), key, value, rule.rows(queries), **kwargs),
            self._instances.ids >= 0,
            query.shape[1],
        )
        self._context_parts.append(received)

    def _ditch_attention(self, module, query, key, value, attention_mask, **kwargs):
        if attention_mask is None or attention_mask.shape[-1] == key.shape[2] != self._n_tokens:
            raise UnsupportedModelError(
                f"The {self.structure.model_type!r} model gives its attention another mask than that of transformers' mask "
                "interface, so the rows of the selected tokens are not known."
            )
        key, value = self._splice(module, key, value)
        return attend_selected(module, query, key, value, attention_mask, self._masks, **kwargs)

    def _mask(self, *args, **kwargs):
        """The registered mask function: called once per mask, in the same order in both passes."""
        if self._mode == "ditch":
            rule = self._rules[self._n_masks]
            self._n_masks += 1
            rows = rule.rows(self._selection.indices)
            self._refuse_sight_of(self._done, rows)
            if not self.structure.attention_by_hand:
                return rows
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

    # ---- inputs ----

    def _start_ditch(self, selection: TokenSelection, to_come: Sequence[TokenSelection]) -> None:
        self._done = [*self._done, self._positions] if self._positions and not self._is_last_part else []
        self._selection = selection
        self._positions = SelectedPositions.of(selection, to_come)
        self._is_last_part = not to_come
        for record in self.records.values():
            record.uses = 0
        self._n_tokens = self._instances.ids.shape[1]
        self._n_masks = 0
        self._calls.clear()
        self._mode = "ditch"

    def _inputs(self, inputs: dict, instances: Instances) -> dict:
        if inputs.get("encoder_hidden_states") is not None:
            raise InputError("encoder_hidden_states are not supported: a decoder is trained on its own tokens only.")
        kept = {k: v for k, v in inputs.items() if k not in (*NOT_FOR_MODEL, *PACKING_HINTS) and v is not None}
        if self.structure.loss_per_row and inputs.get("labels") is not None:
            kept["labels"] = inputs["labels"]
        if not self.structure.forward_accepts("position_ids") and instances.count > len(instances.ids):
            raise InputError(
                f"The {self.structure.model_type!r} model takes no position_ids, so packed documents cannot be told apart. "
                "Train without packing."
            )
        kept = self.structure.with_own_positions({**kept, "position_ids": instances.position_ids})
        if self.structure.forward_accepts("use_cache"):
            kept["use_cache"] = False
        return kept

    def _selected(self, inputs: dict) -> dict:
        """Gather every per-token input; the attention mask is dropped, since the recorded rules carry it."""
        shape = self._instances.ids.shape
        selected = dict(inputs)
        mask = selected.pop("attention_mask", None)
        for name, value in selected.items():
            if isinstance(value, torch.Tensor):
                if value.shape[:2] != shape:
                    raise InputError(
                        f"The input {name!r} has shape {tuple(value.shape)}. TokenSeek can gather only inputs that begin "
                        f"with (batch, tokens) = {tuple(shape)}; images and other extra inputs are not supported."
                    )
                selected[name] = self._selection.gather(value)
        if self.structure.attention_by_hand or not self.structure.forward_accepts("position_ids"):
            # alibi is built over all keys, from their mask
            selected["attention_mask"] = torch.ones_like(self._instances.ids) if mask is None else mask
        return selected

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


def _with_argument(name, value, module, args, kwargs):
    """A forward pre-hook that gives `module` an argument, in the place of the one that it is called with."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    place = names.index(name)
    if place < len(args):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


def _by_name(module, args, kwargs) -> dict:
    """The arguments of a call of a module's forward, by name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _with_hidden(output, hidden):
    """A copy of a decoder's output with other hidden states."""
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    output = copy.copy(output)
    output["last_hidden_state" if "last_hidden_state" in output else next(iter(output))] = hidden
    return output


def _at(tensor: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Take positions (B, q) of a (B, H, n, D) tensor: (B, H, q, D)."""
    return tensor.gather(2, queries[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3]))
