"""Packages of a Debian release, unpacked into a folder of this checkout; nothing is installed on the machine.

So the same release of a driver or compiler is there on every Debian machine, beside whatever the machine has itself.
The package mirror is the one that the machine's apt is set up with.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".nox" / "debian"  # `make clean` removes it
_KEYRINGS = ("debian-archive-keyring.gpg", "debian-archive-keyring.pgp")
_LIBRARY_FOLDERS = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib/llvm-14/lib")
# A program of this machine that loads libraries of another release keeps its own C and C++ runtime.
_RUNTIME = ("libc6", "libgcc-s1", "libstdc++6")


def unpack(release: str, packages: Iterable[str], with_runtime: bool) -> Path:
    """The folder with the packages of a release and all that they depend on, made at the first call.

    Parameters
    ----------
    release : str
        Debian's name for it, such as "bookworm" or "sid".
    packages : iterable of str
    with_runtime : bool
        Whether to unpack the release's own C and C++ runtime too, for programs newer than this machine. Without it,
        programs and libraries run on this machine's, which must not be older.
    """
    packages = sorted(packages)
    folder = FOLDER / release
    root, stamp = folder / "root", folder / "packages.txt"
    if stamp.exists() and stamp.read_text().split() == packages:
        return root
    _require_debian()
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("lists/partial", "archives/partial", "root"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()  # as if nothing were installed, so that every dependency is unpacked
    keyring = next((path for name in _KEYRINGS if (path := Path("/usr/share/keyrings", name)).exists()), None)
    if keyring is None:
        _fail("Debian's package keys are missing: apt-get install debian-archive-keyring")
    sources = folder / "debian.sources"
    sources.write_text(
        f"Types: deb\nURIs: {_mirror(folder)}\nSuites: {release}\nComponents: main\n"
        f"Architectures: amd64\nSigned-By: {keyring}\n"
    )
    options = [
        *_private_state(folder),
        f"Dir::Etc::SourceList={sources}",
        "Dir::Etc::SourceParts=/dev/null",
        "APT::Install-Recommends=false",
    ]
    print(f"Unpacking {', '.join(packages)} of Debian {release} into {root} ...", flush=True)
    _apt(options, "update")
    _apt(options, "install", "--yes", "--download-only", *packages)
    versions = []
    for archive in sorted((folder / "archives").glob("*.deb")):
        name, version, _ = archive.name.split("_")
        if with_runtime or name not in _RUNTIME:
            subprocess.run(["dpkg-deb", "--extract", archive, root], check=True)
            versions.append(f"{name} {unquote(version)}\n")
    (folder / "versions.txt").write_text("".join(versions))
    for name in ("lists", "archives"):
        shutil.rmtree(folder / name)
    stamp.write_text("\n".join(packages) + "\n")
    return root


def version(root: Path, package: str) -> str:
    """The version of a package that was unpacked."""
    return dict(line.split() for line in (root.parent / "versions.txt").read_text().splitlines())[package]


def library_path(root: Path) -> str:
    """The value of LD_LIBRARY_PATH with which the unpacked libraries are found."""
    return ":".join(str(root / folder) for folder in _LIBRARY_FOLDERS)


def command(root: Path, program: Path) -> list[str]:
    """How to start an unpacked program: by its own release's dynamic linker where that was unpacked too."""
    linkers = [path for path in root.glob("**/ld-linux-x86-64.so.2") if not path.is_symlink()]
    if linkers:
        return [str(linkers[0]), "--library-path", library_path(root), str(program)]
    return ["env", f"LD_LIBRARY_PATH={library_path(root)}", str(program)]


def _require_debian() -> None:
    missing = [program for program in ("apt-get", "dpkg-deb") if shutil.which(program) is None]
    if missing or platform.machine() != "x86_64":
        _fail(
            "this needs packages of Debian for x86-64: run it on a Debian machine or in a container of one "
            f"(here: {platform.machine()}, {' and '.join(missing) or 'apt'} {'missing' if missing else 'there'})"
        )


def _mirror(folder: Path) -> str:
    """Address of the Debian mirror that this machine's apt uses."""
    query = ["indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian", "Label: Debian"]
    found = _output(["apt-get", *query])
    if not found:  # apt has not looked at its sources yet
        options = _private_state(folder)
        _apt(options, "update", check=False)
        found = _output(["apt-get", *(part for option in options for part in ("-o", option)), *query])
    if not found:
        _fail(
            "apt on this machine has no Debian mirror among its sources, so Debian's packages cannot be had. "
            "Run it on a Debian machine or in a container of one"
        )
    return found.splitlines()[0]


def _private_state(folder: Path) -> list[str]:
    """apt's options for lists and archives in a folder of its own, which need no rights on the machine."""
    return [
        f"Dir::State={folder}",
        f"Dir::State::Lists={folder / 'lists'}",
        f"Dir::State::Status={folder / 'status'}",
        f"Dir::Cache={folder}",
        f"Dir::Cache::Archives={folder / 'archives'}",
        "Acquire::Languages=none",
        "APT::Sandbox::User=",
    ]


def _apt(options: list[str], *arguments: str, check: bool = True) -> None:
    line = ["apt-get", "--quiet=2", *(part for option in options for part in ("-o", option)), *arguments]
    done = subprocess.run(line, capture_output=True, text=True)
    if check and done.returncode != 0:
        _fail(f"`{' '.join(line)}` failed:\n{done.stdout}{done.stderr}")


def _output(line: list[str]) -> str:
    return subprocess.run(line, capture_output=True, text=True).stdout.strip()


def _fail(message: str) -> NoReturn:
    sys.exit(f"{Path(sys.argv[0]).name}: {message}")
