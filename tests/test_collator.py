import copy

import pytest
import torch

from tokenseek_trainer.collator import TokenSeekCollator
from tokenseek_trainer.errors import InputError
from tokenseek_trainer.instances import find_instances


EOS = 2
LENGTHS = (4, 1, 7, 3)


def examples(*columns):
    """Rows of distinct tokens, with the columns asked for."""
    found = []
    for number, length in enumerate(LENGTHS):
        tokens = [10 * (number + 1) + j for j in range(length)]
        every = {
            "input_ids": tokens,
            "labels": [token if j % 3 else -100 for j, token in enumerate(tokens)],
            "completion_mask": [int(j >= length // 2) for j in range(length)],
            "token_scores": [0.25 * j + number for j in range(length)],
            "token_indices": list(range(0, length, 2)),
            "token_type_ids": [j % 2 for j in range(length)],
        }
        found.append({name: every[name] for name in ("input_ids", *columns)})
    return found


def placed(rows, fill, n, side):
    """Each row written into a full row of `fill`, one entry at a time."""
    table = [[fill] * n for _ in rows]
    for line, row in zip(table, rows, strict=True):
        offset = n - len(row) if side == "left" else 0
        for j, value in enumerate(row):
            line[offset + j] = value
    return table


def refusal(batch, **settings):
    with pytest.raises(InputError) as caught:
        TokenSeekCollator(**settings)(batch)
    return str(caught.value)


each_side = pytest.mark.parametrize("side", ["right", "left"])


@each_side
@pytest.mark.parametrize(("multiple", "n"), [(None, 7), (1, 7), (7, 7), (8, 8), (5, 10), (16, 16)])
def test_every_field_is_padded_to_the_longest_row_rounded_up(side, multiple, n):
    rows = examples("labels", "token_scores", "token_type_ids")
    collator = TokenSeekCollator(pad_token_id=99, padding_side=side, pad_to_multiple_of=multiple, causal=False)
    batch = collator(rows)
    expected = {
        "input_ids": placed([row["input_ids"] for row in rows], 99, n, side),
        "attention_mask": placed([[1] * length for length in LENGTHS], 0, n, side),
        "labels": placed([row["labels"] for row in rows], -100, n, side),
        "position_ids": placed([range(length) for length in LENGTHS], 0, n, side),
        "token_scores": placed([row["token_scores"] for row in rows], 0.0, n, side),
        "token_type_ids": placed([row["token_type_ids"] for row in rows], 0, n, side),
    }
    assert {name: value.tolist() for name, value in batch.items()} == expected
    assert batch.pop("token_scores").dtype == torch.float32
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_without_a_padding_token_zero_fills_the_rows():
    batch = TokenSeekCollator()(examples())
    assert batch["input_ids"][batch["attention_mask"] == 0].unique().tolist() == [0]


@each_side
def test_without_labels_every_token_is_its_own_label_but_a_first_one_after_left_padding(side):
    batch = TokenSeekCollator(padding_side=side)(examples())
    rows = [row["input_ids"] for row in examples()]
    if side == "left":
        rows = [[-100, *row[1:]] for row in rows]
    assert batch["labels"].tolist() == placed(rows, -100, 7, side)


@each_side
def test_the_first_token_keeps_its_label_in_a_model_that_does_not_shift(side):
    batch = TokenSeekCollator(padding_side=side, causal=False)(examples())
    assert batch["labels"].tolist() == placed([row["input_ids"] for row in examples()], -100, 7, side)


def test_stock_causal_loss_supervises_the_same_predictions_on_both_sides():
    # The stock loss knows no mask: the logits of position j are compared with labels[j + 1], padding or not.
    pairs = {}
    for side in ("right", "left"):
        batch = TokenSeekCollator(padding_side=side, pad_to_multiple_of=8)(examples("completion_mask"))
        tokens, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
        pairs[side] = [
            (tokens[row][j], labels[row][j + 1]) for row in range(4) for j in range(7) if labels[row][j + 1] != -100
        ]
    expected = []
    for row, length in zip(examples(), LENGTHS, strict=True):
        expected += [(row["input_ids"][j], row["input_ids"][j + 1]) for j in range(length - 1) if j + 1 >= length // 2]
    assert pairs["right"] == expected
    assert pairs["left"] == expected


def test_an_eos_that_is_also_the_padding_token_keeps_its_label():
    rows = [{"input_ids": [5, 6, EOS]}, {"input_ids": [7, EOS, 8, 9, EOS]}]
    batch = TokenSeekCollator(pad_token_id=EOS)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, EOS, EOS, EOS], [7, EOS, 8, 9, EOS]]
    assert batch["labels"].tolist() == [[5, 6, EOS, -100, -100], [7, EOS, 8, 9, EOS]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]


@each_side
def test_completion_mask_hides_the_labels_of_the_prompt(side):
    for columns in (("completion_mask",), ("completion_mask", "labels")):
        rows = examples(*columns)
        expected = []
        for row in examples("completion_mask", "labels"):
            labels = row["labels"] if "labels" in columns else row["input_ids"]
            expected.append(
                [label if keep else -100 for label, keep in zip(labels, row["completion_mask"], strict=True)]
            )
        batch = TokenSeekCollator(padding_side=side, causal=False)(rows)
        assert batch["labels"].tolist() == placed(expected, -100, 7, side)
        assert "completion_mask" not in batch


@each_side
@pytest.mark.parametrize("max_length", [1, 3, 4, 7, 100])
def test_max_length_cuts_every_field_at_the_end_and_drops_the_indices_beyond(side, max_length):
    rows = examples("labels", "completion_mask", "token_scores", "token_indices", "token_type_ids")
    batch = TokenSeekCollator(max_length=max_length, padding_side=side, causal=False)(rows)
    kept = [min(length, max_length) for length in LENGTHS]
    n = max(kept)
    assert batch["input_ids"].shape == (4, n)
    assert batch["attention_mask"].sum(1).tolist() == kept
    for name, fill in (("input_ids", 0), ("token_scores", 0.0), ("token_type_ids", 0)):
        cut = [row[name][:max_length] for row in rows]
        assert batch[name].tolist() == placed(cut, fill, n, side)
    for row, length, indices in zip(rows, kept, batch["token_indices"].tolist(), strict=True):
        shift = n - length if side == "left" else 0
        expected = [i + shift for i in row["token_indices"] if i < max_length]
        assert [i for i in indices if i != -1] == expected


@each_side
@pytest.mark.parametrize("multiple", [None, 16])
def test_token_indices_name_the_same_tokens_in_the_padded_row(side, multiple):
    rows = examples("token_indices")
    rows[2]["token_indices"] = [6, 0, 3]
    rows[3]["token_indices"] = []
    batch = TokenSeekCollator(padding_side=side, pad_to_multiple_of=multiple)(rows)
    assert batch["token_indices"].dtype == torch.int64
    assert batch["token_indices"].shape == (4, 3)
    for row, tokens, indices in zip(rows, batch["input_ids"], batch["token_indices"].tolist(), strict=True):
        used = [i for i in indices if i != -1]
        assert indices == used + [-1] * (3 - len(used))
        assert tokens[used].tolist() == [row["input_ids"][i] for i in sorted(row["token_indices"])]


def test_indices_that_are_all_cut_away_leave_one_unused_slot():
    rows = [{"input_ids": [1, 2, 3], "token_indices": [2]}, {"input_ids": [4, 5], "token_indices": []}]
    batch = TokenSeekCollator(max_length=2)(rows)
    assert batch["token_indices"].tolist() == [[-1], [-1]]


def test_tensors_arrays_and_tuples_are_read_like_lists():
    columns = ("labels", "completion_mask", "token_scores", "token_indices")
    rows = examples(*columns)
    tensors = [{name: torch.tensor(value) for name, value in row.items()} for row in rows]
    arrays = [{name: torch.tensor(value).numpy() for name, value in row.items()} for row in rows]
    tuples = [{name: tuple(value) for name, value in row.items()} for row in rows]
    expected = TokenSeekCollator()(rows)
    for other in map(TokenSeekCollator(), (tensors, arrays, tuples)):
        assert other.keys() == expected.keys()
        assert all(torch.equal(other[name], expected[name]) for name in expected)


@each_side
def test_examples_are_not_changed(side):
    rows = examples("labels", "completion_mask", "token_scores", "token_indices")
    before = copy.deepcopy(rows)
    TokenSeekCollator(max_length=3, padding_side=side)(rows)
    assert rows == before


def test_batch_is_read_as_the_same_instances_on_both_sides():
    found = {}
    for side in ("right", "left"):
        batch = TokenSeekCollator(padding_side=side, pad_to_multiple_of=8)(examples("labels"))
        instances = find_instances(batch, batch["labels"], shift=True)
        assert torch.equal(instances.position_ids, batch["position_ids"])
        found[side] = [instances.n_tokens.tolist(), instances.n_supervised.tolist(), instances.keys.tolist()]
    assert found["right"] == found["left"]
    assert found["right"][0] == list(LENGTHS)


@pytest.mark.parametrize("column", ["token_indices", "token_scores"])
@pytest.mark.parametrize("lacking", [0, 2])
def test_a_token_column_in_only_some_examples_is_refused(column, lacking):
    rows = examples(column)
    del rows[lacking][column]
    assert refusal(rows) == f"Example {lacking} of the batch has no {column}, others have. Give it to all or to none."


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 7], "token_indices of example 2 hold 7, but the example has 7 tokens: 0 to 6 are allowed."),
        ([-1], "token_indices of example 2 hold -1, but the example has 7 tokens: 0 to 6 are allowed."),
        ([1.0], "token_indices of example 2 must be integers, got 1.0 (float)."),
        (["1"], "token_indices of example 2 must be integers, got '1' (str)."),
        ([True], "token_indices of example 2 must be integers, got True (bool)."),
        ([None], "token_indices of example 2 must be integers, got None (NoneType)."),
        ([3, 1, 3], "token_indices of example 2 name a position twice."),
        (torch.tensor([0.5]), "token_indices of example 2 must be integers, got 0.5 (float)."),
    ],
)
def test_bad_token_indices_are_refused_with_example_value_and_range(indices, message):
    rows = examples("token_indices")
    rows[2]["token_indices"] = indices
    assert refusal(rows) == message
    assert refusal(rows, max_length=1) == message


@each_side
def test_an_empty_example_is_refused(side):
    rows = examples()
    rows[1]["input_ids"] = []
    message = refusal(rows, padding_side=side)
    assert message == "Example 1 of the batch has no tokens. Filter empty examples out."


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("column", ["labels", "completion_mask", "token_scores"])
def test_a_field_of_another_length_is_refused_with_both_lengths(column, change):
    rows = examples(column)
    rows[3][column] = [1] * (3 + change)
    assert refusal(rows) == f"{column} of example 3 has {3 + change} entries, input_ids 3."


@pytest.mark.parametrize("change", [-1, 1])
def test_labels_of_another_length_are_refused_beside_a_completion_mask_too(change):
    rows = examples("labels", "completion_mask")
    rows[3]["labels"] = [1] * (3 + change)
    assert refusal(rows) == f"labels of example 3 has {3 + change} entries, input_ids 3."


@pytest.mark.parametrize("change", [-1, 1])
def test_token_type_ids_of_another_length_are_refused_with_both_lengths(change):
    rows = examples("token_type_ids")
    rows[3]["token_type_ids"] = [1] * (3 + change)
    assert refusal(rows) == f"token_type_ids of example 3 has {3 + change} entries, input_ids 3."


@pytest.mark.parametrize("side", ["middle", None, "LEFT"])
def test_an_unknown_padding_side_is_refused_with_value_and_choices(side):
    with pytest.raises(InputError) as caught:
        TokenSeekCollator(padding_side=side)
    assert str(caught.value) == f"padding_side must be 'right' or 'left', got {side!r}."
