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

from .classification import classify, positions_read, put_back
from .config import TokenSeekConfig
from .errors import InputError, UnsupportedModelError
from .instances import Instances, find_instances
from .last_block import LastBlock
from .losses import TokenStatistics, losses_and_gradient, weighted_loss
from .pass_inputs import inputs_of_all, inputs_of_selected
from .patching import (
    depends_on_length,
    dropout_off,
    forward_replaced,
    neftune_scaled,
)
from .positions import OwnPositions
from .quantized import undo_cpu_packing
from .recorder import AttentionRecorder
from .routing import RouterLogits, router_coefficient
from .scoring import SeekResult
from .selection import TokenSelection
from .structure import ModelStructure, context_blocks, inspect_model
from .tied_gradient import TiedGradient


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
        self.attention = AttentionRecorder(self.structure, config.kv_store, context_blocks(config, self.structure))
        self.records = self.attention.records
        self.last_block = LastBlock(self.structure)
        self.routers = RouterLogits()
        lm = self.structure.lm
        self.tied = TiedGradient(lm.get_input_embeddings(), lm.get_output_embeddings())
        self._statistics: TokenStatistics | None = None
        self._head_input: torch.Tensor | None = None
        self._open = contextlib.ExitStack()
        self._mode: str | None = None  # "seek", "ditch" or "head"
        self._hidden = None
        self._top = None  # a sequence classifier's last hidden states, from seek to ditch

    # ---- entering and leaving ----

    def __enter__(self) -> "TokenSeekSession":
        decoder, outer = self.structure.decoder, self.structure.outer
        undo_cpu_packing(self.structure.lm)
        with contextlib.ExitStack() as stack:
            self.attention.attach(stack)
            self.tied.attach(stack)
            self._model_forward = stack.enter_context(forward_replaced(outer, self._run_model))
            self._decoder_forward = stack.enter_context(forward_replaced(decoder, self._run_decoder))
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
        self.attention.clear()
        self.routers.clear()
        self.tied.start(ditches=False)
        self._mode, self._top = None, None

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
        self._instances, self._smoothing, self._statistics = instances, label_smoothing, None
        self._score_context = scoring and self.config.needs_context
        self._score_gradient = scoring and self.config.needs_gradient
        self._found = SeekResult(instances=instances)
        self._mode = "seek"
        self.attention.start_seek(instances, self._score_context)
        self.routers.clear()
        self.tied.start(ditches=False)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(dropout_off(self.structure.outer))
            if self._score_gradient:
                stack.enter_context(self.last_block.graph_from_input())
            elif self.structure.loss_per_row:
                stack.enter_context(self.last_block.graph_from_output())
            self.model(**inputs_of_all(inputs, instances, self.structure))
        self._found.context = self.attention.end_seek()
        self._mode = None
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
        router_weight: float | None = None,
    ) -> torch.Tensor:
        """Run the model with grad on the selected tokens only, and return the loss that stands for all tokens.

        loss = (1/N) * sum over selected positions of weight * cross-entropy. Its gradient is that of the same loss in
        the ordinary forward with hidden states, keys and values of all other positions detached. A mixture of experts
        that shows its router logits adds its auxiliary loss (`routing`).

        Args:
            inputs, instances: those of the preceding `seek`, which returned the instances for sequence classification.
            num_items_in_batch: N, the supervised positions of the whole accumulated, all-rank batch; None for those of
                this batch. A sequence classifier's loss is its own, the mean of this batch's rows.
            statistics: is filled with those of the kept supervised positions, unless None.
            to_come: the parts that follow, if `selection` is one of `TokenSelection.parts`. The gradients of all parts then add
                up to that of the whole selection, if each part's backward is over before the next one starts.
            router_weight: what the auxiliary loss is multiplied by; None for the model's own coefficient.

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
        self._selection, self._to_come, self._mode = selection, to_come, "ditch"
        self._router_weight = router_coefficient(self.structure.lm) if router_weight is None else router_weight
        self.attention.start_ditch(instances, selection, to_come)
        self.tied.start(ditches=True)
        with neftune_scaled(self.structure.lm, selection.indices.shape[1] / instances.ids.shape[1]):
            inputs = inputs_of_all(inputs, instances, self.structure)
            if not self.structure.loss_per_row:  # a classifier's head sees all tokens, its decoder the selected ones
                inputs = self._selected(inputs)
            return self.model(**inputs)["loss"]

    def recorded(self) -> list[torch.Tensor]:
        """What stays between the passes: keys and values (B, G, n, D), and gradients that wait for the parts to come.

        Of a sequence classifier also the last hidden states (B, n, E), of a mixture of experts its router logits. The
        ditch pass lets go of them as it uses them.
        """
        tensors = [*self.attention.recorded(), *self.routers.recorded]
        return tensors if self._top is None else [*tensors, self._top]

    def _selected(self, inputs: dict) -> dict:
        # the auxiliary loss of a mixture of experts leaves padding out, if there is a mask
        keep_mask = self.structure.reads_mask or (self.routers.recorded and inputs.get("attention_mask") is not None)
        return inputs_of_selected(inputs, self._selection, self._instances.ids.shape, bool(keep_mask))

    # ---- what the model calls ----

    def _run_model(self, *args, **kwargs):
        """Stands for the outer model's forward, inside DDP's and FSDP's hooks."""
        if self._mode not in ("seek", "ditch"):
            return self._model_forward(*args, **kwargs)
        if self.structure.loss_per_row:
            return self._run_classifier(kwargs)
        self._model_kwargs = kwargs
        auxiliary = getattr(self._model_forward(*args, **kwargs), "aux_loss", None)
        if auxiliary is not None:  # once is enough, and the head runs in chunks
            self._model_kwargs = {**kwargs, "output_router_logits": False}
        hidden = self._take_hidden()
        if self._mode == "seek":
            self._finish_seek(hidden)
            return {}
        loss = self._ditch_loss(hidden)
        return {"loss": loss if auxiliary is None else loss + self._router_loss(auxiliary).to(loss)}

    def _router_loss(self, auxiliary: torch.Tensor) -> torch.Tensor:
        if not self.routers.recorded:
            raise UnsupportedModelError(
                f"The {self.structure.model_type!r} model makes an auxiliary loss from other values than its decoder's "
                "router_logits, so the ditched tokens' part of it is not known. Set config.output_router_logits to False."
            )
        self.router_loss = auxiliary.detach()
        if self._to_come:  # the last part brings the value, every part its gradient
            auxiliary = auxiliary - auxiliary.detach()
        else:
            self.routers.clear()
        return self._router_weight * auxiliary

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
            at_loss, shape = torch.full_like(loss, len(hidden)), self._instances.ids.shape
            self._found.gradient = self.last_block.gradient_score(loss, at_loss, shape)
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
            return _with_hidden(output, put_back(output[0], top, self.attention.positions))
        if self._mode == "seek":
            with torch.no_grad():  # ends the grad mode that the last block may have switched on
                output = self._decoder_forward(*args, **kwargs)
        elif self.routers.recorded:
            output = self._run_routed(_by_name(self.structure.decoder, args, kwargs))
        else:
            output = self._decoder_forward(*args, **kwargs)
        self._hidden = output[0]
        if self.structure.loss_per_row:
            return output
        if self._mode == "seek":
            self.routers.record(output)
        self._decoder_output = _with_hidden(output, None)
        if self.routers.recorded:
            self._decoder_output["router_logits"] = None
        return _with_hidden(output, output[0][:, :1])

    def _run_routed(self, kwargs):
        """The decoder on the selected tokens, whose router logits then show among those of all tokens.

        The mask of all tokens came along for the auxiliary loss; the decoder takes its own from the recorded rules.
        """
        if not self.structure.reads_mask:
            kwargs.pop("attention_mask", None)
        output = copy.copy(self._decoder_forward(**kwargs))
        output["router_logits"] = self.routers.spliced(
            output.router_logits, self._instances, self._selection, self._to_come
        )
        return output

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

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of (1, s, E) hidden states: the model's own forward with its decoder standing still."""
        mode, self._mode, self._head_input = self._mode, "head", hidden
        try:
            with self.attention.set_aside():
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
        if self.last_block.has_graph_from_input:
            # Also when it is all zeros: with FSDP every rank must run the same backward.
            self._found.gradient = self.last_block.gradient_score(hidden, at_hidden, self._instances.ids.shape)

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
