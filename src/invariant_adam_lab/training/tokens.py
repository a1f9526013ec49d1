"""Any text, a file or a folder of files, as tokens of a byte-pair vocabulary that is trained on it.

A folder's documents are its files of UTF-8 text, each once, in the order of their SHA-256: the end of the text, which
is held out, is then no special part of the folder. Vocabulary and tokens are cached by the SHA-256 of the documents.
The cached file may be named instead of the text, on a machine that lacks the text.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import record
from .data import HELD_OUT, DataError, Tell, Text, root

END = "<|endoftext|>"  # after each document
MOST_TOKENS = 1 << 15  # of a vocabulary: token numbers are kept as int16
MOST_HELD_OUT = 500_000  # tokens: about 500 sequences of GPT-2
VOCABULARY_CHARACTERS = 100_000_000  # that a vocabulary is trained on, spread over the text
PIECE = 1 << 20  # characters that are turned into tokens at once


class Tokens(Text):
    """A text as tokens: `vocab` has the bytes of each as GPT-2 spells them."""

    __slots__ = ()

    def decode(self) -> str:
        """Return the documents one after the other, with `END` after each."""
        from tokenizers.decoders import ByteLevel

        numbers = torch.cat((self.ids, self.test_ids)).tolist()
        return str(ByteLevel().decode([self.vocab[i] for i in numbers]))


def documents(path: str | Path) -> tuple[list[str], str]:
    """Return the texts of a file or of a folder's files, and the SHA-256 of all of them."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} does not exist")
    found: dict[bytes, str] = {}
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        content = file.read_bytes()
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            if file == path:
                raise DataError(f"{path} is no UTF-8 text: {error}") from None
            continue
        if text.strip() and "\0" not in text:
            found[hashlib.sha256(content).digest()] = text
    if not found:
        raise DataError(f"{path} holds no UTF-8 text; name a file of text, or a folder with some")
    order = sorted(found)
    return [found[key] for key in order], hashlib.sha256(b"".join(order)).hexdigest()


def digest(path: str | Path) -> str:
    """Return the SHA-256 of a text's documents; cached tokens know that of the text they were made of."""
    if not _is_cached(path):
        return documents(path)[1]
    with _opened(path) as arrays:
        return str(arrays["digest"])


def tokens(path: str | Path, vocabulary: int, tell: Tell = lambda text: None) -> Tokens:
    """Return a text as tokens, from the cache where it was made before.

    Args:
        path: a file of UTF-8 text, or a folder: all such files in it and below; or the cached file of their tokens.
        vocabulary: tokens, at most 32,768; a short text has fewer.
        tell: is told what is being done.
    """
    if _is_cached(path):
        with _opened(path) as arrays:
            held = int(arrays["vocabulary"])
        if held != vocabulary:
            raise DataError(f"{path} has a vocabulary of {held:,}, and this model has {vocabulary:,}; name the text")
        return _read(path)
    texts, digest = documents(path)
    place = root() / f"tokens-{digest[:16]}-{vocabulary}.npz"
    if place.exists():
        return _read(place)
    made, words = _make(texts, vocabulary, tell)
    buffer = io.BytesIO()
    # No token has a line end in it: bytes that are not printed are spelt by other characters.
    spelt = np.frombuffer("\n".join(words).encode(), np.uint8)
    np.savez(buffer, ids=made, vocab=spelt, digest=np.array(digest), vocabulary=np.array(vocabulary))
    try:
        record.write(place, buffer.getvalue())
    except OSError as error:
        tell(f"not cached in {place}: {error}")
    return _split(made, words)


def _is_cached(path: str | Path) -> bool:
    return Path(path).suffix == ".npz" and Path(path).is_file()


@contextmanager
def _opened(place: str | Path) -> Iterator[Any]:
    """Open cached tokens, or refuse a damaged file."""
    try:
        with np.load(place, allow_pickle=False) as arrays:
            yield arrays
    except (KeyError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{place} is damaged ({error}); delete it and run the command on the text") from None


def _read(place: str | Path) -> Tokens:
    with _opened(place) as arrays:
        return _split(arrays["ids"], tuple(arrays["vocab"].tobytes().decode().split("\n")))


def encode(texts: list[str], vocabulary: int) -> Tokens:
    """Train a vocabulary on documents and turn them into tokens."""
    return _split(*_make(texts, vocabulary))


def _make(texts: list[str], vocabulary: int, tell: Tell = lambda text: None) -> tuple[Any, tuple[str, ...]]:
    """Return the tokens of all documents, as int16, and the vocabulary in the order of its numbers."""
    if not 257 <= vocabulary <= MOST_TOKENS:
        raise ValueError(
            f"vocabulary must be 257 (every byte, and the end of a text) to {MOST_TOKENS}, got {vocabulary}"
        )
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise DataError("byte-pair tokens need tokenizers: pip install 'invariant-adam[text]'") from None
    pieces = [piece for text in texts for piece in _pieces(text)]
    every = -(-sum(map(len, texts)) // VOCABULARY_CHARACTERS)
    tell(f"training a vocabulary of {vocabulary:,} on {len(texts):,} documents; it is kept")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces[::every], trainer)
    tokenizer.encode_special_tokens = True  # a document may hold the words of `END`
    end = tokenizer.token_to_id(END)
    found = []
    for text in texts:
        found += [np.asarray(one.ids, np.int16) for one in tokenizer.encode_batch(list(_pieces(text)))]
        found.append(np.array([end], np.int16))
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return np.concatenate(found), tuple(word for word, _ in words)


def _pieces(text: str) -> Iterator[str]:
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def _split(ids: Any, words: tuple[str, ...]) -> Tokens:
    """Hold out the end: a tenth, or `MOST_HELD_OUT` tokens."""
    cut = len(ids) - min(round(HELD_OUT * len(ids)), MOST_HELD_OUT)
    whole = torch.from_numpy(np.ascontiguousarray(ids))
    return Tokens(whole[:cut], whole[cut:], words)
