"""Tokenizing in worker processes, with results in the order of the documents."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from lssar.data.readers import Document
from lssar.data.tokenizers import Tokenizer

_BATCH_CHARACTERS = 1 << 18  # of text in one task of a worker


def tokenised(
    documents: Iterator[tuple[int, Document]], tokenizer: Tokenizer, workers: int
) -> Generator[tuple[int, Document, np.ndarray], None, None]:
    """Each document with its tokens, in order. Workers get whole batches, and few ahead of what is written."""
    if workers <= 1:
        for unit, document in documents:
            yield unit, document, _tokens(document, tokenizer.encode)
        return
    waiting: deque[tuple[list[tuple[int, Document]], Future[list[np.ndarray]]]] = deque()

    def next_batch() -> Iterator[tuple[int, Document, np.ndarray]]:
        batch, future = waiting.popleft()
        encoded = iter(future.result())
        for unit, document in batch:
            yield unit, document, _tokens(document, lambda text: next(encoded))

    # Not fork: this process may have threads (torch, progress) whose locks would stay locked in a forked copy.
    context = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
    if hasattr(os, "fork"):
        context.set_forkserver_preload(["__main__", __name__])
    pool = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer,))
    try:
        for batch in _batches(documents):
            texts = [document.content for _, document in batch if isinstance(document.content, str)]
            waiting.append((batch, pool.submit(_encode_in_worker, texts)))
            if len(waiting) > 3 * workers:
                yield from next_batch()
        while waiting:
            yield from next_batch()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a tokenizing worker was killed (out of memory?); run it again with fewer --workers; it resumes"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _tokens(document: Document, encode: Callable[[str], np.ndarray]) -> np.ndarray:
    return encode(document.content) if isinstance(document.content, str) else document.content


def _batches(documents: Iterator[tuple[int, Document]]) -> Iterator[list[tuple[int, Document]]]:
    batch: list[tuple[int, Document]] = []
    characters = 0
    for item in documents:
        batch.append(item)
        characters += len(item[1].content)
        if characters >= _BATCH_CHARACTERS or len(batch) >= 1024:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


_worker_tokenizer: Tokenizer


def _start_worker(tokenizer: Tokenizer) -> None:
    global _worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = tokenizer
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent is gone: a killed parent cannot stop its workers, which would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(texts: list[str]) -> list[np.ndarray]:
    return [_worker_tokenizer.encode(text) for text in texts]
