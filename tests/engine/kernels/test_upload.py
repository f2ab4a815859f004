from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kernels.upload import upload


def test_arrays_arrive_with_their_shapes_and_dtypes(device: torch.device) -> None:
    arrays = [
        np.arange(5),
        np.zeros((0, 3), np.int64),
        np.array([[1.5, -2.0]], np.float32),
        np.arange(6, dtype=np.int32).reshape(3, 1, 2),
        np.arange(12).reshape(3, 4)[:, 1:3],
    ]
    for array, tensor in zip(arrays, upload(arrays, device), strict=True):
        assert tensor.device.type == device.type
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.shape == array.shape
        assert tensor.tolist() == array.tolist()


@pytest.mark.cuda
def test_uploads_that_follow_each_other_do_not_overwrite_what_is_on_its_way() -> None:
    cuda = torch.device("cuda")
    torch.cuda._sleep(50_000_000)
    sent = [upload([np.full(1000, i)], cuda)[0] for i in range(20)]
    assert [int(tensor.float().mean()) for tensor in sent] == list(range(20))
