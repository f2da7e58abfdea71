"""Decode steps whose launches do not depend on the position, replayed from a CUDA graph on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lssar.nn.cache import LayerCache

WARM_UP = 2
"""Runs before a capture: kernels are compiled and libraries allocate their workspaces."""


class DecodeStep:
    """One token a sequence through a model with caches.

    `function` takes ids (B, 1), adds them to the caches and returns a tensor, which the next step overwrites on a GPU.
    It is called without gradients. With graph=True its launches are captured at the first step and replayed from then
    on, so that a step costs one launch on the host: a change of weights in place is seen, a change of settings (a
    power, a window) is not.

    The caches hold at least one token. Between steps they can be used as ever: rewound, restored, or extended.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], caches: Sequence[LayerCache], graph: bool | None = None):
        if not caches or not all(cache.tensors for cache in caches):
            raise ValueError("decode steps follow a prefill: the caches hold no tokens yet")
        if any(cache.ordered for cache in caches):
            raise ValueError("decode steps need caches that keep tokens in any order, and ALiBi needs their order")
        self.function, self.caches = function, list(caches)
        kept = caches[0].tensors[0]
        self.graph_wanted = kept.is_cuda if graph is None else graph
        self.at = torch.zeros(1, dtype=torch.int64, device=kept.device)
        self.ids = torch.zeros((kept.shape[0], 1), dtype=torch.int64, device=kept.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output: Tensor | None = None

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """What `function` returns for the next ids (B, 1)."""
        length = self.caches[0].length
        if length >= min(cache.room for cache in self.caches):
            raise ValueError(f"the cache has room for {length} tokens; one more does not fit")
        self.ids.copy_(ids)
        self.at.fill_(length)
        if not self.graph_wanted:
            with self._positions_on_device():
                self.output = self.function(self.ids)
        else:
            if self.graph is None:
                self._capture()
            assert self.graph is not None
            self.graph.replay()
        for cache in self.caches:
            cache.length = length + 1
        assert self.output is not None
        return self.output

    def _capture(self) -> None:
        """Warm-up runs write the same token to the same slot as the replay does, so that they leave no trace."""
        device = self.ids.device
        # casts that autocast keeps would be freed after its context, and the graph would read what is then there
        casts = torch.autocast(
            "cuda", torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), cache_enabled=False
        )
        with torch.cuda.device(device), casts, self._positions_on_device():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self.function(self.ids)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.output = self.function(self.ids)
        self.graph = graph

    @contextlib.contextmanager
    def _positions_on_device(self) -> Iterator[None]:
        for cache in self.caches:
            cache.at = self.at
        try:
            yield
        finally:
            for cache in self.caches:
                cache.at = None
