"""reuse_scores: rows are scored at their first visit only."""

import pytest
import torch
from test_trainer import arguments, examples, relative_error, trained

from tokenseek_trainer import TokenSeekConfig, TokenSeekTrainer
from tokenseek_trainer.errors import ConfigError
from tokenseek_trainer.instances import find_instances
from tokenseek_trainer.score_store import ScoreStore
from tokenseek_trainer.selection import select
from tokenseek_trainer.testing import packed_batch, ragged_batch, tiny_model


def instances_of(batch):
    return find_instances(batch, batch["labels"], shift=True)


def test_an_instance_is_known_wherever_it_stands():
    first = instances_of(ragged_batch((5, 8, 1)))
    scores = torch.rand(first.ids.shape, dtype=torch.float64)
    store = ScoreStore()
    assert store.get(first) is None
    store.put(first, scores)
    for batch in (ragged_batch((8, 5), left=True, pad_to=11), packed_batch((5, 8)), packed_batch((8, 5, 8))):
        found = instances_of(batch)
        again = store.get(found)
        for number, key in enumerate(found.keys.tolist()):
            origin = first.keys.tolist().index(key)
            expected = scores[first.ids == origin].float().double()
            assert torch.equal(again[found.ids == number], expected)
        assert again[found.ids < 0].abs().sum() == 0
    assert store.get(instances_of(ragged_batch((5, 9)))) is None


def test_the_scores_of_the_first_visit_stay():
    batch = instances_of(ragged_batch((5,)))
    store = ScoreStore()
    store.put(batch, torch.ones(1, 5))
    store.put(batch, torch.zeros(1, 5))
    assert store.get(batch).tolist() == [[1.0] * 5]


class Spy(TokenSeekTrainer):
    """Remembers for every step whether it scored, and what it selected."""

    def _tokenseek_loss(self, inputs, n):
        loss = super()._tokenseek_loss(inputs, n)
        session = self._session
        self.steps = [*getattr(self, "steps", []), (session._found.loss_sum is not None, session._selection)]
        return loss


def test_later_epochs_are_not_scored_and_still_draw_anew(tmp_path):
    config = TokenSeekConfig(ratio=0.4, reuse_scores=True)
    trainer, _ = trained(tmp_path, config, trainer_class=Spy, max_steps=6, per_device_train_batch_size=2)
    assert [scored for scored, _ in trainer.steps] == [True, True] + [False] * 4
    logged = ["full_loss" in entry for entry in trainer.state.log_history[:6]]
    assert logged == [True, True] + [False] * 4
    assert len(trainer._score_store) == 4
    data = ragged_batch((4, 9, 6, 12))
    instances = instances_of(data)
    scores = trainer._score_store.get(instances)
    drawn = {tuple(select(scores, instances, config, step=step).indices.flatten().tolist()) for step in range(6)}
    assert len(drawn) > 1


def test_with_unchanged_weights_reused_scores_select_what_new_ones_do(tmp_path):
    selections = {}
    for reuse in (False, True):
        config = TokenSeekConfig(ratio=0.4, reuse_scores=reuse)
        trainer, _ = trained(tmp_path, config, trainer_class=Spy, max_steps=4, learning_rate=0.0)
        selections[reuse] = [selection.indices.tolist() for _, selection in trainer.steps]
    assert selections[True] == selections[False]


def test_a_resumed_run_goes_on_with_its_scores(tmp_path):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 4}
    config = TokenSeekConfig(ratio=0.4, reuse_scores=True)
    whole, expected = trained(tmp_path / "whole", config, trainer_class=Spy, **settings)
    assert [scored for scored, _ in whole.steps] == [True] + [False] * 5
    model = tiny_model("llama")
    resumed = Spy(
        model=model, args=arguments(tmp_path / "whole", **settings), train_dataset=examples(), tokenseek=config
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert [scored for scored, _ in resumed.steps] == [False] * 3
    assert relative_error({n: p.detach() for n, p in model.named_parameters()}, expected) < 1e-12


def test_random_selection_has_nothing_to_reuse():
    with pytest.raises(ConfigError, match="scorer='random' has no scores"):
        TokenSeekConfig(scorer="random", reuse_scores=True)
    with pytest.raises(ConfigError, match="reuse_scores must be true or false, got 'epoch'"):
        TokenSeekConfig(reuse_scores="epoch")
