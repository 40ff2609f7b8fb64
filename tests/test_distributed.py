"""Two processes against one: DDP through the Trainer, DDP and FSDP2 around the two passes (gloo, float64)."""

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokenseek_trainer.testing import relative_error


WORKER = Path(__file__).parent / "distributed_worker.py"
RATIOS = (0.3, 0.999, 1.0)
BATCHES = {"one batch": (4, 1), "accumulation": (1, 4)}  # rows per device, accumulation steps
WRAPPED = list(itertools.product(("ddp", "fsdp2"), (0.3, 1.0), ("even", "uneven", "masked"), (False, True)))


def run(cases, output, processes):
    port = socket.socket()
    port.bind(("127.0.0.1", 0))
    number = port.getsockname()[1]
    port.close()
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(number)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(WORKER), json.dumps(cases), str(output)],
        capture_output=True, text=True, env=environment, timeout=300, cwd=WORKER.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(output)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """All cases, in one start of two processes and one start of one: starting is what takes the time."""
    folder = tmp_path_factory.mktemp("distributed")
    two, one = {}, {}
    for (batch, (rows, steps)), ratio, average in itertools.product(BATCHES.items(), (None, *RATIOS), (True, False)):
        common = {"folder": str(folder), "ratio": ratio, "average_tokens_across_devices": average}
        key = f"{batch} {ratio} {average}"
        two[key] = ("train", {**common, "per_device_train_batch_size": rows, "gradient_accumulation_steps": steps})
        one[key] = ("train", {**common, "per_device_train_batch_size": 2 * rows, "gradient_accumulation_steps": steps})
    for wrapper, ratio, split, checkpointing in WRAPPED:
        arguments = {"wrapper": wrapper, "ratio": ratio, "split": split, "checkpointing": checkpointing}
        two[f"{wrapper} {ratio} {split} {checkpointing}"] = ("differentiate", arguments)
        one[f"{ratio} {split} {checkpointing}"] = (
            "reference",
            {"ratio": ratio, "split": split, "tied": checkpointing},
        )
    for ratio in RATIOS[:2]:
        sft = {"folder": str(folder), "ratio": ratio}
        two[f"sft {ratio}"] = ("train_sft", {**sft, "per_device_train_batch_size": 4})
        one[f"sft {ratio}"] = ("train_sft", {**sft, "per_device_train_batch_size": 8})
    for batch, (rows, steps) in BATCHES.items():
        common = {"folder": str(folder), "ratio": 0.8, "parts": 3, "gradient_accumulation_steps": steps}
        two[f"parts {batch}"] = ("train", {**common, "per_device_train_batch_size": rows})
        one[f"parts {batch}"] = ("train", {**common, "per_device_train_batch_size": 2 * rows, "parts": 1})
    for wrapper, split in itertools.product(("ddp", "fsdp2"), ("even", "masked")):
        arguments = {"wrapper": wrapper, "ratio": 0.8, "split": split, "checkpointing": True, "parts": 3}
        two[f"parts {wrapper} {split}"] = ("differentiate", arguments)
        one[f"0.8 {split}"] = ("reference", {"ratio": 0.8, "split": split, "tied": True})
    series = {"folder": str(folder), "ratio": 0.3, "steps": 30}
    two["series"] = ("train", {**series, "per_device_train_batch_size": 4})
    one["series"] = ("train", {**series, "per_device_train_batch_size": 8})
    return run(two, folder / "two.pt", 2), run(one, folder / "one.pt", 1)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_two_processes_train_like_one_with_twice_the_batch(results, ratio, batch):
    two, one = (result[f"{batch} {ratio} True"] for result in results)
    # at ratio 1.0 it is the stock loss, which transformers computes in float32
    assert relative_error(two[0], one[0]) < (1e-9 if ratio < 1 else 1e-6)
    for key in ("loss", "full_loss", "kept_tokens", "kept_fraction", "supervised_kept", "supervised_fraction"):
        assert two[1][0][key] == pytest.approx(one[1][0][key], rel=1e-6), key
    places = [key for key in one[1][0] if key.startswith("kept/")]
    assert bool(places) == (ratio < 1)
    for key in places:
        assert two[1][0][key] == pytest.approx(one[1][0][key], abs=1e-4), key


@pytest.mark.parametrize("ratio", RATIOS[:2])
def test_sft_on_two_processes_is_sft_on_one(results, ratio):
    two, one = (result[f"sft {ratio}"] for result in results)
    assert relative_error(two[0], one[0]) < 1e-9
    for key in ("loss", "kept_tokens", "num_tokens", "kept_entropy", "kept_mean_token_accuracy"):
        assert two[1][0][key] == pytest.approx(one[1][0][key], rel=1e-6), key


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batch", BATCHES)
def test_keeping_all_tokens_is_the_stock_trainer_on_two_processes(results, batch, average):
    two = results[0]
    for ratio in (0.999, 1.0):
        ours, stock = two[f"{batch} {ratio} {average}"], two[f"{batch} None {average}"]
        assert relative_error(ours[0], stock[0]) < 1e-6
        assert ours[1][0]["loss"] == pytest.approx(stock[1][0]["loss"], rel=1e-5)


@pytest.mark.parametrize(("wrapper", "ratio", "split", "checkpointing"), WRAPPED)
def test_wrapped_passes_give_the_gradient_of_one_process(results, wrapper, ratio, split, checkpointing):
    """Also with unequal rows per rank, and with a rank that has nothing to learn from."""
    two, one = results
    found = two[f"{wrapper} {ratio} {split} {checkpointing}"]
    assert relative_error(found, one[f"{ratio} {split} {checkpointing}"]) < 1e-9


@pytest.mark.parametrize("batch", BATCHES)
def test_parts_on_two_processes_are_the_whole_on_one(results, batch):
    two, one = (result[f"parts {batch}"] for result in results)
    assert relative_error(two[0], one[0]) < 1e-9
    for key in ("loss", "full_loss", "kept_tokens", "kept_fraction", "supervised_kept", "supervised_fraction"):
        assert two[1][0][key] == pytest.approx(one[1][0][key], rel=1e-6), key


@pytest.mark.parametrize("split", ["even", "masked"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_wrapped_parts_give_the_gradient_of_the_whole(results, wrapper, split):
    two, one = results
    assert relative_error(two[f"parts {wrapper} {split}"], one[f"0.8 {split}"]) < 1e-9


def test_a_whole_run_on_two_processes_follows_that_on_one(results):
    two, one = (
        torch.tensor([[e["loss"], e["grad_norm"]] for e in result["series"][1] if "loss" in e]) for result in results
    )
    assert len(two) == len(one) == 30
    drift = (two - one).abs()
    assert drift.max() < 1e-6
    assert drift.mean() < 1e-7
