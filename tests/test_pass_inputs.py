"""What each pass gives the model."""

import pytest
import torch

from tokenseek_trainer.errors import InputError
from tokenseek_trainer.pass_inputs import inputs_of_selected, shape_of, with_position_ids
from tokenseek_trainer.selection import TokenSelection


def test_positions_count_from_the_first_real_token():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    counted = with_position_ids({"attention_mask": mask})["position_ids"]
    assert counted.tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]


@pytest.mark.parametrize("inputs", [{}, {"attention_mask": None}, {"attention_mask": torch.ones(1, 1, 4, 4)}])
def test_without_a_mask_of_tokens_no_positions_are_made(inputs):
    assert with_position_ids(inputs) is inputs


def test_given_positions_stay():
    inputs = {"attention_mask": torch.ones(1, 3), "position_ids": torch.tensor([[7, 8, 9]])}
    assert with_position_ids(inputs) is inputs


def test_the_shape_is_that_of_tokens_or_embeddings():
    assert shape_of({"input_ids": torch.zeros(2, 3)}) == (2, 3)
    assert shape_of({"input_ids": None, "inputs_embeds": torch.zeros(2, 3, 8)}) == (2, 3)


def selection():
    kept = torch.tensor([[1, 3]])
    return TokenSelection(kept, torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 2))


def test_inputs_of_tokens_are_gathered_and_others_stay():
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.ones(1, 4), "use_cache": False}
    found = inputs_of_selected(inputs, selection(), torch.Size([1, 4]), keep_mask=False)
    assert set(found) == {"input_ids", "use_cache"} and found["use_cache"] is False
    assert found["input_ids"].tolist() == [[6, 8]]


def test_a_mask_that_is_kept_is_that_of_all_tokens():
    mask = torch.tensor([[0, 1, 1, 1]])
    found = inputs_of_selected({"attention_mask": mask}, selection(), torch.Size([1, 4]), keep_mask=True)
    assert found["attention_mask"] is mask
    found = inputs_of_selected({}, selection(), torch.Size([1, 4]), keep_mask=True)
    assert found["attention_mask"].tolist() == [[1, 1, 1, 1]]


def test_an_input_that_is_not_of_tokens_is_refused():
    with pytest.raises(InputError, match="'pixel_values' has shape"):
        inputs_of_selected({"pixel_values": torch.zeros(1, 3, 4, 4)}, selection(), torch.Size([1, 4]), keep_mask=False)
