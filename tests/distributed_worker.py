"""Runs in each process of `test_distributed.py`: trains or differentiates, and process 0 saves what came out."""

import contextlib
import json
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from test_session import run_passes, settings
from test_trainer import arguments, examples
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from tokenseek_trainer import TokenSeekConfig, TokenSeekTrainer
from tokenseek_trainer.collator import TokenSeekCollator
from tokenseek_trainer.testing import ragged_batch, tiny_model


LENGTHS = (4, 9, 6, 12, 7, 5, 10, 8)


def train(folder, ratio=None, steps=1, parts=1, **overrides):
    """Parameters and logs of a run; ratio None is the stock Trainer."""
    model = tiny_model("llama")
    kwargs = {} if ratio is None else {"tokenseek": TokenSeekConfig.paper(ratio=ratio, parts=parts)}
    trainer = (Trainer if ratio is None else TokenSeekTrainer)(
        model=model,
        args=arguments(folder, max_steps=steps, optim="sgd", lr_scheduler_type="constant", **overrides),
        train_dataset=examples(LENGTHS * max(1, steps)),
        data_collator=TokenSeekCollator(),
        **kwargs,
    )
    trainer.train()
    return {name: p.detach() for name, p in model.named_parameters()}, trainer.state.log_history


def train_sft(folder, ratio, **overrides):
    """As `train`, through TokenSeekSFTTrainer."""
    import test_sft

    settings_ = {"max_steps": 1, "optim": "sgd", "lr_scheduler_type": "constant", **overrides}
    trainer = test_sft.trainer_of(folder, TokenSeekConfig.paper(ratio=ratio), **settings_)
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: p.detach() for name, p in model.named_parameters()}, trainer.state.log_history


def rows_of_rank(split):
    """This process's rows of one batch. "uneven": 3 rows and 1; "masked": the second process has no label at all."""
    batch = ragged_batch(LENGTHS[:4])
    if split == "masked":
        batch["labels"][2:] = -100
    n_first = 3 if split == "uneven" else 2
    part = slice(0, n_first) if dist.get_rank() == 0 else slice(n_first, 4)
    return {name: tensor[part] for name, tensor in batch.items()}, (batch["labels"][:, 1:] != -100).sum()


def differentiate(wrapper, ratio, split, checkpointing, parts=1):
    """Gradients of one batch that is split over the processes, gathered. With checkpointing the weights are tied, too."""
    model = tiny_model("llama", tie_word_embeddings=checkpointing)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(model)
    rows, n_items = rows_of_rank(split)
    from tokenseek_trainer.selection import select
    from tokenseek_trainer.session import TokenSeekSession

    config = settings(ratio)
    with TokenSeekSession(wrapped, config) as session:
        instances = session.instances(rows)
        selection = select(session.seek(rows, instances).scores(instances, config, 0), instances, config)
        to_come = selection.parts(parts)
        while to_come:
            part, to_come = to_come[0], to_come[1:]
            with Accelerator().no_sync(wrapped) if to_come and wrapper == "ddp" else contextlib.nullcontext():
                loss = session.ditch(rows, instances, part, n_items, to_come=to_come) * dist.get_world_size()
                loss.backward()
    gathered = {}
    for name, p in model.named_parameters():
        gathered[name] = p.grad.full_tensor() if wrapper == "fsdp2" else p.grad
    return gathered


def reference(ratio, split, tied):
    """The same batch in one process."""
    batch = ragged_batch(LENGTHS[:4])
    if split == "masked":
        batch["labels"][2:] = -100
    return run_passes(tiny_model("llama", tie_word_embeddings=tied), batch, settings(ratio))[-1]


def main(cases, output):
    torch.set_num_threads(1)
    results = {}
    for name, (kind, kwargs) in cases.items():
        torch.manual_seed(0)
        results[name] = globals()[kind](**kwargs)
    if int(__import__("os").environ.get("RANK", 0)) == 0:
        torch.save(results, output)


if __name__ == "__main__":
    if "RANK" in __import__("os").environ:
        dist.init_process_group("gloo")
    main(json.loads(sys.argv[1]), sys.argv[2])
