"""Text or datasets to token shards in llm.c's format, and shards to training batches and documents."""

from lssar.data.batches import Batch, TokenBatches
from lssar.data.decode import decode_shards
from lssar.data.prepare import Settings, prepare
from lssar.data.shards import Shard, open_shard, write_shard
from lssar.data.stream import DocumentReader, TokenStream, find_shards
from lssar.data.synthetic import python_stdlib_text
from lssar.data.tokenizers import Tokenizer, load_tokenizer, save_tokenizer, tokenizer_from_dict

__all__ = [
    "Batch",
    "DocumentReader",
    "Settings",
    "Shard",
    "TokenBatches",
    "TokenStream",
    "Tokenizer",
    "decode_shards",
    "find_shards",
    "load_tokenizer",
    "open_shard",
    "prepare",
    "python_stdlib_text",
    "save_tokenizer",
    "tokenizer_from_dict",
    "write_shard",
]
