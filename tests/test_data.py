"""Rows to tokens and labels."""

import json

import pytest

from tokenseek_trainer.data import encode_classified, encode_rows, load_rows
from tokenseek_trainer.errors import InputError
from tokenseek_trainer.testing import tiny_tokenizer


EOS = 2


def words(tokenizer, ids):
    return tokenizer.convert_ids_to_tokens(ids)


def test_prompt_is_masked_and_completion_ends_with_eos():
    tokenizer = tiny_tokenizer()
    rows = [{"question": "w1 w2", "answer": "w3"}]
    (example,) = encode_rows(rows, tokenizer, prompt="w0 {question}", completion=" {answer} w9")
    assert words(tokenizer, example["input_ids"]) == ["w0", "w1", "w2", "w3", "w9", "<eos>"]
    assert example["labels"] == [-100, -100, -100, *example["input_ids"][3:]]


def test_train_on_prompt_supervises_everything():
    (example,) = encode_rows([{"prompt": "w1", "completion": "w2"}], tiny_tokenizer(), train_on_prompt=True)
    assert example["labels"] == example["input_ids"]


def test_the_columns_of_the_usual_names_need_no_template():
    tokenizer = tiny_tokenizer()
    assert words(tokenizer, encode_rows([{"text": "w1 w2"}], tokenizer)[0]["input_ids"]) == ["w1", "w2", "<eos>"]
    example = encode_rows([{"prompt": "w1", "completion": "w2"}], tokenizer)[0]
    assert example["labels"] == [-100, *example["input_ids"][1:]]


def test_eos_keeps_its_label_when_it_is_the_padding_token():
    example = encode_rows([{"prompt": "w1", "completion": "w2"}], tiny_tokenizer(pad_token="<eos>"))[0]
    assert example["labels"][-1] == EOS


def test_an_empty_or_missing_value_fills_in_as_nothing():
    rows = [{"instruction": "w1", "input": None, "output": "w2"}]
    example = encode_rows(rows, tiny_tokenizer(), prompt="{instruction} {input}", completion="{output}")[0]
    assert len(example["input_ids"]) == 3


def test_rows_whose_completion_is_cut_off_are_dropped():
    rows = [{"prompt": "w1 " * 10, "completion": "w2"}, {"prompt": "w1", "completion": "w2"}]
    assert len(encode_rows(rows, tiny_tokenizer(), max_length=8)) == 1
    with pytest.raises(InputError, match=r"None of the 1 rows.*max_length=8"):
        encode_rows(rows[:1], tiny_tokenizer(), max_length=8)


def test_encoded_rows_keep_their_token_columns_and_are_cut():
    rows = [
        {
            "input_ids": [5, 6, 7, 8],
            "labels": [-100, 6, 7, 8],
            "token_scores": [0.0, 1.0, 2.0, 3.0],
            "token_indices": [1, 3],
        }
    ]
    (example,) = encode_rows(rows, tiny_tokenizer(), max_length=3)
    assert example == {
        "input_ids": [5, 6, 7],
        "labels": [-100, 6, 7],
        "token_scores": [0.0, 1.0, 2.0],
        "token_indices": [1],
    }


@pytest.mark.parametrize(
    ("row", "templates", "message"),
    [
        ({"a": "w1"}, {}, r"columns a\. Expected prompt and completion, or text"),
        ({"a": "w1"}, {"text": "{b}"}, r"names the column 'b', but the rows have: a"),
        ({"a": "w1"}, {"prompt": "{a}"}, "belong together"),
        ({"a": "w1"}, {"prompt": "{a}", "completion": "{a}", "text": "{a}"}, "not both"),
    ],
)
def test_what_does_not_fit_is_explained(row, templates, message):
    with pytest.raises(InputError, match=message):
        encode_rows([row], tiny_tokenizer(), **templates)


def test_files_are_read_and_bad_ones_explained(tmp_path):
    good = tmp_path / "good.jsonl"
    good.write_text('{"text": "w1"}\n\n{"text": "w2"}\n')
    assert load_rows(str(good)) == [{"text": "w1"}, {"text": "w2"}]
    assert load_rows(str(good), limit=1) == [{"text": "w1"}]
    (tmp_path / "list.json").write_text(json.dumps([{"text": "w3"}]))
    assert load_rows(str(tmp_path / "list.json")) == [{"text": "w3"}]
    (tmp_path / "bad.jsonl").write_text('{"text": "w1"}\n{"text": \n')
    with pytest.raises(InputError, match=r"Line 2 of .*bad\.jsonl is not JSON"):
        load_rows(str(tmp_path / "bad.jsonl"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match="hold no rows"):
        load_rows(str(tmp_path / "empty.jsonl"))
    (tmp_path / "separator.jsonl").write_text('\ufeff{"text": "w1\u2028w2"}\n', encoding="utf-8")
    assert load_rows(str(tmp_path / "separator.jsonl")) == [{"text": "w1\u2028w2"}]
    for name, content, message in (
        ("latin.jsonl", b'{"text": "\xe9"}', "is not UTF-8"),
        ("rows.jsonl", b"[1, 2]", "must hold an object with columns"),
        ("object.json", b'{"text": "w1"}', "must hold a list of objects"),
        ("broken.json", b"[", "is not JSON"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=message):
            load_rows(str(tmp_path / name))
    with pytest.raises(InputError, match=r"nowhere\.jsonl does not exist"):
        load_rows(str(tmp_path / "nowhere.jsonl"))


def test_of_several_prompts_each_row_takes_the_first_that_it_can_fill():
    tokenizer = tiny_tokenizer()
    rows = [{"i": "w1", "x": "w2", "o": "w3"}, {"i": "w1", "x": "", "o": "w3"}, {"i": "", "x": "", "o": "w3"}]
    prompts = ["w8 {i} {x}", "w9 {i}"]
    encoded = encode_rows(rows, tokenizer, prompt=prompts, completion="{o}")
    assert [words(tokenizer, e["input_ids"])[:-2] for e in encoded] == [["w8", "w1", "w2"], ["w9", "w1"], ["w9"]]


def test_rows_are_excluded_by_a_column(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"w{i}", "source": "ab"[i % 2]}) + "\n" for i in range(6)))
    assert [row["text"] for row in load_rows(str(path), limit=2, exclude={"source": ["a"]})] == ["w1", "w3"]
    with pytest.raises(InputError, match="names the column 'sauce', but the rows have: source, text"):
        load_rows(str(path), exclude={"sauce": ["a"]})
    with pytest.raises(InputError, match="leaves no row"):
        load_rows(str(path), exclude={"source": ["a", "b"]})


def test_rows_with_a_class():
    tokenizer, rows = (
        tiny_tokenizer(),
        [{"a": "w1 w2", "kind": "yes"}, {"a": "w3 w4 w5", "kind": "no", "token_scores": [1, 2]}],
    )
    first, second = encode_classified(rows, tokenizer, text="{a} w9", label="kind", labels=["no", "yes"], max_length=2)
    assert words(tokenizer, first["input_ids"]) == ["w1", "w2"] and first["label"] == 1
    assert second == {"input_ids": second["input_ids"], "label": 0, "token_scores": [1, 2]}
    whole = encode_classified([first, {"text": "w1", "label": 7}], tokenizer, text=None, label="label", labels=[5, 7])
    assert whole[0] == first and whole[1]["label"] == 1
    with pytest.raises(InputError, match=r"Row 0 has 'yes' in the column 'kind' .*data.labels are: 'no'"):
        encode_classified(rows, tokenizer, text="{a}", label="kind", labels=["no"])
