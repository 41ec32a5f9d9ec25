from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hvd_autosync.runtime.exchange import lossless
from hvd_autosync.runtime.exchange.lossless import (
    HEADER_BYTES,
    decode,
    encode,
    header_of,
    split_codes,
)
from hvd_autosync.runtime.measure.repeated_bits import AS_IS, Bits, Form, bits_of

FORMS = [
    Form(zeros, words, planes)
    for zeros in (False, True)
    for words in ("whole", "bfloat16", "float16")
    for planes in (False, True)
]
#: +0, -0, the least and the largest denormals, one, the largest, infinities; NaN: quiet, with a
#: payload in the upper, in the lower half, signalling, of either sign.
SPECIAL = (
    *(0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00010000, 0x3F800000, 0x7F7FFFFF),
    *(0x7F800000, 0xFF800000, 0x7FC00000, 0x7FC10000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF),
    *(0x7F810000, 0x7FA00000, 0x33800000, 0x38800000, 0x33000000, 0x47800000, 0xFFC02000),
)


def tensor_of(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.float32))


def numbers(size: int, seed: int = 1) -> torch.Tensor:
    """Numbers like a gradient's: exponents are few, mantissas are not."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1e-3


def assert_comes_back(tensor: torch.Tensor, form: Form | None = None) -> torch.Tensor:
    before = tensor.clone()
    code = encode(tensor, form)
    assert np.array_equal(bits_of(decode(code)), bits_of(before))
    assert np.array_equal(bits_of(tensor), bits_of(before)), "the tensor was changed"
    assert header_of(code).code_bytes == len(code) and len(code) % 8 == 0
    return code


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("copies", [1, 1000])
def test_special_numbers_come_back_in_every_form(form: Form, copies: int) -> None:
    bits = np.tile(np.array(SPECIAL, np.uint32), copies)
    assert_comes_back(tensor_of(bits), form)


@given(
    arrays.arrays(np.uint32, st.integers(0, 70), elements=st.integers(0, 2**32 - 1)),
    st.sampled_from([None, *FORMS]),
)
@example(np.array([0x7F800001], np.uint32), Form(words="bfloat16"))
@example(np.array([0x7F802001], np.uint32), Form(words="float16"))
@settings(max_examples=400, deadline=None)
def test_all_bits_come_back_in_every_form(bits: Bits, form: Form | None) -> None:
    assert_comes_back(tensor_of(bits), form)


@given(
    st.integers(1, 3000),
    st.sampled_from([0xFFFFFFFF, 0xFFFF0000, 0xFFFFE000]),
    st.floats(0, 1),
    st.floats(0, 0.2),
    st.sampled_from([None, *FORMS]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=300, deadline=None)
def test_patterns_come_back_whether_they_pay_or_not(
    size: int, mask: int, zeros: float, odd: float, form: Form | None, seed: int
) -> None:
    """Bits of few exponents under a mask, with zeros and with elements that do not fit."""
    draw = np.random.default_rng(seed)
    bits = (draw.standard_normal(size).astype(np.float32) / 64).view(np.uint32) & np.uint32(mask)
    bits[draw.random(size) < zeros] = 0
    others = draw.random(size) < odd
    bits[others] = draw.integers(0, 2**32, int(others.sum()), np.uint32)
    code = assert_comes_back(tensor_of(bits), form)
    if form is None:
        assert len(code) <= HEADER_BYTES + 4 * size + 8


def test_what_does_not_repeat_goes_as_it_is() -> None:
    random = np.random.default_rng(1).integers(0, 2**32, 100_000, np.uint32)
    code = assert_comes_back(tensor_of(random))
    assert header_of(code).form == AS_IS
    assert len(code) == HEADER_BYTES + 400_000


def test_exponents_repeat() -> None:
    code = assert_comes_back(numbers(100_000))
    assert header_of(code).form == Form(planes=True)
    assert 0.8 < len(code) / 400_000 < 0.87


def test_bfloat16_takes_half_and_its_exponents_less() -> None:
    tensor = numbers(100_000).to(torch.bfloat16).float()
    assert len(assert_comes_back(tensor, Form(words="bfloat16"))) == HEADER_BYTES + 200_000
    code = assert_comes_back(tensor)
    assert header_of(code).form == Form(words="bfloat16", planes=True)
    assert 0.3 < len(code) / 400_000 < 0.37


def test_float16_takes_half_and_its_exponents_less() -> None:
    tensor = numbers(100_000).to(torch.float16).float()
    assert header_of(assert_comes_back(tensor, Form(words="float16"))).exceptions == 0
    code = assert_comes_back(tensor)
    assert header_of(code).form == Form(words="float16", planes=True)
    assert 0.35 < len(code) / 400_000 < 0.46


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_elements_that_do_not_fit_are_exceptions(dtype: torch.dtype) -> None:
    tensor = numbers(100_000).to(dtype).float()
    clean = len(encode(tensor))
    tensor[500:1000] = numbers(500, seed=2)  # together, as a parameter of a bucket
    tensor[2000::1000] = float("nan")
    tensor[99_999] = torch.pi
    code = assert_comes_back(tensor)
    assert 501 <= header_of(code).exceptions <= 501 + 99
    assert len(code) < clean + 500 * 8 + 100 * 12


def test_zeros_are_left_out_and_negative_ones_are_not() -> None:
    tensor = numbers(100_000)
    tensor[torch.rand(100_000, generator=torch.Generator().manual_seed(3)) < 0.5] = 0.0
    tensor[7] = -0.0
    code = assert_comes_back(tensor)
    header = header_of(code)
    assert header.form.zeros and header.values == int((bits_of(tensor) != 0).sum())
    assert len(code) < 0.5 * 400_000
    halves = assert_comes_back(tensor.to(torch.bfloat16).float())
    assert header_of(halves).form == Form(zeros=True, words="bfloat16", planes=True)
    assert len(halves) < 0.22 * 400_000


def test_nothing_but_zeros_takes_next_to_nothing() -> None:
    assert len(assert_comes_back(torch.zeros(100_000))) < 200
    assert len(assert_comes_back(torch.zeros(0))) == HEADER_BYTES


def test_a_sample_that_misses_what_does_not_fit_makes_no_code_longer() -> None:
    """The places of the sample are known; everything else is random."""
    tensor = numbers(1_000_000).to(torch.bfloat16).float()
    places = np.ones(1_000_000, np.bool_)
    for begin in np.linspace(0, 1_000_000 - 512, 32).astype(int):
        places[begin : begin + 512] = False
    bits = bits_of(tensor)
    bits[places] = np.random.default_rng(1).integers(0, 2**32, int(places.sum()), np.uint32)
    code = assert_comes_back(tensor)
    assert header_of(code).form == AS_IS and len(code) == HEADER_BYTES + 4_000_000


def test_codes_are_told_apart() -> None:
    tensors = [numbers(1000), torch.zeros(3), torch.zeros(0), numbers(7).to(torch.bfloat16).float()]
    codes = split_codes(torch.cat([encode(t, mark=n) for n, t in enumerate(tensors)]))
    assert [header_of(code).mark for code in codes] == [0, 1, 2, 3]
    for code, tensor in zip(codes, tensors, strict=True):
        assert torch.equal(decode(code), tensor)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_slice_of_a_tensor(count: int) -> None:
    assert_comes_back(numbers(10)[5 : 5 + count])


def test_blocks_of_a_large_tensor_stand_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[torch.Tensor] = []

    def take(part: torch.Tensor) -> float:
        timed.append(part)
        return float(len(part))

    monkeypatch.setattr(lossless, "_timed", take)
    large = torch.arange(1_000_000.0)
    assert lossless.seconds_to_code(large.view(1000, 1000)) == len(large)
    assert {len(part) for part in timed} == {2**18}
    assert timed[0][0] == large[0] and timed[0][-1] == large[-1]
    small = torch.arange(1000.0)
    assert lossless.seconds_to_code(small) == len(small)
    assert torch.equal(timed[-1], small)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coding_takes_time(dtype: torch.dtype) -> None:
    assert lossless.seconds_to_code(torch.randn(100_000).to(dtype)) > 0
