"""What a run would take: memory of a process, communication, time and cost, for a recipe, a number of processes and a
card.

Memory follows the tensors of a step (`footprint.py`). Time is that of measured kernels, from the JSON files that
`lssar bench` and `benchmarks/scale.py` left in `benchmarks/results`; where there are none for a card, it follows from
data sheets and the shares below, and a note says so. Networks are taken from data sheets, and the exchange of weights
and gradients is taken to overlap with computation.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lssar.context import exchange_of
from lssar.layouts import LayerConfig
from lssar.model import ModelConfig
from lssar.tables import terminal_table
from lssar.training.footprint import footprint
from lssar.training.initialise import meta_model
from lssar.training.metrics import PEAK_TFLOPS, mean_visible
from lssar.training.recipes import Recipe

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
GIB = 2**30


@dataclass(frozen=True)
class Card:
    """An accelerator and its network, by the vendors' data sheets; `price` is what we take an hour of one to cost."""

    memory_gib: float
    memory_tb_s: float
    link_gb_s: float
    """Within a node, one direction."""
    network_gb_s: float
    """Between nodes, of one card."""
    price: float
    """US dollars an hour."""
    per_node: int = 8


CARDS = {
    "h200": Card(139.8, 4.8, 450, 50, 3.5),
    "h100": Card(79.6, 3.35, 450, 50, 2.5),
    "a100": Card(79.3, 2.0, 300, 25, 1.5),
    "b200": Card(178.0, 8.0, 900, 50, 5.0),
    "cpu": Card(0.0, 0.05, 1, 1, 0.0),
}
PRODUCT_SHARE = 0.74
"""Of the data sheet's FLOP/s, where no products were measured on a card. All products of a step of `books-51m` together
reach it on an H200 (benchmarks/results/h200-lab.txt, commit 5e14872: 20.0 TFLOP in 27.4 ms)."""
GAPS_S = 0.0046
"""Seconds of a step between kernels, in the same step: 70.6 ms, of which 66.0 ms in kernels. Most of it is spent at the
ends, where the host waits for the loss and starts the next step."""
MEMORY_SHARE, LINK_SHARE = 0.8, 0.8
"""Of the data sheet's memory and network bandwidth; assumed."""
LIBRARIES = 2**26
"""Bytes that cuBLAS allocates as workspace."""
UPDATE_TRAFFIC = 40
"""Bytes a parameter that clipping and AdamW read and write in a step."""
NEWTON_SCHULZ = 5
"""Steps of Muon's iteration."""
LAUNCHES_MS = 1.0
"""Shorter forwards and backwards are results of the host, which starts the kernels, unless they were timed as a CUDA
graph."""
TILE = 64
"""Rows and keys of a tile of the windowed kernels, which compute whole tiles."""


@dataclass(frozen=True)
class Plan:
    """The result of `plan`; plain values."""

    size: str
    layout: str
    card: str
    mesh: dict[str, int]
    parameters: int
    tokens: int
    steps: int
    tokens_per_step: int
    micro_steps: int
    micro_batch: tuple[int, int]
    """Sequences, and tokens of each, in one forward of one process."""
    memory: dict[str, float]
    """GiB of one process at the fullest moment of a step, by what they are for."""
    moment: str
    """When that is: the loss, the backward of the blocks, or the optimiser step."""
    communication: dict[str, float]
    """GB that one process receives in a step."""
    seconds: dict[str, float]
    """Of a step, by what takes them."""
    notes: list[str] = field(default_factory=list)
    price: float = 0.0

    @property
    def peak_gib(self) -> float:
        return sum(self.memory.values())

    @property
    def step_s(self) -> float | None:
        """None for a CPU, whose speed is not predicted."""
        if not self.seconds:
            return None
        hidden = self.seconds["weights and gradients"]
        return max(sum(self.seconds.values()) - hidden, hidden)

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.step_s is None else self.tokens_per_step / self.step_s

    @property
    def gpu_hours(self) -> float | None:
        processes = self.mesh["data"] * self.mesh["context"]
        return None if self.step_s is None else self.steps * self.step_s * processes / 3600

    @property
    def cost(self) -> float | None:
        return None if self.gpu_hours is None else self.gpu_hours * self.price

    def to_dict(self) -> dict[str, Any]:
        totals = ("peak_gib", "step_s", "tokens_per_s", "gpu_hours", "cost")
        return {**asdict(self), **{name: getattr(self, name) for name in totals}}


def plan(
    recipe: Recipe, processes: int = 1, card: str = "h200", price: float | None = None, results: Path = RESULTS
) -> Plan:
    """The plan of a recipe on so many processes, one a card."""
    if card not in CARDS:
        raise ValueError(f"unknown card {card!r}; known: {', '.join(CARDS)}")
    if processes < 1 or processes % recipe.context_parallel:
        raise ValueError(
            f"processes must be a multiple of context_parallel, {recipe.context_parallel}; got {processes}"
        )
    job = _Job(recipe, recipe.model(), processes, card)
    memory, moment = job.memory()
    rates = Rates.read(card, results)
    seconds = {} if card == "cpu" else job.seconds(rates)
    return Plan(
        size=recipe.size, layout=job.config.layout, card=card,
        mesh={"data": processes // recipe.context_parallel, "context": recipe.context_parallel,
              "sharded over": job.shards},
        parameters=job.parameters, tokens=recipe.steps * recipe.batch_tokens, steps=recipe.steps,
        tokens_per_step=recipe.batch_tokens, micro_steps=job.micro_steps, micro_batch=(recipe.micro_batch, job.rows),
        memory={name: size / GIB for name, size in memory.items()}, moment=moment,
        communication={name: size / 1e9 for name, size in job.communication().items()}, seconds=seconds,
        notes=list(dict.fromkeys(rates.notes)) if seconds else [], price=CARDS[card].price if price is None else price,
    )  # fmt: skip


class _Job:
    """A recipe on a number of processes: the numbers that memory, communication and time follow from."""

    def __init__(self, recipe: Recipe, config: ModelConfig, processes: int, card: str):
        self.recipe, self.config, self.processes, self.card = recipe, config, processes, card
        self.context = recipe.context_parallel
        self.sharded = recipe.parallel == "fsdp" and processes > 1
        self.shards = processes if self.sharded else 1
        self.micro_steps = recipe.micro_steps(processes)
        self.rows = recipe.length // self.context
        self.tokens = recipe.micro_batch * self.rows
        self.half = recipe.dtype == "bfloat16"
        self.width = 2 if self.half else 4
        model = meta_model(config)
        self.parameters = model.parameter_count()
        self.embedding = model.embed.weight.numel()
        self.matrices = [
            (p.shape[0], p.shape[1]) for block in model.layers() for p in block.parameters() if p.dim() == 2
        ]
        self.block = sum(p.numel() for p in model.layers()[0].parameters())
        self.key_heads = config.key_heads or config.heads

    # memory

    def memory(self) -> tuple[dict[str, float], str]:
        """Bytes at the fullest moment of a step, and which moment that is."""
        moments = self._moments_on_cpu() if self.card == "cpu" else self._moments()
        moment = max(moments, key=lambda name: sum(moments[name].values()))
        return moments[moment], moment

    def _footprint(self, loss: bool) -> Any:
        return footprint(
            self.config, self.recipe.micro_batch, self.recipe.length, half=self.half, compiled=self.recipe.compile,
            sharded=self.sharded, loss=loss, context=self.context,
        )  # fmt: skip

    def _state(self) -> tuple[dict[str, float], float]:
        """Bytes of weights and optimiser, and of all gradients, in one process."""
        moments = 8 * self.parameters
        if self.recipe.optimiser == "muon":  # one moment for the matrices in the blocks
            moments -= 4 * sum(rows * columns for rows, columns in self.matrices)
        weights = 4 * self.parameters / self.shards
        return {"weights": weights, "optimiser": moments / self.shards}, weights

    def _gathered(self) -> float:
        """Weights that FSDP holds whole: the embedding during the step, a block in use, and the next one twice, in the
        buffer that it arrives in and as parameters."""
        if not self.sharded:
            return 0.0
        return 4.0 * self.embedding + 3.0 * self.width * self.block

    def _reduced(self) -> float:
        """Gradients of a block that FSDP holds whole: as the backward makes them, and in float32 as they are sent."""
        return (self.width + 4.0) * self.block if self.sharded else 0.0

    def _moments(self) -> dict[str, dict[str, float]]:
        state, gradients = self._state()
        f, gathered = self._footprint(loss=False), self._gathered()
        waiting = gradients if self.micro_steps > 1 else 0.0  # of earlier micro-batches
        hidden = self.tokens * self.config.width * self.width
        logits = self.tokens * self.config.padded_vocab * self.width
        kept = f.kept + f.weight_copies + self._kept_by_attention()
        buckets = 4 * self.parameters if self.processes > 1 and not self.sharded else 0  # DDP's, for the exchange
        common = {**state, "gathered": gathered, "buckets": buckets}
        head_copy = self.embedding * self.width if self.half else 0
        return {
            "loss": {
                **common, "gradients": waiting, "activations": kept + hidden, "logits": 2 * logits + head_copy,
                "workspace": LIBRARIES,
            },
            "backward": {
                **common, "gradients": waiting + 4.0 * self.embedding, "activations": kept,
                "workspace": LIBRARIES + f.peak - f.kept - f.weight_copies + self._attention_workspace()
                + head_copy + self._reduced(),
            },
            "optimiser": {**state, "buckets": buckets, "gradients": gradients, "workspace": LIBRARIES},
        }  # fmt: skip

    def _moments_on_cpu(self) -> dict[str, dict[str, float]]:
        state, gradients = self._state()
        f, gathered = self._footprint(loss=True), self._gathered()
        waiting = gradients if self.micro_steps > 1 else 0.0
        buckets = 4 * self.parameters if self.processes > 1 and not self.sharded else 0
        common = {**state, "buckets": buckets}
        largest = 4 * self.embedding / self.shards
        return {
            "backward": {
                **common, "gathered": gathered, "gradients": waiting,
                "activations": f.kept + f.weight_copies,
                "workspace": f.peak - f.kept - f.weight_copies,
            },
            "optimiser": {**common, "gradients": gradients, "workspace": 2 * largest},
        }  # fmt: skip

    def _kept_by_attention(self) -> float:
        """What kernels keep besides q, k, v and o: numbers of each row."""
        return 4.0 * self.config.heads * self.tokens * sum(map(_row_numbers, self.config.layer_configs))

    def _attention_workspace(self) -> float:
        """Of the backward of one layer: unit queries and keys of our kernels, gradients of queries in float32 of
        PyTorch's."""
        return 4.0 * self.tokens * self.config.heads * self.config.head_size

    def _exchange(self, layer: LayerConfig) -> Any:
        if self.context == 1:
            return None
        c = self.config
        return exchange_of(self.context, self.recipe.length, c.heads, self.key_heads, c.head_size, layer.window)

    # communication

    def communication(self) -> dict[str, float]:
        """Bytes that a process receives in a step."""
        n = self.processes
        share, inside = (n - 1) / n, self.parameters - self.embedding
        found = {"weights": 0.0, "gradients": 0.0, "context": 0.0}
        if self.sharded:  # gathered in the forward and again in the backward, the embedding once
            found["weights"] = share * self.micro_steps * (2 * self.width * inside + 4 * self.embedding)
            found["gradients"] = share * self.micro_steps * 4 * self.parameters
        else:
            found["gradients"] = 2 * share * 4 * self.parameters
        passes = 3 if self.recipe.checkpoint_layers else 2
        for layer in self.config.layer_configs:
            if (exchange := self._exchange(layer)) is not None:
                numbers = exchange.received * self.recipe.micro_batch
                found["context"] += passes * numbers * self.width * self.micro_steps
        return found

    # time

    def seconds(self, rates: Rates) -> dict[str, float]:
        """Of a step, by what takes them. Communication of weights and gradients overlaps with the rest."""
        card, c = CARDS[self.card], self.config
        passes = 4 if self.recipe.checkpoint_layers else 3  # forward, twice that for the backward, perhaps again
        products = 3 * rates.product_s(self.tokens, c.width, c.padded_vocab)
        products += sum(passes * rates.product_s(self.tokens, columns, rows) for rows, columns in self.matrices)
        f = self._footprint(loss=False)
        logits = 4 * self.tokens * c.padded_vocab * self.width
        moved = (f.traffic or 3 * f.kept) + logits
        update = UPDATE_TRAFFIC * self.parameters / self.shards / rates.memory_b_s + self._newton_schulz(rates)
        kernels = {
            "matrix products": self.micro_steps * products,
            "attention": self.micro_steps * sum(self._attention_s(layer, rates) for layer in c.layer_configs),
            "element-wise": self.micro_steps * moved / rates.memory_b_s,
            "optimiser": update,
        }
        sent, link, within = self.communication(), card.link_gb_s, self.context <= card.per_node
        if self.processes > card.per_node:  # a node's cards share its network
            link = min(link, card.per_node * card.network_gb_s)
        return {
            **kernels,
            "between kernels": GAPS_S,
            "context": sent["context"] / (LINK_SHARE * 1e9 * (card.link_gb_s if within else card.network_gb_s)),
            "weights and gradients": (sent["weights"] + sent["gradients"]) / (LINK_SHARE * 1e9 * link),
        }

    def _attention_s(self, layer: LayerConfig, rates: Rates) -> float:
        """Of one layer in one micro-step: forward and backward, and the forward again if it is recomputed."""
        c = self.config
        pairs = self.recipe.micro_batch * self.rows * mean_visible(self.recipe.length, layer.window) * c.heads
        total = 0.0
        for mechanism, share in zip(layer.specs, layer.shares):
            part = pairs * share / sum(layer.shares)
            group = c.heads // self.key_heads
            forward, both = rates.attention_s(mechanism.name, layer.window, self.recipe.length, c.head_size, group)
            total += part * (both + (forward if self.recipe.checkpoint_layers else 0.0))
        return total

    def _newton_schulz(self, rates: Rates) -> float:
        """Muon's products; every process computes all of them."""
        if self.recipe.optimiser != "muon":
            return 0.0
        flops = 0
        for shape in self.matrices:
            short, long = sorted(shape)
            flops += NEWTON_SCHULZ * (4 * short * short * long + 2 * short**3)
        return flops / rates.flops


def _row_numbers(layer: LayerConfig) -> int:
    """Float32 numbers a row and head that the kernels of a layer keep for the backward."""
    softmax = all(s.activation == "exp" and s.p is None for s in layer.specs)
    return 1 if softmax else 3


@dataclass
class Rates:
    """Speeds of a card: measured where there are results, else from its data sheet."""

    card: str
    flops: float
    memory_b_s: float
    products: list[dict[str, Any]]
    attention: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, card: str, results: Path = RESULTS) -> Rates:
        """From `CARD-*.json` of `lssar bench` and `benchmarks/scale.py`, and what `window_lab.py` printed."""
        sheet = CARDS[card]
        peak = 1e12 * next((value for name, value in PEAK_TFLOPS.items() if name.lower() == card), 0.1)
        rates = cls(card, PRODUCT_SHARE * peak, MEMORY_SHARE * 1e12 * sheet.memory_tb_s, [], [])
        for path in sorted(results.glob(f"{card}-*.json")):
            found = json.loads(path.read_text())
            if not isinstance(found, dict):
                continue
            rates.products += found.get("products", [])
            if "memory_gb_s" in found:
                rates.memory_b_s = 1e9 * found["memory_gb_s"]
            rates.attention += [row for row in found.get("rows", []) if "both_ms" in row and row.get("causal")]
        for path in results.glob(f"{card}-window-lab.txt"):
            rates.attention += map(_window_row, WINDOW_LAB.finditer(path.read_text()))
        if rates.products:
            rates.flops = 1e12 * max(row["tflops"] for row in rates.products)
        else:
            rates.notes.append(
                f"no matrix products were timed on {card}: {PRODUCT_SHARE:.0%} of {peak / 1e12:.0f} TFLOP/s"
            )
        return rates

    def product_s(self, rows: int, inner: int, outer: int) -> float:
        """Seconds of one product (rows, inner) x (inner, outer), at the rate of the measured one most like it."""
        flops = 2 * rows * inner * outer
        if not self.products:
            return flops / self.flops
        size = sorted((inner, outer))
        like = min(self.products, key=lambda row: _distance(sorted((row["inner"], row["outer"])), size))
        return flops / (1e12 * like["tflops"])

    def attention_s(
        self, mechanism: str, window: int | None, length: int, head_size: int, group: int = 1
    ) -> tuple[float, float]:
        """Seconds of the forward, and of forward and backward, for one query, key and head that it sees.

        From the measurement with the same head size and heads to a key head, if there is one, and the nearest length.
        """
        softmax = window is None and mechanism in ("softmax", "cosine_softmax", "ssmax")
        wanted = f"fused:{mechanism}"
        same = self._rows(wanted, window) or (self._rows("cudnn:softmax", None) if softmax else [])
        keys = 1.0  # computed for each that is seen
        if not same and (same := self._rows("fused:lssar", None)):
            if window is None:
                self.notes.append(f"no {wanted} was timed on {self.card}: the time of LSSAR is used")
            else:
                keys = (window + 2 * TILE) / window
                self.notes.append(
                    f"no {wanted} with window {window} was timed on {self.card}: as {window + 2 * TILE} keys of LSSAR"
                )
        if not same:
            self.notes.append(
                f"no attention was timed on {self.card}: its products at {PRODUCT_SHARE:.0%} of the data sheet"
            )
            return 4 * head_size / self.flops, 14 * head_size / self.flops

        def unlike(row: dict[str, Any]) -> tuple[bool, bool, float]:
            groups = row["heads"] // row.get("key_heads", row["heads"])
            return row["head_size"] != head_size, groups != group, abs(math.log(row["length"] / length))

        row = min(same, key=unlike)
        part = keys * head_size / row["head_size"] / _pairs(row) / 1e3
        return part * row["forward_ms"], part * row["both_ms"]

    def _rows(self, contestant: str, window: int | None) -> list[dict[str, Any]]:
        rows = [row for row in self.attention if (row["contestant"], row.get("window")) == (contestant, window)]
        return [row for row in rows if row.get("cuda_graph") or row["both_ms"] >= LAUNCHES_MS] or rows


WINDOW_LAB = re.compile(
    r"^(?P<mechanism>softmax|cosine) \((?P<shape>[\d, ]+)\) now: (norms (?P<norms>\S+) )?forward (?P<forward>\S+) .*"
    r"sum (?P<sum>\S+)$", re.M,
)  # fmt: skip
"""A line of `benchmarks/window_lab.py`: head size, batch, heads, length and window, and milliseconds."""


def _window_row(found: re.Match[str]) -> dict[str, Any]:
    size, batch, heads, length, window = map(int, found["shape"].split(","))
    mechanism = {"softmax": "softmax", "cosine": "cosine_softmax"}[found["mechanism"]]
    return {
        "contestant": f"fused:{mechanism}", "batch": batch, "heads": heads, "length": length, "head_size": size,
        "window": window, "forward_ms": float(found["forward"]) + float(found["norms"] or 0),
        "both_ms": float(found["sum"]),
    }  # fmt: skip


def _pairs(row: dict[str, Any]) -> float:
    """Queries times keys that they see, over batch and heads."""
    return row["batch"] * row["heads"] * row["length"] * mean_visible(row["length"], row.get("window"))


def _distance(a: list[int], b: list[int]) -> float:
    return sum(abs(math.log(x / y)) for x, y in zip(a, b))


def describe(p: Plan, width: int = 80) -> str:
    """The plan as text for a terminal."""
    mesh = f"{p.mesh['data']} x {p.mesh['context']} (data x context)"
    over = f", weights sharded over {p.mesh['sharded over']}" if p.mesh["sharded over"] > 1 else ""
    lines = [
        f"{p.size}, {p.layout}: {p.parameters:,} parameters",
        f"{p.steps:,} steps of {p.tokens_per_step:,} tokens, {p.tokens:,} in all",
        f"mesh {mesh} of {p.card}{over}",
        f"a step of a process: {p.micro_steps} x {p.micro_batch[0]} sequences x {p.micro_batch[1]:,} tokens",
        "",
        _table("memory of a process, GiB", p.memory, ("peak, at the " + p.moment, p.peak_gib), ".2f", width),
        _table("received in a step, GB", p.communication, ("in all", sum(p.communication.values())), ".2f", width),
    ]
    if p.step_s is not None:
        lines += [
            _table("seconds of a step", p.seconds, ("step (weights and gradients overlap)", p.step_s), ".4f", width),
            f"{p.tokens_per_s:,.0f} tokens/s, {p.steps * p.step_s / 86400:,.1f} days, {p.gpu_hours:,.0f} GPU hours, "
            f"${p.cost:,.0f} at ${p.price:g} an hour",
        ]
    lines += [f"note: {note}" for note in p.notes]
    room = CARDS[p.card].memory_gib
    if room and p.peak_gib > room:
        lines.append(f"note: this does not fit in the {room:g} GiB of a card; try --checkpoint-layers or --micro-batch")
    return "\n".join(lines)


def _table(title: str, parts: dict[str, float], last: tuple[str, float], form: str, width: int) -> str:
    rows = [[name, format(value, form)] for name, value in [*parts.items(), last] if value or name == last[0]]
    return terminal_table([title, ""], rows, width)
