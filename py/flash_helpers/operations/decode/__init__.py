"""Decode: attention of few queries on a long cache of keys; bound by the bytes of the cache."""

from __future__ import annotations

from flash_helpers.operations import attention_forward
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.operations.decode.problems import COPY, DISTRIBUTIONS, MEASURED_LENGTHS, measured
from flash_helpers.registry.operation import GBPS, Operation

# The copy is first, since it alone runs on every cache: PyTorch's backends take no pages.
LIBRARIES = {
    COPY: "a copy that moves the same bytes, the measured ceiling",
    **attention_forward.LIBRARIES,
    "flashinfer": "FlashInfer",
}

OPERATION = Operation(
    name="decode",
    title="decode",
    problem=Decode,
    small=Decode(2, 4, kv_heads=1, len_k=256),
    small_variant=Decode(3, 4, kv_heads=2, len_k=256, total_k=300, page_size=16),
    usual=Decode(16, 32, kv_heads=8, len_k=8192),
    debugged=Decode(1, 2, kv_heads=1, len_k=128),
    counted=Decode(1, 2, kv_heads=1, len_k=256),
    counted_within=Decode(4, 8, kv_heads=2, len_k=256),
    swept="len_k",
    measured=measured,
    measured_at=MEASURED_LENGTHS,
    distributions=DISTRIBUTIONS,
    libraries=LIBRARIES,
    ceiling=COPY,
    short_names={**attention_forward.SHORT_NAMES, COPY: "copy", "flashinfer": "FlashInfer"},
    metric=GBPS,
    families=("decode_sync:DECODE_SYNC", "decode:DECODE_FAMILY"),
    simulated_ns=4.0e6 / (4 * 64 * 64 * 128),
)
