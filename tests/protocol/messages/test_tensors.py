"""What a tensor on the wire may be."""

import pytest

from shoal.protocol import limits
from shoal.protocol.errors import RemoteProtocolError
from shoal.protocol.messages.codec import read_tensor
from shoal.protocol.tensors import (
    ELEMENT_BYTES,
    WireDtype,
    WireTensor,
    check_tensor,
    compute_num_bytes,
)

RAW = 1  # the only layout of elements


@pytest.mark.parametrize("dtype", list(WireDtype))
def test_tensor_is_read_as_it_is_without_a_copy(dtype: WireDtype) -> None:
    data = bytes(range(compute_num_bytes(dtype, 2, 3, 4)))

    tensor = read_tensor(dtype, RAW, (2, 3, 4), memoryview(data))

    assert tensor.shape == (2, 3, 4)
    assert tensor.dtype == dtype
    assert isinstance(tensor.data, memoryview)
    assert tensor.data.obj is data


@pytest.mark.parametrize(
    ("dtype", "width", "num_bytes"),
    [
        (WireDtype.FP32, 4, 96),
        (WireDtype.FP16, 4, 48),
        (WireDtype.BF16, 4, 48),
        (WireDtype.INT8, 4, 36),
        (WireDtype.INT8, 64, 6 * 66),
        (WireDtype.INT8, 65, 6 * 69),
    ],
)
def test_tensor_has_the_bytes_of_its_elements_and_scales(
    dtype: WireDtype, width: int, num_bytes: int
) -> None:
    assert set(ELEMENT_BYTES) == set(WireDtype)
    assert compute_num_bytes(dtype, 2, 3, width) == num_bytes
    check_tensor(WireTensor(dtype, 2, 3, width, bytes(num_bytes)))


@pytest.mark.parametrize("code", [0, 5, 255, -1])
def test_unknown_dtype_and_codec_are_the_senders_fault(code: int) -> None:
    with pytest.raises(RemoteProtocolError):
        read_tensor(code, RAW, (1, 1, 1), memoryview(bytes(4)))
    with pytest.raises(RemoteProtocolError):
        read_tensor(WireDtype.FP32, code, (1, 1, 1), memoryview(bytes(4)))


BOUNDS = (limits.MAX_BATCH_ROWS, limits.MAX_STEP_TOKENS, limits.MAX_HIDDEN_SIZE)


@pytest.mark.parametrize("axis", range(3))
def test_each_axis_has_bounds(axis: int) -> None:
    def read(size: int) -> WireTensor:
        shape = [1, 1, 1]
        shape[axis] = size
        data = memoryview(bytes(2 * max(size, 0)))
        return read_tensor(WireDtype.BF16, RAW, (shape[0], shape[1], shape[2]), data)

    assert read(BOUNDS[axis]).shape[axis] == BOUNDS[axis]
    for size in (0, -1, BOUNDS[axis] + 1):
        with pytest.raises(RemoteProtocolError, match="outside"):
            read(size)


@pytest.mark.parametrize("num_bytes", [0, 1, 22, 23, 25, 26, 48])
def test_length_has_to_fit_the_shape(num_bytes: int) -> None:
    with pytest.raises(RemoteProtocolError, match="24 bytes"):
        read_tensor(WireDtype.FP16, RAW, (1, 3, 4), memoryview(bytes(num_bytes)))


def test_length_is_counted_in_bytes_whatever_the_views_items() -> None:
    wide = memoryview(bytes(16)).cast("i")

    check_tensor(WireTensor(WireDtype.FP32, 1, 1, 4, wide))
    with pytest.raises(ValueError, match="4 bytes, not 16"):
        check_tensor(WireTensor(WireDtype.FP32, 1, 1, 1, wide))
