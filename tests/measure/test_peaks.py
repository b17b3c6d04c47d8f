"""Peaks by device name and dtype: listed with a source, or None."""

import pytest

from headrace.measure.peaks import PEAKS, find_peak, peak_flops


@pytest.mark.parametrize(
    ("device_name", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "torch.float16", 312),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200", "bfloat16", 989.4),  # Lightning #20660: it was missing
        ("NVIDIA H200 NVL", "bfloat16", 835.5),
        ("NVIDIA GH200 480GB", "bfloat16", 989.4),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "float8", 5000),
        ("Tesla V100-SXM2-32GB", "float16", 125),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        ("Ascend910A", "float16", 256),
    ],
)
def test_known_devices(device_name, dtype, tera):
    assert peak_flops(device_name, dtype) == tera * 1e12


@pytest.mark.parametrize(
    ("device_name", "dtype"),
    [
        ("Ascend910B3", "bfloat16"),  # no published figure per chip: 256 would be another product's
        ("Ascend910_9382", "bfloat16"),
        ("NVIDIA A10G", "bfloat16"),  # not the A10
        ("NVIDIA GeForce RTX 4090", "bfloat16"),
        ("Tesla V100-SXM2-32GB", "bfloat16"),  # listed device, but it has no such units
        ("NVIDIA A100-SXM4-80GB", "float8"),
        ("", "bfloat16"),
    ],
)
def test_what_is_not_listed_is_none_never_another_devices_peak(device_name, dtype):
    assert peak_flops(device_name, dtype) is None


def test_every_entry_has_a_source_and_is_found_by_its_own_needles():
    for peak in PEAKS:
        assert peak.source.startswith("https://"), peak
        assert all(value > 0 for value in peak.teraflops.values())
        assert find_peak(" nvidia ".join(["", *peak.needles])) is not None


def test_eight_bit_is_the_double_of_sixteen_and_half_of_that_is_tf32():
    for peak in PEAKS:
        half = peak.teraflops.get("bfloat16")
        if half and "float8" in peak.teraflops:
            assert peak.teraflops["float8"] == pytest.approx(2 * half, rel=0.03)
