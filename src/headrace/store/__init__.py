"""Tokens on disk: Megatron's .bin/.idx pair, and how text becomes one.

format.py        the bytes; the only file that knows them
reader.py        TokenStore: memory-mapped, checked
writer.py        StoreWriter: atomic
manifest.py      what lies beside a pair: what its ids mean
bpe.py           the byte-level BPE tokenizer (needs the extra `demo`)
text.py          text files -> tokens
corpus_cache.py  a corpus built once, reused by the next run
records.py       .txt, .jsonl, .parquet -> documents, in pieces that processes share out
chats.py         chats -> text, and what of it is learnt
prepare.py       documents -> tokens with a tokenizer that exists: plan, resume; and beside it
                 prepare_tokenizer.py (which one), prepare_part.py (one process's share), prepare_workers.py,
                 prepare_joined.py (what is left in the end)
"""

from headrace.store.bpe import Tokenizer, load_tokenizer
from headrace.store.corpus_cache import cached_corpus
from headrace.store.format import optimal_dtype
from headrace.store.manifest import Manifest, read_manifest, vocab_size_of
from headrace.store.reader import TokenStore
from headrace.store.text import CorpusSummary, build_corpus, standard_library
from headrace.store.writer import StoreWriter

__all__ = [
    "CorpusSummary",
    "Manifest",
    "StoreWriter",
    "TokenStore",
    "Tokenizer",
    "build_corpus",
    "cached_corpus",
    "load_tokenizer",
    "optimal_dtype",
    "read_manifest",
    "standard_library",
    "vocab_size_of",
]
