"""What a device can do at best: operations per second by name and dtype, dense, from the vendors' data sheets.

Vendors print the double for matrices with half their entries zero (sparsity); the dense figure is used. A device or a
dtype that is not listed is None: a guessed peak makes a utilisation of 5 or of 0.05 out of the same run. Huawei
publishes a figure per chip for the first Ascend 910 only; for 910B and later pass the peak of your product.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TERA = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """One product. `needles` are all in the lower-case device name, none of `unless` is."""

    name: str
    needles: tuple[str, ...]
    unless: tuple[str, ...] = ()
    teraflops: dict[str, float] = field(hash=False)
    """dtype: 10^12 operations per second. Dtypes as torch names them; "tf32" is float32 run on tensor cores."""
    source: str


A100_SHEET = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf"
H100_SHEET = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
H200_SHEET = "https://www.nvidia.com/en-us/data-center/h200/"
BLACKWELL_SHEET = "https://resources.nvidia.com/en-us-blackwell-architecture/datasheet"
V100_SHEET = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
HOPPER_SXM = {"bfloat16": 989.4, "float16": 989.4, "tf32": 494.7, "float32": 66.9, "float8": 1978.9}

# The first match counts, so the special comes before the general.
PEAKS = (
    Peak(name="GB200", needles=("gb200",), source=BLACKWELL_SHEET,
         teraflops={"bfloat16": 2500, "float16": 2500, "tf32": 1250, "float8": 5000}),
    Peak(name="B200", needles=("b200",), source=BLACKWELL_SHEET,
         teraflops={"bfloat16": 2250, "float16": 2250, "tf32": 1100, "float8": 4500}),
    Peak(name="H200 NVL", needles=("h200", "nvl"), source=H200_SHEET,
         teraflops={"bfloat16": 835.5, "float16": 835.5, "tf32": 417.5, "float8": 1670.5}),
    Peak(name="GH200", needles=("gh200",), teraflops=HOPPER_SXM,
         source="https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip"),
    Peak(name="H200", needles=("h200",), teraflops=HOPPER_SXM, source=H200_SHEET),
    Peak(name="H100 NVL", needles=("h100", "nvl"), source=H100_SHEET,
         teraflops={"bfloat16": 835.5, "float16": 835.5, "tf32": 417.5, "float8": 1670.5}),
    Peak(name="H100 PCIe", needles=("h100", "pcie"), source=H100_SHEET,
         teraflops={"bfloat16": 756.5, "float16": 756.5, "tf32": 378, "float32": 51.2, "float8": 1513}),
    Peak(name="H100 SXM", needles=("h100",), teraflops=HOPPER_SXM, source=H100_SHEET),
    Peak(name="A100", needles=("a100",), source=A100_SHEET,
         teraflops={"bfloat16": 312, "float16": 312, "tf32": 156, "float32": 19.5}),
    Peak(name="L40S", needles=("l40s",), source="https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413",
         teraflops={"bfloat16": 362, "float16": 362, "tf32": 183, "float32": 91.6, "float8": 733}),
    Peak(name="A10", needles=("nvidia a10",), unless=("a10g", "a100"),
         source="https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf",
         teraflops={"bfloat16": 125, "float16": 125, "tf32": 62.5, "float32": 31.2}),
    Peak(name="V100 SXM2", needles=("v100-sxm2",), teraflops={"float16": 125, "float32": 15.7}, source=V100_SHEET),
    Peak(name="V100 PCIe", needles=("v100-pcie",), teraflops={"float16": 112, "float32": 14}, source=V100_SHEET),
    Peak(name="T4", needles=("tesla t4",), teraflops={"float16": 65, "float32": 8.1},
         source="https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"),
    Peak(name="MI300X", needles=("mi300x",), source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
         teraflops={"bfloat16": 1307.4, "float16": 1307.4, "tf32": 653.7, "float32": 163.4, "float8": 2614.9}),
    Peak(name="MI325X", needles=("mi325x",), source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi325x.html",
         teraflops={"bfloat16": 1307.4, "float16": 1307.4, "tf32": 653.7, "float32": 163.4, "float8": 2614.9}),
    Peak(name="MI250X (one of its two dies)", needles=("mi250x",), teraflops={"bfloat16": 191.5, "float16": 191.5},
         source="https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html"),
    Peak(name="Ascend 910", needles=("ascend910",), unless=("ascend910b", "ascend910_", "ascend910c"),
         teraflops={"float16": 256}, source="https://old.hotchips.org/hc31/HC31_1.11_Huawei.Davinci.HengLiao_v4.0.pdf"),
)  # fmt: skip


def find_peak(device_name: str) -> Peak | None:
    """The product a device's own name (`torch.cuda.get_device_name()`) stands for, or None."""
    name = device_name.lower()
    for peak in PEAKS:
        if all(needle in name for needle in peak.needles) and not any(other in name for other in peak.unless):
            return peak
    return None


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense operations per second of one device for a dtype ("bfloat16", "torch.bfloat16"); None when not listed."""
    peak = find_peak(device_name)
    if peak is None:
        return None
    teraflops = peak.teraflops.get(dtype.removeprefix("torch."))
    return None if teraflops is None else teraflops * TERA
