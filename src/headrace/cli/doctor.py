"""`headrace doctor`: can this machine do it, and what to change?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headrace.cli.document import check_writable, write_document
from headrace.measure.environment import capture_environment
from headrace.shm import segment
from headrace.shm.checkup import Finding, check_all
from headrace.shm.placement import device_node

RECORD_VERSION = 1
MARKS = {"good": "[green]good[/]", "note": "[yellow]note[/]", "bad": "[red]bad[/]"}


def doctor(
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Check kernel, limits, memory, cores, versions and devices; say what to change. Exit 1 if no feed can run."""
    check_writable(json)
    findings = [*check_all(), *check_versions(), *check_devices()]
    print_findings(Console(), findings)
    write_document(
        json,
        {
            "version": RECORD_VERSION,
            "kind": "doctor",
            "verdict": verdict(findings),
            "findings": [asdict(finding) for finding in findings],
            "environment": asdict(capture_environment()),
        },
    )
    if verdict(findings) == "bad":
        raise typer.Exit(1)


def verdict(findings: list[Finding]) -> str:
    """The worst status."""
    statuses = {finding.status for finding in findings}
    return next(status for status in ("bad", "note", "good") if status in statuses)


def check_versions() -> Iterator[Finding]:
    """What is installed; nothing is imported."""
    here = capture_environment()
    yield Finding(name="kernel", status="good", found=f"Linux {here.kernel} on {here.machine}, {here.cpu_model}")
    yield Finding(name="python", status="good", found=f"{here.python}, numpy {here.numpy}, headrace {here.headrace}")
    if here.torch is None:
        change = "pip install 'headrace[torch]', unless you feed another framework"
        yield Finding(name="torch", status="note", found="not installed", change=change)
    else:
        yield Finding(name="torch", status="good", found=here.torch)


def check_devices() -> Iterator[Finding]:
    """Accelerators that torch sees, their NUMA nodes, and whether the ring's memory can be pinned for them."""
    try:
        import torch
    except ImportError:
        return
    accelerator: Any = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        yield Finding(name="devices", status="good", found="none: batches stay in host memory")
        return
    kind = accelerator.type
    backend: Any = getattr(torch, kind)
    for index in range(torch.accelerator.device_count()):
        properties = backend.get_device_properties(index)
        node = device_node(_pci_address(properties))
        where = "" if node is None else f", NUMA node {node}"
        yield Finding(name="devices", status="good", found=f"{kind}:{index} {getattr(properties, 'name', '')}{where}")
    yield _check_pinning(kind)


def _pci_address(properties: Any) -> str:
    """As sysfs spells it; "" when the backend does not tell."""
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(number is None for number in numbers):
        return ""
    domain, bus, device = (int(number or 0) for number in numbers)
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _check_pinning(kind: str) -> Finding:
    import os

    from headrace.torch.pinning import pin

    fd = segment.create("headrace-checkup", 1 << 20, knob="nothing")
    try:
        mapping = segment.attach(fd, writable=True, knob="nothing", populate=True)
    finally:
        os.close(fd)
    pinning = pin(mapping.address, mapping.nbytes, kind)
    pinning.undo()
    mapping.close()
    if pinning.is_pinned:
        return Finding(name="pinning", status="good", found=f"the ring's memory can be pinned for {kind}")
    change = "copies to the device will be slower; see the driver's limit in the note"
    return Finding(name="pinning", status="note", found=pinning.note, change=change)


def print_findings(console: Console, findings: list[Finding]) -> None:
    """One line per finding, and what to change under it."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings:
        table.add_row(MARKS[finding.status], finding.name, finding.found)
        if finding.change:
            table.add_row("", "", f"[dim]-> {finding.change}[/]")
    console.print(table)
    console.print(
        {
            "good": "Everything a feed needs is here.",
            "note": "A feed runs here; the notes say what would make it better.",
            "bad": "No feed can run here until what is marked bad has changed.",
        }[verdict(findings)]
    )
