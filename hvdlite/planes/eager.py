"""The eager lane: tensors that travelled inside their reports are reduced on rank 0 (PROTOCOL rule 12)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES
from hvdlite.negotiation.messages import Response
from hvdlite.planes.arithmetic import Casts, Reduction


def reduce_payloads(response: Response, payloads: Sequence[bytes], size: int) -> bytes:
    """Return the result of an allreduce of tensors given as bytes, by contributing rank in ascending order.

    Args:
        size: ranks of the process set; Average divides by it.
    """
    dtype = SUPPORTED_DTYPES[response.dtype]
    sources = [np.frombuffer(payload, dtype) for payload in payloads]
    reduction = Reduction(response, dtype, size, max(1, sources[0].size), Casts.of_numpy())
    result = np.empty_like(sources[0])
    reduction.combine([reduction.placed(source) for source in sources], result)
    return result.tobytes()
