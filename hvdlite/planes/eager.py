"""The eager lane: rank 0 reduces tensors whose data was part of their reports (docs/protocol.md#eager-lane)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array
from hvdlite.core.types import ReduceOp
from hvdlite.negotiation.messages import Response
from hvdlite.planes.adasum import AdasumReduction
from hvdlite.planes.arithmetic import Casts, Reduction


def reduce_payloads(response: Response, payloads: Sequence[bytes], size: int) -> bytes:
    """Return the result of an allreduce of tensors given as bytes, one per contributor in ascending rank order.

    Args:
        size: number of ranks of the process set; Average divides by it.
    """
    dtype = SUPPORTED_DTYPES[response.dtype]
    sources = [np.frombuffer(payload, dtype) for payload in payloads]
    return reduced(response, sources, size, Casts.of_numpy()).tobytes()


def reduced(response: Response, sources: Sequence[Array], size: int, casts: Casts) -> Array:
    """Return the reduction of the contributors' flat arrays, in ascending rank order, as a new array.

    Args:
        size: number of ranks of the process set; Average divides by it.
    """
    dtype, chunk = SUPPORTED_DTYPES[response.dtype], max(1, sources[0].size)
    reduction: AdasumReduction | Reduction
    if response.op is ReduceOp.ADASUM:
        reduction = AdasumReduction(response, dtype, chunk, casts, (sources[0].size,))
        reduction.set_weights(reduction.products(sources))
    else:
        reduction = Reduction(response, dtype, size, chunk, casts)
    result = np.empty_like(sources[0])
    reduction.combine([reduction.prescaled(source) for source in sources], result)
    return result
