"""`lssar doctor`."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from typing import Any

from lssar.commands.common import print_json, say

EXTRAS = {
    "plots": ("matplotlib",),
    "data": ("tiktoken", "tokenizers", "pyarrow", "datasets"),
    "hf": ("transformers", "accelerate"),
    "eval": ("lm_eval",),
    "newton": ("pyoperon", "sympy"),
}
"""Optional dependencies of pyproject.toml, and the modules that show whether they are installed."""


@dataclass
class Doctor:
    """Versions, devices, and which kernels and extras of this installation work."""

    json: bool = False
    """Print the findings as JSON."""

    def run(self) -> None:
        found = examine()
        if self.json:
            print_json(found)
            return
        for title, items in found.items():
            say(f"{title}:")
            for name, value in items.items():
                say(f"  {name:<16} {value}")


def examine() -> dict[str, dict[str, Any]]:
    """What is installed and what works, as plain values."""
    from lssar.records import environment

    about = environment()
    versions = {key: about[key] or "not installed" for key in ("lssar", "python", "torch", "triton")}
    versions |= {"commit": about["commit"] or "not a checkout", "system": about["system"]}
    devices = {"CPU": f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads"}
    devices["CUDA"] = (
        f"{about['gpu']}, {about['gpu_memory_gib']} GiB, CUDA {about['cuda']}" if "gpu" in about else "no device"
    )
    return {
        "versions": versions,
        "devices": devices,
        "kernels": {"native": native_state(), "fused": fused_state()},
        "extras": {name: extra_state(name, modules) for name, modules in EXTRAS.items()},
        "settings": {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "not set")},
    }


def native_state() -> str:
    """Whether the C kernels of `impl="tiled"` were built and run here."""
    from lssar.ops import native

    if (name := native.isa()) is None:
        return "not available: `tiled` runs on PyTorch operations, which is slower"
    return f"active, {name}"


def fused_state() -> str:
    """Whether the Triton kernels can run here."""
    import torch

    if importlib.util.find_spec("triton") is None:
        return "not available: triton is not installed"
    if not torch.cuda.is_available():
        return "not active: there is no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return f"active, compute capability {major}.{minor}" + (", with kernels for Hopper" if major == 9 else "")


def extra_state(name: str, modules: tuple[str, ...]) -> str:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        return f"without {', '.join(missing)}: pip install 'lssar[{name}]'"
    return "installed: " + ", ".join(f"{module} {_version(module)}" for module in modules)


def _version(module: str) -> str:
    try:
        return version(metadata(module)["Name"])
    except PackageNotFoundError:
        return "of unknown version"
