"""What is read: text, JSONL, token files, tokenizers; what is broken is named by file and place."""

import json
import os
import threading

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jzero import data
from jzero.data import ChangedError, DataError, Source, cache, text
from jzero.data.tokens import TokenFile, Tokens

TEXTS = ["the cat sat on the mat.\n", "a dog\n\n  barks <eos> at the cat\n", "", "über die Brücke\n"]


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """A byte-level BPE as one would get it: with truncation, padding and a template that adds tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def load(path, vocab=300, documents=False, tokenizer=None, eos=None, **source):
    return data.open_corpus(
        Source(path=str(path), **source), vocab=vocab, tokenizer=tokenizer, eos=eos, documents=documents
    )


def all_of(corpus):
    return np.asarray(corpus.tokens[: len(corpus.tokens)])


def documents_of(corpus):
    return [all_of(corpus)[a:b].tolist() for a, b in zip(corpus.documents[:-1], corpus.documents[1:], strict=True)]


def jsonl(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


# Formats.


def test_text_files_are_documents_of_bytes_with_a_zero_between(tmp_path):
    for name, content in {"a.txt": b"ab", "b.txt": b"", "c.txt": b"\xff!"}.items():
        (tmp_path / name).write_bytes(content)
    corpus = load(tmp_path)
    assert documents_of(corpus) == [[97, 98, 0], [0], [255, 33]]
    assert documents_of(load(tmp_path, eos=299)) == [[97, 98, 299], [299], [255, 33]]
    assert documents_of(load(tmp_path, eos="7")) == [[97, 98, 7], [7], [255, 33]]


def test_lines_of_jsonl_are_documents(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", {"text": "ab", "id": 1}, "", {"text": "ü"}, {"text": ""}, {"text": "c\nd"})
    assert documents_of(load(path)) == [[97, 98, 0], [0xC3, 0xBC, 0], [0], [99, 10, 100]]
    other = jsonl(tmp_path / "e.json", {"body": "x"}, {"body": "y"})
    assert documents_of(load(other, format="jsonl", text_key="body")) == [[120, 0], [121]]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_are_read_as_they_are(tmp_path, dtype):
    (tmp_path / "deep").mkdir()
    np.array([5, 9, 299, 3, 9, 4], np.dtype(dtype).newbyteorder("<")).tofile(tmp_path / "a.bin")
    np.array([9, 1, 2], np.dtype(dtype).newbyteorder("<")).tofile(tmp_path / "deep" / "b.bin")
    corpus = load(tmp_path, dtype=dtype)
    assert all_of(corpus).tolist() == [5, 9, 299, 3, 9, 4, 9, 1, 2]
    assert all_of(corpus).dtype == np.int32
    assert corpus.documents is None
    assert documents_of(load(tmp_path, dtype=dtype, documents=True, eos=9)) == [[5, 9], [299, 3, 9], [4], [9], [1, 2]]


def test_the_size_of_a_token_goes_by_the_vocabulary(tmp_path):
    np.array([5, 9, 65_535], "<u2").tofile(tmp_path / "small.bin")
    assert all_of(load(tmp_path / "small.bin", vocab=65_536)).tolist() == [5, 9, 65_535]
    np.array([5, 9, 65_536], "<u4").tofile(tmp_path / "large.bin")
    assert all_of(load(tmp_path / "large.bin", vocab=65_537)).tolist() == [5, 9, 65_536]


@pytest.mark.parametrize("cuts", [(0, 11), (2, 3), (3, 8), (0, 0), (10, 11), (4, 99)])
def test_any_stretch_over_several_files_can_be_read(tmp_path, cuts):
    for name, content in {"a": b"ab", "b": b"", "c": b"cde", "d": b"fgh"}.items():
        (tmp_path / name).write_bytes(content)
    tokens = Tokens([TokenFile(f, "uint8", keep_open=f.name != "c") for f in sorted(tmp_path.iterdir())], 0)
    whole = np.frombuffer(b"ab\0\0cde\0fgh", np.uint8)
    assert len(tokens) == 11
    np.testing.assert_array_equal(tokens[slice(*cuts)], whole[slice(*cuts)])


# Tokenizers.


def test_a_tokenizer_makes_documents_as_the_library_does_and_cuts_or_adds_nothing(tmp_path, tokenizer_file):
    path = jsonl(tmp_path / "d.jsonl", *({"text": t} for t in TEXTS))
    library = Tokenizer.from_file(tokenizer_file)
    library.no_truncation()
    library.no_padding()
    documents = documents_of(load(path, tokenizer=tokenizer_file, eos="<eos>"))
    assert [d[-1] for d in documents[:-1]] == [0] * 3  # eos between two documents
    bodies = [d[:-1] for d in documents[:-1]] + documents[-1:]
    assert [library.decode(d, skip_special_tokens=False) for d in bodies] == TEXTS
    assert [len(d) > 4 for d in bodies] == [True, True, False, True]
    for i in (0, 2, 3):
        assert bodies[i] == library.encode(TEXTS[i], add_special_tokens=False).ids
    assert 0 not in bodies[1]  # text that spells the end of a document is text
    assert documents_of(load(path, tokenizer=tokenizer_file)) == bodies
    assert documents_of(load(path, tokenizer=tokenizer_file, eos=0)) == documents


def test_a_large_file_is_tokenized_in_pieces_as_in_one(tmp_path, tokenizer_file, monkeypatch):
    content = "".join(TEXTS) * 50
    (tmp_path / "big.txt").write_text(content)
    whole = all_of(load(tmp_path / "big.txt", tokenizer=tokenizer_file)).tolist()
    monkeypatch.setattr(text, "PIECE_BYTES", 100)
    pieces = list(text.text_pieces([tmp_path / "big.txt"]))
    assert len(pieces) > 20
    assert "".join(p.text for p in pieces) == content
    assert [p.first for p in pieces] == [True] + [False] * (len(pieces) - 1)
    monkeypatch.setattr(cache, "VERSION", 0)
    assert all_of(load(tmp_path / "big.txt", tokenizer=tokenizer_file)).tolist() == whole


def test_text_is_tokenized_once_per_content(tmp_path, tokenizer_file, monkeypatch):
    made = []
    make = cache._make
    monkeypatch.setattr(cache, "_make", lambda home, *rest: (made.append(home), make(home, *rest)))
    path = jsonl(tmp_path / "d.jsonl", {"text": "one"}, {"text": "two"})
    first = documents_of(load(path, tokenizer=tokenizer_file))
    path.rename(tmp_path / "moved.jsonl")
    assert documents_of(load(tmp_path / "moved.jsonl", tokenizer=tokenizer_file)) == first
    assert len(made) == 1
    jsonl(tmp_path / "moved.jsonl", {"text": "one"}, {"text": "tWo"})
    assert documents_of(load(tmp_path / "moved.jsonl", tokenizer=tokenizer_file)) != first
    load(tmp_path / "moved.jsonl", tokenizer=tokenizer_file, eos=0)
    load(tmp_path / "moved.jsonl")
    assert len(set(made)) == len(made) == 4
    assert sorted(p.name for p in cache.directory().iterdir()) == sorted(home.name for home in made)


def test_two_that_tokenize_the_same_at_the_same_time_get_the_same(tmp_path, tokenizer_file):
    path, results = jsonl(tmp_path / "d.jsonl", *({"text": t} for t in TEXTS * 30)), []
    threads = [
        threading.Thread(target=lambda: results.append(documents_of(load(path, tokenizer=tokenizer_file))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(r == results[0] for r in results)
    assert len(list(cache.directory().iterdir())) == 1


def test_nothing_is_left_in_the_cache_by_text_that_is_refused(tmp_path, tokenizer_file):
    path = jsonl(tmp_path / "d.jsonl", {"text": "good"}, "{bad")
    with pytest.raises(DataError):
        load(path, tokenizer=tokenizer_file)
    assert list(cache.directory().iterdir()) == []


def test_a_damaged_cache_is_named(tmp_path, tokenizer_file):
    path = jsonl(tmp_path / "d.jsonl", {"text": "good"})
    load(path, tokenizer=tokenizer_file)
    (home,) = cache.directory().iterdir()
    (home / "tokens.bin").write_bytes(b"")
    with pytest.raises(DataError, match=rf"{home.name}: is damaged; delete it"):
        load(path, tokenizer=tokenizer_file)


# Bad input.


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{bad", r"d.jsonl, line 3: not JSON: .*column 2"),
        ('{"n": ' + "9" * 5000 + "}", "d.jsonl, line 3: Exceeds the limit"),
        ('{"text": "a"} x', "line 3: not JSON"),
        ("[1]", r"line 3: must be an object with the key 'text' \(data.text_key\), not a list"),
        ('{"body": "x", "id": 3}', r"line 3: has no key 'text' \(data.text_key\); its keys: 'body', 'id'"),
        ('{"text": null}', "line 3: 'text' must be text, not null"),
        ('{"text": 3}', "line 3: 'text' must be text, not a number"),
        (r'{"text": "\ud800"}', r"line 3: 'text' has half a surrogate pair, '\\ud800'"),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path, line, words):
    with pytest.raises(DataError, match=words):
        load(jsonl(tmp_path / "d.jsonl", {"text": "a"}, "", line, {"text": "b"}))


def test_a_line_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match="line 2: byte 11 is not UTF-8"):
        load(tmp_path / "d.jsonl")


def test_text_that_is_not_utf_8_needs_no_tokenizer(tmp_path, tokenizer_file, monkeypatch):
    monkeypatch.setattr(text, "PIECE_BYTES", 64)
    (tmp_path / "t.txt").write_bytes(b"good line\n" * 50 + b"\xff")
    assert len(load(tmp_path / "t.txt").tokens) == 501
    with pytest.raises(DataError, match=r"t.txt: byte 500 is not UTF-8"):
        load(tmp_path / "t.txt", tokenizer=tokenizer_file)


@pytest.mark.parametrize("at", [0, 7, 99])
def test_a_token_id_beyond_the_vocabulary_is_named_with_file_and_place(tmp_path, at, monkeypatch):
    monkeypatch.setattr("jzero.data.tokens.CHUNK", 8)
    ids = np.full(100, 299, "<u2")
    ids[at] = 300
    ids.tofile(tmp_path / "t.bin")
    assert len(load(tmp_path / "t.bin", vocab=301).tokens) == 100
    with pytest.raises(DataError, match=rf"t.bin: token {at} \(from 0\) has the id 300, but model.vocab = 300"):
        load(tmp_path / "t.bin", vocab=300)


def test_token_files_of_another_form_are_refused(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(b"abc")
    with pytest.raises(DataError, match=r"t.bin: 3 bytes are no whole number of uint16 tokens"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"t.bin: empty"):
        load(path)
    np.arange(100, 300, dtype="<u4").tofile(path)
    with pytest.raises(DataError, match=r"looks like uint32 .* say data.dtype = uint32"):
        load(path)
    assert len(load(path, dtype="uint32").tokens) == 200
    np.concatenate([np.array([20240520, 1], "<i4"), np.zeros(254, "<i4"), np.arange(9, dtype="<i4")]).tofile(path)
    with pytest.raises(DataError, match=r"header of llm.c; cut it off: tail -c \+1025"):
        load(path, vocab=50_257)
    np.arange(100, 300, dtype="<u2").tofile(path)
    with pytest.raises(DataError, match=r"told by data.eos; name it"):
        load(path, documents=True)


def test_a_folder_of_several_formats_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.bin").write_bytes(b"xx")
    with pytest.raises(DataError, match=r"several formats: text \(.*a.txt\), tokens \(.*b.bin\); choose by data.glob"):
        load(tmp_path)
    assert len(load(tmp_path, glob="*.txt").tokens) == 1
    assert len(load(tmp_path, format="text").tokens) == 4


def test_a_tokenizer_that_does_not_match_is_refused(tmp_path, tokenizer_file):
    (tmp_path / "t.txt").write_text("text")
    for settings, words in [
        ({"tokenizer": tokenizer_file, "vocab": 269}, r"tokenizer.json: has 270 token ids, and model.vocab = 269"),
        ({"tokenizer": "/no/such.json"}, r"data.tokenizer = /no/such.json: no such file"),
        ({"tokenizer": str(tmp_path / "t.txt")}, r"t.txt: not a tokenizer.json"),
        ({"tokenizer": tokenizer_file, "eos": "</s>"}, r"data.eos = </s>: not a token of .* special tokens: <eos>"),
        ({"tokenizer": tokenizer_file, "eos": 270}, r"data.eos = 270: not a token of .* ids go to 269"),
        ({"eos": "</s>"}, r"data.eos = </s>: a name needs data.tokenizer"),
        ({"eos": 300}, r"data.eos = 300: ids go from 0 to model.vocab - 1 = 299"),
        ({"vocab": 255}, r"model.vocab = 255: text without a tokenizer is read as bytes, which have 256 values"),
    ]:
        with pytest.raises(DataError, match=words) as caught:
            load(tmp_path / "t.txt", **settings)
        assert "\n" not in str(caught.value)


def test_a_corpus_without_a_token_is_refused(tmp_path):
    with pytest.raises(DataError, match="no document in it has a token"):
        load(jsonl(tmp_path / "d.jsonl", "", {"text": ""}))


# Files that change under way.


@pytest.mark.parametrize("keep_open", [True, False])
@pytest.mark.parametrize("size", [4_000, 20_000])
def test_a_file_that_changes_size_is_an_error_that_names_it(tmp_path, keep_open, size):
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(10_000))
    file = TokenFile(path, "uint8", keep_open=keep_open)
    assert len(file.read(9_000, 9_129)) == 129
    os.truncate(path, size)
    with pytest.raises(
        ChangedError, match=rf"t.bin: changed while it was read: it had 10,000 bytes and now has {size:,}"
    ):
        file.read(0, 129)


def test_a_file_that_is_rewritten_is_an_error(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(100))
    file = TokenFile(path, "uint8")
    os.utime(path, ns=(0, 0))
    with pytest.raises(ChangedError, match=r"t.bin: .* was written to"):
        file.read(0, 10)


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone.txt: no such file"):
        TokenFile(tmp_path / "gone.txt", "uint8")
    (tmp_path / "t.bin").write_bytes(bytes(100))
    file = TokenFile(tmp_path / "t.bin", "uint8", keep_open=False)
    (tmp_path / "t.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"t.bin"):
        file.read(0, 10)


def test_a_tokenizer_that_cannot_encode_the_text_is_named(tmp_path):
    (tmp_path / "t.txt").write_text("some words")
    tokenizer = Tokenizer(models.WordLevel({"some": 0}, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "few.json"))
    with pytest.raises(DataError, match=r"data.tokenizer = .*few.json: cannot encode the text: .*UNK"):
        load(tmp_path / "t.txt", tokenizer=str(tmp_path / "few.json"))


def test_a_file_of_numbers_is_not_taken_for_text(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(300, dtype=np.int64))
    with pytest.raises(DataError, match=r"tokens.npy: holds zero bytes, so it is no text; .* in a .bin"):
        load(tmp_path / "tokens.npy")
