"""Packing, the split, and the position of the pipeline."""

import json
import sys
from pathlib import Path

import grain
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from train.config import DataConfig
from train.configs.tiny import tiny
from train.corpus import Corpus, load_corpus, split_corpus, take_whole
from train.data import eval_batches, make_rows, train_batches
from train.errors import InputError
from train.tokens import ByteTokenizer, FileTokenizer, load_tokenizer

BOS, EOS = 256, 257
DOCUMENTS = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12)


def corpus_of(documents):
    return Corpus("test", tuple(documents), "0")


def test_rows_of_two_documents_by_hand():
    rows = make_rows([b"abc", b"de"], ByteTokenizer(), seq=5)
    a, b, c, d, e = b"abcde"
    assert len(rows) == 2
    expected = [
        {
            "tokens": [BOS, a, b, c, BOS],
            "targets": [a, b, c, EOS, d],
            "segment_ids": [1, 1, 1, 1, 2],
            "positions": [0, 1, 2, 3, 0],
            "loss_mask": [True] * 5,
        },
        {
            "tokens": [d, e, 0, 0, 0],
            "targets": [e, EOS, 0, 0, 0],
            "segment_ids": [1, 1, 0, 0, 0],
            "positions": [0, 1, 0, 0, 0],
            "loss_mask": [True, True, False, False, False],
        },
    ]
    for index, wanted in enumerate(expected):
        found = rows[index]
        assert {name: values.tolist() for name, values in found.items()} == wanted
        assert all(values.dtype == np.int32 for name, values in found.items() if name != "loss_mask")


@hypothesis.given(documents=DOCUMENTS, seq=st.integers(1, 50))
def test_every_byte_and_every_end_is_predicted_once_and_within_its_document(documents, seq):
    rows = make_rows(documents, ByteTokenizer(), seq)
    found = [rows[index] for index in range(len(rows))]
    targets = np.concatenate([row["targets"][row["loss_mask"]] for row in found])
    assert targets.tolist() == [symbol for text in documents for symbol in [*text, EOS]]
    for row in found:
        np.testing.assert_array_equal(row["loss_mask"], row["segment_ids"] > 0)
        same = (np.diff(row["segment_ids"]) == 0) & (row["segment_ids"][1:] > 0)
        np.testing.assert_array_equal(row["targets"][:-1][same], row["tokens"][1:][same])
        np.testing.assert_array_equal(np.diff(row["positions"])[same], 1)
        begins = row["tokens"] == BOS
        assert not row["positions"][begins].any()
        assert (row["targets"][:-1][begins[1:]] == EOS).all()
        real = row["segment_ids"][row["loss_mask"]]
        assert real[0] == 1
        assert set(np.diff(real)) <= {0, 1}


@hypothesis.given(documents=st.lists(st.binary(min_size=1, max_size=8), min_size=30, max_size=60), order=st.randoms())
def test_the_split_depends_on_contents_alone(documents, order):
    documents = [*documents, bytes(range(9)), *(bytes([i]) * 9 for i in range(60))]
    split = split_corpus(corpus_of(documents), 0.3)
    assert not set(split.train) & set(split.held_out)
    assert set(split.train) | set(split.held_out) == set(documents)
    order.shuffle(documents)
    again = split_corpus(corpus_of(documents), 0.3)
    assert again.held_out == split.held_out
    assert sorted(again.train) == sorted(split.train)


def test_the_split_holds_out_about_the_fraction_asked_for():
    documents = [str(number).encode() for number in range(5000)]
    split = split_corpus(corpus_of(documents), 0.1)
    assert 400 < len(split.held_out) < 600
    assert set(split_corpus(corpus_of(documents), 0.05).held_out) < set(split.held_out)


def test_a_split_with_an_empty_side_is_refused():
    with pytest.raises(InputError, match=r"held_out=0\.5 leaves nothing"):
        split_corpus(corpus_of([b"one"]), 0.5)


def test_whole_documents_are_taken_while_they_fit():
    assert take_whole((b"aaaa", b"bb", b"ccc", b"d"), 7) == (b"aaaa", b"bb", b"d")
    assert take_whole((b"aaaa", b"bb"), 1) == (b"bb",)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return make_rows([rng.bytes(n) for n in rng.integers(5, 200, 40)], ByteTokenizer(), seq=32)


def take(batches, count):
    return [next(batches) for _ in range(count)]


def assert_same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def batches_of(rows, process=0, num_processes=1, **changes):
    cfg = tiny()
    for name, value in changes.items():
        object.__setattr__(cfg, name, value)
    return train_batches(rows, cfg, process, num_processes)


def test_batches_are_the_same_for_a_seed_and_others_for_another(rows):
    first = take(batches_of(rows), 10)
    assert_same(first, take(batches_of(rows), 10))
    other = take(batches_of(rows, seed=1), 10)
    assert any((one["tokens"] != two["tokens"]).any() for one, two in zip(first, other, strict=True))


def test_an_epoch_holds_every_row_once_and_the_next_is_in_another_order(rows):
    per_epoch = len(rows)
    drawn = np.concatenate([batch["tokens"] for batch in take(batches_of(rows), 2 * per_epoch)])
    everything = sorted(tuple(rows[index]["tokens"]) for index in range(per_epoch))
    epochs = [[tuple(row) for row in drawn[n * per_epoch : (n + 1) * per_epoch]] for n in range(3)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("done", [0, 1, 7])
def test_a_position_resumes_to_the_bit(rows, done):
    batches = batches_of(rows)
    take(batches, done)
    position = json.loads(json.dumps(batches.get_state()))
    expected = take(batches, 12)
    resumed = batches_of(rows)
    resumed.set_state(position)
    assert_same(take(resumed, 12), expected)


@pytest.mark.parametrize("num_processes", [2, 4])
def test_processes_load_blocks_of_the_same_global_batch(rows, num_processes):
    parts = [take(batches_of(rows, process, num_processes), 6) for process in range(num_processes)]
    joined = [{name: np.concatenate([part[step][name] for part in parts]) for name in parts[0][step]} for step in range(6)]
    assert_same(joined, take(batches_of(rows), 6))


def test_a_position_holds_for_another_number_of_processes(rows):
    one = batches_of(rows)
    take(one, 5)
    parts = []
    for process in range(2):
        batches = batches_of(rows, process, 2)
        batches.set_state(one.get_state())
        parts.append(next(batches)["tokens"])
    np.testing.assert_array_equal(np.concatenate(parts), next(one)["tokens"])


@pytest.mark.parametrize("num_processes", [1, 2])
def test_evaluation_sees_every_row_once(rows, num_processes):
    parts = [list(eval_batches(rows, 8, process, num_processes)) for process in range(num_processes)]
    assert len({len(part) for part in parts}) == 1
    counted = sum(int(batch["loss_mask"].sum()) for part in parts for batch in part)
    assert counted == len(rows.line)
    first = np.concatenate([part[0]["tokens"] for part in parts])
    np.testing.assert_array_equal(first, [rows[index]["tokens"] for index in range(8)])


def test_the_standard_library_is_found_and_nothing_installed_beside_it():
    corpus = load_corpus(DataConfig())
    assert len(corpus.documents) > 300
    assert corpus.num_bytes > 3_000_000
    assert any(b"class OrderedDict" in text for text in corpus.documents)
    assert Path(pytest.__file__).read_bytes() not in corpus.documents
    assert corpus.digest == load_corpus(DataConfig()).digest
    assert f"{len(corpus.documents)} files" in corpus.describe()


def test_files_and_folders_are_read_in_order_without_hidden_and_binary_ones(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "c.bin").write_bytes(b"\0\1")
    (tmp_path / "d.txt").write_text("")
    single = tmp_path / "a.txt"
    corpus = load_corpus(DataConfig(corpus=f"{single},{tmp_path}"))
    assert corpus.documents == (b"first", b"first", b"second")


def test_a_hugging_face_name_without_the_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        load_corpus(DataConfig(corpus="hf:some/name"))


def test_a_hugging_face_data_set_is_read_through_its_package(monkeypatch):
    class Rows(dict):
        column_names = ("text",)

    def load_dataset(*names, split):
        if names == ("some/name", "subset") and split == "train":
            return Rows(text=["één", "two"])
        raise ConnectionError("no route\nto host")

    fake = type("datasets", (), {"load_dataset": staticmethod(load_dataset)})
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert load_corpus(DataConfig(corpus="hf:some/name/subset")).documents == ("één".encode(), b"two")
    with pytest.raises(InputError, match=r"not found or not reachable \(no route\)$"):
        load_corpus(DataConfig(corpus="hf:other"))
    with pytest.raises(InputError, match="text_column='body': some/name/subset has text"):
        load_corpus(DataConfig(corpus="hf:some/name/subset", text_column="body"))


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["def f(self): return self.value"] * 20, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return str(path)


def test_a_tokenizer_file_gives_fewer_tokens_and_the_text_back(tokenizer_file):
    tokenizer = FileTokenizer(tokenizer_file)
    text = "def grün(self): return 1"
    ids = tokenizer.encode([text.encode()])[0]
    assert len(ids) < len(text.encode())
    assert tokenizer.decode(ids) == text
    rows = make_rows([text.encode()], tokenizer, seq=len(ids) + 1)
    assert rows[0]["tokens"].tolist() == [tokenizer.num_text_ids, *ids]
    assert rows[0]["targets"].tolist() == [*ids, tokenizer.num_text_ids + 1]


def test_tokenizers_that_do_not_fit_are_refused(tokenizer_file, tmp_path):
    size = FileTokenizer(tokenizer_file).num_text_ids
    load_tokenizer(tokenizer_file, size + 2)
    with pytest.raises(InputError, match=f"vocab_size={size + 1} is too small .* at least {size + 2}"):
        load_tokenizer(tokenizer_file, size + 1)
    with pytest.raises(InputError, match="vocab_size=257 is too small"):
        load_tokenizer("bytes", 257)
    with pytest.raises(InputError, match="no such file"):
        load_tokenizer(str(tmp_path / "absent.json"), 10_000)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match=r"not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "bad.json"), 10_000)


def test_bytes_come_back_as_text():
    assert ByteTokenizer().decode([BOS, *"né".encode(), EOS, 263]) == "né"
    assert ByteTokenizer().decode([0xFF]) == "�"


def test_the_pipeline_is_grains(rows):
    assert isinstance(batches_of(rows), grain.DatasetIterator)
