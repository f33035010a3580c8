"""Wire buffers: exact round trips, fixed byte order, refusals before allocation."""

import struct

import pytest
import torch

from shoal.kernels import wire_tensors
from shoal.kernels.wire_tensors import (
    DTYPES,
    INT8,
    INT8_GROUP,
    choose_decoded_dtype,
    decode_as,
    decode_int8,
    decode_tensor,
    encode_as,
    encode_int8,
    encode_tensor,
    has_only_finite,
    list_finite,
)
from shoal.protocol import tensors
from shoal.protocol.tensors import ELEMENT_BYTES, WireDtype, compute_num_bytes


def test_dtypes_are_those_of_the_wire_protocol() -> None:
    sizes = {name: dtype.itemsize for name, dtype in DTYPES.items()}

    floats = [dtype for dtype in WireDtype if dtype is not WireDtype.INT8]
    assert sizes == {dtype.name: ELEMENT_BYTES[dtype] for dtype in floats}
    assert (WireDtype.INT8.name, tensors.INT8_GROUP) == (INT8, INT8_GROUP)


@pytest.mark.parametrize("dtype", list(WireDtype))
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 64), (2, 3, 65), (1, 5, 200)])
def test_bytes_of_every_wire_dtype_have_the_length_that_the_protocol_counts(
    shape: tuple[int, int, int], dtype: WireDtype
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(9))

    buffer = encode_as(dtype.name, tensor)
    result = decode_as(dtype.name, buffer, shape)

    assert len(buffer) == compute_num_bytes(dtype, *shape)
    assert result.dtype is choose_decoded_dtype(dtype.name)
    assert torch.allclose(result.float(), tensor, atol=0.02)


def test_int8_rounds_each_group_by_its_own_scale() -> None:
    tensor = torch.randn(2, 7, 200, generator=torch.Generator().manual_seed(3))
    tensor[..., 17] *= 1000  # as a few hidden states are
    tensor[0, 0, 64:128] = 0.0

    result = decode_int8(encode_int8(tensor), tensor.shape)

    for start in (0, 64, 128, 192):
        group = tensor[..., start : start + 64]
        error = (result - tensor)[..., start : start + 64].abs()
        # Half a step, and what rounding the scale to 8 bits adds to the largest integer.
        assert (error <= (0.5 + 0.26) * group.abs().amax(-1, keepdim=True) / 127).all()
    assert (result[0, 0, 64:128] == 0).all()


def test_int8_rounds_up_as_often_as_the_generator_says() -> None:
    tensor = torch.linspace(-0.99, 0.99, 64).reshape(1, 1, 64)
    tensor[0, 0, 0] = 127.0  # so that the step is 1
    generator = torch.Generator().manual_seed(6)
    num_draws = 400

    draws = [decode_int8(encode_int8(tensor, generator), (1, 1, 64)) for _ in range(num_draws)]

    errors = torch.stack(draws) - tensor
    assert float(errors.abs().max()) <= 1.0
    # The standard deviation of a draw is at most half a step; 4.5 of them happen once in 2,000.
    assert float(errors.mean(0).abs().max()) < 4.5 * 0.5 / num_draws**0.5
    same = [encode_int8(tensor, torch.Generator().manual_seed(7)) for _ in range(2)]
    assert same[0] == same[1]


def test_int8_that_was_decoded_becomes_the_same_bytes_again() -> None:
    generator = torch.Generator().manual_seed(4)
    tensor = torch.randn(3, 50, 96, generator=generator) * torch.logspace(-20, 20, 96)

    buffer = encode_int8(tensor)

    assert encode_int8(decode_int8(buffer, (3, 50, 96))) == buffer


def test_int8_of_a_token_does_not_depend_on_those_beside_it() -> None:
    tensor = torch.randn(1, 9, 96, generator=torch.Generator().manual_seed(5))

    together = decode_int8(encode_int8(tensor), (1, 9, 96))
    alone = decode_int8(encode_int8(tensor[:, 4:5]), (1, 1, 96))

    assert torch.equal(together[:, 4:5], alone)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_int8_hides_no_value_that_is_not_finite(value: float) -> None:
    tensor = torch.ones(1, 2, 80)
    tensor[0, 1, 70] = value

    assert not has_only_finite(decode_int8(encode_int8(tensor), (1, 2, 80)))


@pytest.mark.parametrize("shape", [(1, 1, 5), (2, 1, 2), (-1, 1, -5), (1, 2**40, 1)])
def test_int8_refuses_a_length_that_contradicts_the_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"bytes|negative"):
        decode_int8(bytes(6), shape)


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 5), (0, 4)])
def test_tensor_survives_the_wire(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(dtype)

    buffer = encode_tensor(tensor)
    result = decode_tensor(buffer, dtype, shape)

    assert len(buffer) == tensor.numel() * dtype.itemsize
    assert result.dtype is dtype
    assert result.shape == shape
    assert torch.equal(result, tensor)


def test_encoding_keeps_every_bit() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)  # NaNs too

    for dtype in (torch.float16, torch.bfloat16):
        result = decode_tensor(encode_tensor(bits.view(dtype)), dtype, (2**16,))
        assert torch.equal(result.view(torch.int16), bits)


def test_encoding_is_little_endian_in_c_order() -> None:
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t()

    assert encode_tensor(tensor) == struct.pack("<4f", 1.0, 3.0, 2.0, 4.0)
    assert encode_tensor(torch.tensor([1.0], dtype=torch.bfloat16)) == b"\x80\x3f"


def test_encoding_accepts_a_tensor_with_gradient() -> None:
    tensor = torch.ones(2, requires_grad=True)

    assert encode_tensor(tensor) == struct.pack("<2f", 1.0, 1.0)


def test_decoded_tensor_owns_its_memory() -> None:
    buffer = bytearray(b"__" + struct.pack("<2f", 1.0, 2.0))  # not aligned either

    tensor = decode_tensor(memoryview(buffer)[2:], torch.float32, (2,))
    buffer[:] = bytes(len(buffer))
    tensor += 1

    assert tensor.tolist() == [2.0, 3.0]
    assert not any(buffer)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (0,), (2**40, 2**40), (-1, -2), (-2,)])
def test_decoding_refuses_a_length_that_contradicts_the_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"bytes|negative"):
        decode_tensor(bytes(8), torch.float32, shape)


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="does not travel"):
        encode_tensor(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="does not travel"):
        decode_tensor(bytes(8), torch.float64, (1,))


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 500, 1000])
def test_non_finite_values_are_found(place: int, value: float, dtype: torch.dtype) -> None:
    tensor = torch.zeros(7, 143, dtype=dtype)
    assert has_only_finite(tensor)

    tensor.view(-1)[place] = value

    assert not has_only_finite(tensor)


def test_large_finite_values_pass() -> None:
    # A sum of these overflows; they are finite all the same.
    assert has_only_finite(torch.full((64,), torch.finfo(torch.float16).max, dtype=torch.float16))
    assert has_only_finite(torch.zeros(0))


@pytest.mark.parametrize("few_elements", [0, 2**20])
def test_tensors_that_are_not_finite_are_found_among_others(
    few_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_tensors, "FEW_ELEMENTS", few_elements)
    tensors = [torch.zeros(3, 2), torch.tensor([[1.0, torch.nan]]), torch.zeros(0, 2)]

    assert list_finite(tensors) == [True, False, True]
    assert list_finite(tensors[::2]) == [True, True]
    assert list_finite([]) == []
