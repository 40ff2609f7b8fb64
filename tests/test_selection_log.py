"""What a run logs about the kept tokens, against plain loops over what was kept."""

import dataclasses
import math
from collections import defaultdict

import pytest
import torch
from test_trainer import PAPER, examples, trained

from tokenseek_trainer import TokenSeekConfig, TokenSeekTrainer, selection_log
from tokenseek_trainer.instances import Instances, find_instances
from tokenseek_trainer.selection import TokenSelection, select
from tokenseek_trainer.selection_log import SelectionLog
from tokenseek_trainer.testing import packed_batch, ragged_batch


class OneProcess:
    device = torch.device("cpu")

    def reduce(self, values, how):
        assert how == "sum"
        return values


def case(batch, config, seed=0):
    instances = find_instances(batch, batch["labels"], shift=True)
    scores = torch.rand(instances.ids.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return instances, scores, select(scores, instances, config, step=seed)


def choose_from(instances, config):
    return instances.supervised if config.select_from == "supervised" else instances.ids >= 0


BATCHES = {
    "right": ragged_batch((4, 9, 6, 12), n_prompt=3),
    "left": ragged_batch((4, 25, 6), left=True, pad_to=30, n_prompt=2),
    "text": ragged_batch((4, 11)),
    "packed": packed_batch((5, 8, 3)),
}


@pytest.mark.parametrize("config", [TokenSeekConfig(ratio=0.4), PAPER(ratio=0.5)])
@pytest.mark.parametrize("name", BATCHES)
def test_the_sums_are_those_of_plain_loops(name, config):
    log = SelectionLog()
    role, position, entropies = defaultdict(int), [], []
    deciles = [0] * 10
    for seed in range(3):
        instances, scores, selection = case(BATCHES[name], config, seed)
        log.add(instances, selection, scores, choose_from(instances, config), shift=True)
        labels = BATCHES[name]["labels"]
        for number in range(instances.count):
            where = (instances.ids == number).nonzero().tolist()
            n = len(where)
            for place, (row, index) in enumerate(where):
                kept = selection.indices[row][selection.mask[row]].tolist()
                if index in kept:
                    learned = labels[row, index] != -100 if place else labels[tuple(where[1])] != -100
                    role["response" if learned else "prompt"] += 1
                    position.append((place + 0.5) / n)
                    deciles[int(10 * place / n)] += 1
            weights = [scores[r, i].item() for r, i in where if choose_from(instances, config)[r, i]]
            if len(weights) > 1:
                shares = [w / sum(weights) for w in weights]
                entropies.append(-sum(p * math.log(p) for p in shares) / math.log(len(shares)))
    found = log.flush(OneProcess())
    total = sum(role.values())
    near = {"abs": 5.1e-5}  # four digits are logged
    assert found["kept/prompt"] == pytest.approx(role["prompt"] / total, **near)
    assert found["kept/response"] == pytest.approx(role["response"] / total, **near)
    assert found["kept/position"] == pytest.approx(sum(position) / total, **near)
    assert [found[f"kept/decile_{i}"] for i in range(10)] == pytest.approx([d / total for d in deciles], **near)
    assert found["kept/score_entropy"] == pytest.approx(sum(entropies) / len(entropies), **near)
    assert log.flush(OneProcess()) == {}


def test_entropy_is_1_for_equal_scores_and_0_for_a_single_one():
    batch = ragged_batch((9, 6))
    instances = find_instances(batch, batch["labels"], shift=True)
    even = torch.ones(instances.ids.shape, dtype=torch.float64)
    one = torch.zeros_like(even)
    one[:, 2] = 7.0
    for scores, expected in ((even, 1.0), (one, 0.0)):
        log = SelectionLog()
        log.add(instances, select(scores, instances, TokenSeekConfig()), scores, instances.supervised, True)
        assert log.flush(OneProcess())["kept/score_entropy"] == expected


def of_positions(instances, *kept):
    """A selection of the given positions of each row."""
    width = max(map(len, kept))
    indices = torch.tensor([positions + [0] * (width - len(positions)) for positions in kept])
    mask = torch.tensor([[i < len(positions) for i in range(width)] for positions in kept])
    return TokenSelection(indices, mask, mask.double())


def test_agreement_follows_an_instance_wherever_it_stands():
    log, process = SelectionLog(), OneProcess()

    def visit(batch, *kept):
        instances = find_instances(batch, batch["labels"], shift=True)
        log.add(instances, of_positions(instances, *kept), None, instances.supervised, True)

    visit(ragged_batch((5, 8)), [1, 2], [1, 3, 4])
    assert "kept/agreement" not in log.flush(process)
    visit(ragged_batch((8, 5), left=True, pad_to=10), [2 + 1, 2 + 5, 2 + 6, 2 + 7], [5 + 0, 5 + 2])
    assert log.flush(process)["kept/agreement"] == (1 / 4 + 1 / 2) / 2
    visit(packed_batch((5, 8)), [0, 1, 5 + 5, 5 + 6])  # against the second visit, not the first
    assert log.flush(process)["kept/agreement"] == (1 / 2 + 1) / 2
    visit(ragged_batch((12,)), [3])  # a new one
    assert "kept/agreement" not in log.flush(process)


def test_only_so_many_instances_are_followed(monkeypatch):
    monkeypatch.setattr(selection_log, "AGREEMENT_INSTANCES", 1)
    monkeypatch.setattr(selection_log, "MAX_PENDING", 2)
    log = SelectionLog()
    for _ in range(3):
        instances = find_instances(batch := ragged_batch((5, 8)), batch["labels"], shift=True)
        log.add(instances, of_positions(instances, [0, 2], [1]), None, instances.supervised, True)
        assert len(log._pending) < 2
    assert log.flush(OneProcess())["kept/agreement"] == 1.0
    assert len(log._kept_before) == 1


@pytest.mark.parametrize("name", BATCHES)
def test_no_step_waits_for_the_device(name):
    """Tensors without data raise wherever a value is read."""
    config = TokenSeekConfig(ratio=0.4)
    instances, scores, selection = case(BATCHES[name], config)
    on_meta = [
        dataclasses.replace(x, **{k: v.to("meta") for k, v in vars(x).items() if isinstance(v, torch.Tensor)})
        for x in (instances, selection)
    ]
    assert [type(x) for x in on_meta] == [Instances, TokenSelection]
    with pytest.raises(Exception, match="meta"):
        on_meta[0].n_tokens.sum().item()
    SelectionLog().add(*on_meta, scores.to("meta"), on_meta[0].supervised, True)


# In training.


class Heard(TokenSeekTrainer):
    """Keeps what goes to TensorBoard and the like."""

    def log(self, logs, *args, **kwargs):
        super().log(logs, *args, **kwargs)
        self.heard = [*getattr(self, "heard", []), dict(logs)]


def kept_logs(trainer, name):
    return [entry.get(name) for entry in trainer.state.log_history if "loss" in entry]


def test_a_run_logs_where_its_kept_tokens_lie(tmp_path):
    settings = {"max_steps": 2, "learning_rate": 0.0}
    paper, _ = trained(tmp_path, PAPER(ratio=0.5), trainer_class=Heard, **settings)
    first, second = (entry for entry in paper.state.log_history if "loss" in entry)
    assert first["kept/prompt"] + first["kept/response"] == pytest.approx(1, abs=2e-4)
    assert sum(first[f"kept/decile_{i}"] for i in range(10)) == pytest.approx(1, abs=1e-3)
    assert 0 < first["kept/score_entropy"] < 1
    assert "kept/agreement" not in first and second["kept/agreement"] == 1.0  # the weights do not move
    assert not any(key.startswith("kept/decile") for logs in paper.heard for key in logs)
    assert "kept/position" in paper.heard[0]

    sampled, _ = trained(tmp_path, TokenSeekConfig(ratio=0.5), **settings)
    assert 0 < kept_logs(sampled, "kept/agreement")[1] < 1  # new draws
    chance, _ = trained(tmp_path, TokenSeekConfig(ratio=0.5, scorer="random"), **settings)
    assert kept_logs(chance, "kept/score_entropy") == [None] * 2 and None not in kept_logs(chance, "kept/prompt")
    ordinary, _ = trained(tmp_path, TokenSeekConfig(ratio=1.0))
    assert not any("/" in key for key in ordinary.state.log_history[0])


def test_scores_and_indices_of_the_data_are_logged_as_far_as_they_can(tmp_path):
    data = [{**row, "token_indices": [0, 2]} for row in examples()]
    given, _ = trained(tmp_path, TokenSeekConfig(ratio=0.5), data=data)
    assert kept_logs(given, "kept/score_entropy") == [None] and kept_logs(given, "kept/position") != [None]
    data = [{**row, "token_scores": [1.0] * len(row["input_ids"])} for row in examples()]
    assert kept_logs(trained(tmp_path, TokenSeekConfig(ratio=0.5), data=data)[0], "kept/score_entropy") == [1.0]
    assert kept_logs(trained(tmp_path, PAPER(ratio=0.5), data=data)[0], "kept/score_entropy") == [None]
