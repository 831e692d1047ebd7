"""Installs headrace into ``.venv`` from the lock files, layer by layer.

A layer is done when its stamp holds the key of what it was made from (lock files, interpreter, place); one
whose key changed, or that was interrupted, is done again. ``--check`` only answers (exit status 0: all done).
Standard library only: this runs before anything is installed.
"""

import fcntl
import os
import re
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMPS = VENV / "stamps"
LOCKS = ROOT / "requirements"
LLAMA_OPTIONS = LOCKS / "llama-build.cmake"
LLAMA_LOG = VENV / "llama-build.log"
PYTHON = VENV / "bin" / "python"

LOCKED_NAME = re.compile(r"(?m)^([a-z0-9][a-z0-9.-]*)==")
NINJA_STEP = re.compile(r"^\s*\[(\d+)/(\d+)\]")
PLAIN_INTERVAL_S = 10.0
LIVE_INTERVAL_S = 0.5

# What each layer is made from. Order matters: a later layer runs on top of the earlier ones.
LAYERS: dict[str, tuple[Path, ...]] = {
    "build": (LOCKS / "build.lock",),
    "packages": (LOCKS / "all.lock",),
    "llama": (LOCKS / "llama.lock", LLAMA_OPTIONS),
    "project": (ROOT / "pyproject.toml", ROOT / "src" / "headrace" / "__init__.py"),
}


class SetupError(Exception):
    """The set-up cannot go on; the text says why."""


def key(layer: str) -> str:
    """What the layer is made from. A checksum is enough: pip checks the packages' real hashes."""
    version = "{}.{}".format(*sys.version_info)
    sums = (f"{source.name}:{zlib.crc32(source.read_bytes()):08x}" for source in LAYERS[layer])
    return f"{version} {ROOT} {' '.join(sums)}\n"


def is_done(layer: str) -> bool:
    try:
        return (STAMPS / layer).read_text() == key(layer)
    except FileNotFoundError:
        return False


def mark_done(layer: str) -> None:
    partial = STAMPS / f"{layer}.partial"
    partial.write_text(key(layer))
    partial.replace(STAMPS / layer)


class Installer:
    """Runs the layers. ``lock_fd`` is handed down to the children: a pip that outlives a killed set-up keeps
    the next one waiting instead of being raced by it."""

    def __init__(self, lock_fd: int) -> None:
        self._lock_fd = lock_fd
        self._env = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_REQUIRE_VIRTUALENV": "0",
            # Build tools are looked up on PATH: the pinned ones come first.
            "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    def run(self, *command: str | Path) -> None:
        done = subprocess.run([str(part) for part in command], env=self._env, pass_fds=[self._lock_fd])
        if done.returncode:
            raise SetupError(f"`{' '.join(map(str, command))}` failed with status {done.returncode}.")

    def pip(self, *arguments: str | Path) -> None:
        self.run(PYTHON, "-m", "pip", "install", "--quiet", *arguments)

    def build(self) -> None:
        """A new environment with the pinned build tools. Started afresh each time: it takes seconds."""
        say(f"creating .venv with Python {sys.version.split()[0]}")
        for stamp in STAMPS.glob("*"):
            stamp.unlink()
        base = Path(getattr(sys, "_base_executable", sys.executable))
        self.run(base, "-m", "venv", "--clear", VENV)
        STAMPS.mkdir(exist_ok=True)
        self.pip("--require-hashes", "--only-binary=:all:", "-r", LOCKS / "build.lock")

    def packages(self) -> None:
        say("installing the packages")
        started = STAMPS / "packages.started"
        # A killed pip can leave a package that looks installed and is not whole.
        again = ["--force-reinstall"] if started.exists() else []
        started.touch()
        self.pip("--require-hashes", "--only-binary=:all:", *again, "-r", LOCKS / "all.lock")
        self.remove_unlocked()
        started.unlink()

    def remove_unlocked(self) -> None:
        """Uninstalls what the lock files no longer name, so that what is there is exactly what they pin."""
        locked = {"headrace"}
        for lock in LOCKS.glob("*.lock"):
            locked |= set(LOCKED_NAME.findall(lock.read_text()))
        command = [str(PYTHON), "-m", "pip", "list", "--format=freeze"]
        listed = subprocess.run(command, env=self._env, capture_output=True, text=True, check=True).stdout
        installed = (line.partition("==")[0] for line in listed.splitlines())
        surplus = [name for name in installed if re.sub(r"[-_.]+", "-", name).lower() not in locked]
        if surplus:
            self.run(PYTHON, "-m", "pip", "uninstall", "--quiet", "--yes", *surplus)

    def llama(self) -> None:
        """Builds the llama.cpp bindings for this machine.

        Without pip's cache: a wheel in it may have been built with other options or for another CPU.
        """
        say("building llama.cpp for this machine (1-3 minutes on most)")
        arguments = f"{os.environ.get('CMAKE_ARGS', '')} -DCMAKE_PROJECT_llama_cpp_INCLUDE={LLAMA_OPTIONS}"
        command = [PYTHON, "-m", "pip", "install", "--verbose", "--no-cache-dir", "--force-reinstall"]
        command += ["--no-deps", "--no-build-isolation", "--no-binary=:all:"]
        command += ["--require-hashes", "-r", LOCKS / "llama.lock"]
        with LLAMA_LOG.open("w") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                env={**self._env, "CMAKE_ARGS": arguments.strip()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=[self._lock_fd],
            )
            assert process.stdout is not None
            with Progress() as progress:
                for line in process.stdout:
                    log.write(line)
                    progress.saw(line)
                status = process.wait()
        if status:
            tail = LLAMA_LOG.read_text(errors="replace").splitlines()[-40:]
            print("\n".join(tail), file=sys.stderr)
            raise SetupError(f"building llama.cpp failed; the whole log is in {LLAMA_LOG}")
        check_llama()

    def project(self) -> None:
        say("installing headrace itself")
        self.pip("--no-deps", "--no-build-isolation", "--editable", ROOT)


class Progress:
    """Shows how far a build is: one live line on a terminal, a line every ten seconds elsewhere.

    A thread of its own shows it, since a compiler may say nothing for a long time.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._live = sys.stdout.isatty()
        self._doing = "downloading"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._show()
        if self._live:
            print()

    def saw(self, line: str) -> None:
        """A line of the log."""
        if step := NINJA_STEP.match(line):
            self._doing = f"compiling [{step[1]}/{step[2]}]"
        elif "Building wheel" in line:
            self._doing = "configuring"
        elif "Installing collected packages" in line:
            self._doing = "installing"
        elif "Successfully installed" in line:
            self._doing = "done"

    def _tick(self) -> None:
        while not self._ended.wait(LIVE_INTERVAL_S if self._live else PLAIN_INTERVAL_S):
            self._show()

    def _show(self) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        text = f"  llama.cpp: {minutes}:{seconds:02d}  {self._doing}"
        print(f"\r\033[K{text}" if self._live else text, end="" if self._live else "\n", flush=True)


def check_llama() -> None:
    """The build must import, and should use the vector instructions that this CPU has."""
    question = "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())"
    answer = subprocess.run([str(PYTHON), "-c", question], capture_output=True, text=True)
    if answer.returncode:
        raise SetupError(f"llama.cpp was built and does not load: {answer.stderr.strip()}")
    try:
        cpu_has_avx2 = " avx2 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return  # not Linux: nothing to compare with
    if cpu_has_avx2 and "AVX2 = 1" not in answer.stdout:
        say("warning: this CPU has AVX2 and the llama.cpp build does not use it; inference will be slow")


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def install() -> None:
    VENV.mkdir(exist_ok=True)
    # This file serves as the lock: nothing in .venv can, since creating the environment empties the folder.
    lock_fd = os.open(__file__, os.O_RDONLY)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another set-up is running here; waiting for it")
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
    installer = Installer(lock_fd)
    for layer in LAYERS:
        if is_done(layer):
            continue
        getattr(installer, layer)()
        mark_done(layer)
    say("done")


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        return 0 if all(map(is_done, LAYERS)) else 1
    try:
        install()
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up: interrupted; the next call goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
