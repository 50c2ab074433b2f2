"""Programs of test_sync_batch_norm.py."""

from __future__ import annotations

from typing import Any

import torch

import hvdlite_torch as hvd


def it_equals_one_rank_with_the_whole_batch() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for shape, make in (((5,), torch.nn.BatchNorm1d), ((4, 6), torch.nn.BatchNorm1d), ((4, 3, 2), torch.nn.BatchNorm2d)):
        for dtype, settings in ((torch.float64, {}), (torch.float32, {"momentum": None}),
                                (torch.float64, {"affine": False}), (torch.float64, {"track_running_stats": False})):
            torch.manual_seed(1)
            counts = [each + 2 for each in range(size)]  # uneven batches
            x = torch.randn(sum(counts), *shape, dtype=dtype) * 3 + 100
            channels = shape[0]
            plain = make(channels, **settings).to(dtype)
            converted: Any = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(make(channels, **settings)))
            synced = converted[0].to(dtype)
            assert type(synced) is hvd.SyncBatchNorm
            for module in (plain, synced):
                if module.affine:
                    with torch.no_grad():
                        module.weight.copy_(torch.linspace(1, 2, channels))
                        module.bias.copy_(torch.linspace(-1, 0, channels))
            begin = sum(counts[:rank])
            mine = x[begin:begin + counts[rank]].clone().requires_grad_()
            whole = x.clone().requires_grad_()
            factor = torch.randn_like(x)
            for _step in range(2):
                expected, got = plain(whole), synced(mine)
            (expected * factor).sum().backward()
            (got * factor[begin:begin + counts[rank]]).sum().backward()
            close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {}
            torch.testing.assert_close(got, expected[begin:begin + counts[rank]], **close)
            torch.testing.assert_close(mine.grad, whole.grad[begin:begin + counts[rank]], **close)
            if plain.affine:
                for name in ("weight", "bias"):
                    total = hvd.allreduce(getattr(synced, name).grad, op=hvd.Sum)
                    torch.testing.assert_close(total, getattr(plain, name).grad, **close)
            if plain.track_running_stats:
                torch.testing.assert_close(synced.running_mean, plain.running_mean, **close)
                torch.testing.assert_close(synced.running_var, plain.running_var, **close)
                assert synced.num_batches_tracked == 2
            plain.eval()
            synced.eval()
            torch.testing.assert_close(synced(mine), plain(mine), **close)
    half = hvd.SyncBatchNorm(3)(torch.randn(4, 3).to(torch.bfloat16))
    assert half.dtype is torch.bfloat16
    try:
        hvd.SyncBatchNorm(3)(torch.randn(3))
    except ValueError as error:
        assert "at least 2 dimensions" in str(error)
    else:
        raise SystemExit("no error")
    own = hvd.add_process_set([0])
    layer = hvd.SyncBatchNorm(3, process_set=own)
    x = torch.randn(4, 3)
    torch.testing.assert_close(layer(x), torch.nn.BatchNorm1d(3)(x))
