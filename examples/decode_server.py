#!/usr/bin/env python3
"""A server of a tiny language model with random weights: requests of different lengths come and go,
all of them decode in one batch, and their keys lie in pages of one cache."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tabulate import tabulate

from flash_attention.flash_attn import flash_attn_with_kvcache

LAYERS, HEADS, KV_HEADS, D_HEAD, VOCABULARY = 2, 4, 2, 64, 50
WIDTH = HEADS * D_HEAD
ROTARY_BASE = 10000.0
CLOSE = 0.02  # logits that differ by less may change places: they are about 1, and keys are fp16
NONE = -1  # length of a row of the batch without a request: nothing is read or written for it

# Attention of a layer on new queries, keys and values, each (batch, new, heads, d_head).
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Model:
    """Two layers of attention and a perceptron, in fp32 but for attention, which is fp16."""

    def __init__(self, device: str, most_tokens: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weights(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator).to(device) / rows**0.5

        self.embedding = weights(VOCABULARY, WIDTH) * VOCABULARY**0.5
        self.heads_in = [weights(WIDTH, (HEADS + 2 * KV_HEADS) * D_HEAD) for _ in range(LAYERS)]
        self.heads_out = [weights(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.up = [weights(WIDTH, 2 * WIDTH) for _ in range(LAYERS)]
        self.down = [weights(2 * WIDTH, WIDTH) for _ in range(LAYERS)]
        self.to_logits = weights(WIDTH, VOCABULARY)
        pairs = torch.arange(D_HEAD // 2, device=device) / (D_HEAD // 2)
        angles = torch.arange(most_tokens, device=device)[:, None] * ROTARY_BASE**-pairs
        self.cos, self.sin = angles.cos(), angles.sin()

    def logits(self, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return the logits behind each of the tokens, (batch, new)."""
        x = self.embedding[tokens]
        for layer in range(LAYERS):
            of_heads = (normed(x) @ self.heads_in[layer]).half()
            q, k, v = of_heads.unflatten(-1, (-1, D_HEAD)).split([HEADS, KV_HEADS, KV_HEADS], 2)
            o = attend(layer, q, k, v)
            x = x + o.flatten(2).float() @ self.heads_out[layer]
            x = x + torch.relu(normed(x) @ self.up[layer]) @ self.down[layer]
        return normed(x) @ self.to_logits


def normed(x: torch.Tensor) -> torch.Tensor:
    """Return rows of mean square 1."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


# -- server ----------------------------------------------------------------------------------------


@dataclass
class Request:
    """A prompt, and as many tokens as it asks for. `arrival`: step at which it comes."""

    arrival: int
    prompt: list[int]
    new: int
    answer: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.answer

    def pages_in_all(self, page_size: int) -> int:
        """Return the pages that it will have at its end; its last token needs no key."""
        return -(-(len(self.prompt) + self.new - 1) // page_size)


class Server:
    """The cache, its free pages, and a batch of `rows` requests at most."""

    def __init__(
        self, model: Model, rows: int, pages: int, page_size: int, most_tokens: int, device: str
    ) -> None:
        self.model, self.page_size = model, page_size
        self.free = list(range(pages))  # taken from its end, so that pages lie in any order
        self.promised = 0  # pages that requests in the batch will still take
        self.running: list[Request | None] = [None] * rows
        shape = LAYERS, pages, page_size, KV_HEADS, D_HEAD
        self.k_cache, self.v_cache = torch.zeros(2, *shape, dtype=torch.half, device=device)
        blocks = -(-most_tokens // page_size)
        # the inputs of a step, in the same memory for all steps
        self.table = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self.lengths = torch.full((rows,), NONE, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.graph = self.captured() if device == "cuda" else None

    def next_tokens(
        self, tokens: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """Append the keys of the tokens, (batch, new), to the cache; return the most probable token
        behind the last, (batch, 1). lengths: keys of each request before them."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            found = flash_attn_with_kvcache(
                *(q, self.k_cache[layer], self.v_cache[layer], k, v),
                rotary_cos=self.model.cos,
                rotary_sin=self.model.sin,
                cache_seqlens=lengths,
                block_table=table,
                causal=True,
            )
            assert isinstance(found, torch.Tensor)  # without an LSE
            return found

        return self.model.logits(tokens, attend)[:, -1:].argmax(-1)

    def step_on_device(self) -> None:
        """Replace the tokens of the batch by those that follow. Waits for nothing."""
        self.tokens.copy_(self.next_tokens(self.tokens, self.lengths, self.table))
        self.lengths.add_(self.lengths != NONE)

    def captured(self) -> torch.cuda.CUDAGraph:
        """Return the step as a CUDA graph. The batch is empty while it is captured."""
        self.step_on_device()  # compiles kernels, which a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step_on_device()
        return graph

    def admit(self, request: Request) -> bool:
        """Take a request into the batch, and process its prompt; return whether there was a row,
        and pages for it up to its end."""
        pages = request.pages_in_all(self.page_size)
        if None not in self.running or pages > len(self.free) - self.promised:
            return False
        row = self.running.index(None)
        self.running[row] = request
        self.promised += pages
        length = len(request.prompt)
        self.give_pages(row, length)
        prompt = torch.tensor([request.prompt], device=self.tokens.device)
        begin = torch.zeros_like(self.lengths[:1])
        # a copy, since a tensor begins at a multiple of 16 bytes and a row of the table may not
        self.tokens[row] = self.next_tokens(prompt, begin, self.table[row : row + 1].clone())[0]
        self.lengths[row] = length
        request.answer.append(int(self.tokens[row]))
        self.end_if_done(row)
        return True

    def give_pages(self, row: int, length: int) -> None:
        """Give a request pages for `length` keys."""
        request = self.running[row]
        assert request is not None
        while len(request.pages) * self.page_size < length:
            page = self.free.pop()
            self.promised -= 1
            self.table[row, len(request.pages)] = page
            request.pages.append(page)

    def step(self) -> int:
        """Compute one token for each request in the batch; return how many these are."""
        active = [row for row, request in enumerate(self.running) if request is not None]
        for row in active:
            request = self.running[row]
            assert request is not None
            self.give_pages(row, len(request.tokens))
        if self.graph is None:
            self.step_on_device()
        else:
            self.graph.replay()
        found = self.tokens.flatten().tolist()  # the one wait of a step: answers leave the device
        for row in active:
            request = self.running[row]
            assert request is not None
            request.answer.append(found[row])
            self.end_if_done(row)
        return len(active)

    def end_if_done(self, row: int) -> None:
        """Take a request that has its answer out of the batch, and its pages back."""
        request = self.running[row]
        if request is not None and len(request.answer) == request.new:
            self.free += request.pages
            self.running[row] = None
            self.lengths[row] = NONE

    def serve(self, requests: list[Request]) -> list[int]:
        """Answer requests, which come at their steps; return the requests in the batch at each
        step."""
        waiting = deque(sorted(requests, key=lambda request: request.arrival))
        batches: list[int] = []
        while waiting or any(self.running):
            while waiting and waiting[0].arrival <= len(batches) and self.admit(waiting[0]):
                waiting.popleft()
            batches.append(self.step() if any(self.running) else 0)
        return batches


# -- check -----------------------------------------------------------------------------------------


def plain_logits(model: Model, tokens: list[int]) -> torch.Tensor:
    """Return the logits behind each token of one request, by PyTorch's operations alone: no cache,
    no batch, attention in float64."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        angles = torch.complex(model.cos, model.sin)[: x.shape[1], None].to(torch.complex128)
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * angles).flatten(-2)

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (turned(q), turned(k), v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / D_HEAD**0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        P = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", P, v.double())

    return model.logits(torch.tensor([tokens], device=model.cos.device), attend)[0]


def wrong_tokens(model: Model, request: Request) -> int:
    """Return how many tokens of an answer are not the most probable ones behind those before."""
    logits = plain_logits(model, request.tokens[:-1])[len(request.prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(request.answer, device=logits.device)[:, None])[:, 0]
    return int((logits.amax(1) - chosen > CLOSE).sum())


def drawn_requests(count: int, longest: int, seed: int) -> list[Request]:
    """Return requests with prompts and answers of up to `longest` tokens each."""
    draws = random.Random(seed)
    return [
        Request(
            arrival=draws.randint(0, 2 * longest),
            prompt=draws.choices(range(VOCABULARY), k=draws.randint(1, longest)),
            new=draws.randint(1, longest),
        )
        for _ in range(count)
    ]


def main(argv: list[str] | None = None) -> int:
    """Serve requests, and check each token; return 0 if all are right, 1 if some are not."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="examples:\n  python examples/decode_server.py\n"
        "  python examples/decode_server.py --device cuda --requests 200 --longest 500 --rows 32 "
        "--pages 1000 --page-size 16",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--longest", type=int, default=9, help="tokens of a prompt or an answer")
    parser.add_argument("--rows", type=int, default=3, help="requests in the batch at once")
    parser.add_argument("--pages", type=int, default=12, help="pages of the cache")
    parser.add_argument("--page-size", type=int, default=4, help="keys of a page")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    sizes = ("requests", "longest", "rows", "pages", "page_size")
    for name in sizes:
        if getattr(options, name) < 1:
            parser.error(f"{name} {getattr(options, name)} is less than 1: pass 1 or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU: pass --device cpu, where kernels are simulated")
    most_tokens = -(-2 * options.longest // options.page_size) * options.page_size
    if options.pages * options.page_size < most_tokens:
        parser.error(
            f"{options.pages} pages of {options.page_size} keys do not hold a request of "
            f"{most_tokens}: pass --pages {most_tokens // options.page_size}"
        )
    with torch.inference_mode():
        model = Model(options.device, most_tokens, options.seed)
        server = Server(
            *(model, options.rows, options.pages, options.page_size, most_tokens, options.device)
        )
        requests = drawn_requests(options.requests, options.longest, options.seed)
        begin = time.perf_counter()
        batches = server.serve(requests)
        seconds = time.perf_counter() - begin
        wrong = [wrong_tokens(model, request) for request in requests]
    answered = sum(len(request.answer) for request in requests)
    table = [
        (request.arrival, len(request.prompt), len(request.answer), len(request.pages), errors)
        for request, errors in zip(requests, wrong, strict=True)
    ]
    print(tabulate(table, ["arrival, step", "prompt", "answer", "pages", "wrong tokens"]))
    print(
        f"{answered} tokens in {len(batches)} steps of up to {max(batches)} requests, "
        f"{answered / seconds:.0f} tokens/s; {sum(wrong)} wrong; {len(server.free)} of "
        f"{options.pages} pages free"
    )
    return 1 if any(wrong) or len(server.free) != options.pages else 0


if __name__ == "__main__":
    sys.exit(main())
