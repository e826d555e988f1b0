"""Copy the files that a virtual environment needs at run time into the root folder of an image without Debian.

    python minimal_root.py /opt/deformer /root-of-image

The result holds the environment, Python and its standard library, the shared libraries that both load, certificates,
time zones, and a user. It holds no shell and no package manager. Only deploy/Dockerfile runs this script.
"""

from __future__ import annotations

import compileall
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

USER_ID = 10001

UNUSED_MODULES = (
    "config-*",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "sqlite3",
    "test",
    "tkinter",
    "turtledemo",
    "_curses*.so",
    "_dbm*.so",
    "_gdbm*.so",
    "_sqlite3*.so",
    "_test*.so",
    "_tkinter*.so",
    "readline*.so",
    "*.opt-?.pyc",
)
"""Parts of the standard library that are left out: they test, build, or show windows and prompts; databases; files for
Python's option -O. Some would bring libraries with them: those of Tk and X11 have 8 MB.
"""

UNUSED_FILES = (
    "f2py",
    "pip",
    "pip-*",
    "site-packages",
    "dist-packages",
    "include",
    "tests",
    "*.a",
    "*.pxd",
    "*.pxi",
    "*.pyi",
    "*.pyx",
    "*.h",
    "*.c",
    "*.cpp",
)
"""Files and folders of packages that are not needed at run time."""

UNUSED_LIBRARIES = (
    "*_flight*.so*",
    "libarrow_s3.so*",
    "_s3fs*.so",
    "_pyarrow_cpp_tests*.so",
    "libarrow_python*.so",  # programs load it by another of its three names, `libarrow_python.so.2600`
    "libarrow_python*.so.*.*.*",
    "_simd.*.so",  # of NumPy's own tests
)
"""Libraries of Arrow that only modules of the same names load, which this program does not import, and second copies.
They have 55 MB.
"""

USED_BY_FOLDER = {
    "pygments/lexers": ("python.py",),
    "sqlglot/dialects": ("dialect.py",),
    "sqlglot/generators": (),
    "sqlglot/parsers": ("base.py",),
}
"""Folders of packages with one module for each language, and the modules that this program uses. The others are left
out; those whose names begin with an underscore stay. They have 13 MB.

`rich` colours only Python's source code, in tracebacks. The conditions of `--where` are standard SQL.
"""

CHECK = """
import pyarrow.compute, pyarrow.csv, pyarrow.dataset, pyarrow.parquet
import deformer_stream.cli.main, numpy, rich.syntax, sqlglot, ssl, zoneinfo
rich.syntax.Syntax.guess_lexer("name.py")
sqlglot.parse("site = 'A' AND (speed > 3 OR time IS NULL)")
numpy.linalg.svd(numpy.eye(3))
zoneinfo.ZoneInfo("Europe/Berlin")
"""
"""A program that fails in the new root folder if a library or a file is missing there, or was damaged."""

DATA = ("/etc/ssl", "/usr/share/ca-certificates", "/usr/share/zoneinfo", "/etc/nsswitch.conf", "/etc/debian_version")
"""Files and folders of Debian that libraries read."""


def copy(source: Path, root: Path, unused: tuple[str, ...] = ()) -> None:
    """Copy a file or a folder to its own path below a root folder; symbolic links stay links.

    Args:
        source: An absolute path.
        root: The root folder.
        unused: Patterns of names that are left out.
    """
    target = root / source.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        ignore = shutil.ignore_patterns(*unused) if unused else None
        shutil.copytree(source, target, symlinks=True, ignore=ignore, dirs_exist_ok=True)
    elif not target.exists():
        shutil.copy2(source, target)


def remove_languages(packages: Path) -> None:
    """Remove the modules of languages that are never used (`USED_BY_FOLDER`), as source and as compiled files.

    Args:
        packages: The folder `site-packages` of the image.
    """
    for folder, used in USED_BY_FOLDER.items():
        for source in (packages / folder).glob("[!_]*.py"):
            if source.name not in used:
                source.unlink()
                for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
                    compiled.unlink()


def list_libraries(programs: Iterable[Path]) -> set[Path]:
    """Return the shared libraries of the system that programs and libraries load, with the dynamic linker.

    Args:
        programs: The programs and libraries.
    """
    libraries = set()
    for program in programs:
        # A library of the environment that is found beside another one is copied with the environment.
        listing = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout  # noqa: S603, S607
        libraries |= {Path(path) for path in re.findall(r"(?:=> )?(/\S+) \(0x", listing)}
    return libraries


def main(environment: Path, root: Path) -> None:
    """Write the root folder of the image.

    Args:
        environment: The virtual environment.
        root: The root folder, which is created.
    """
    standard_library = Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix}))
    python = Path(sys.executable).resolve()
    copy(environment, root, (*UNUSED_FILES, *UNUSED_LIBRARIES))
    # `site-packages` of the environment is left out above by its name, and needed.
    (packages,) = environment.glob("lib/python*/site-packages")
    copy(packages, root, (*UNUSED_FILES, *UNUSED_LIBRARIES))
    remove_languages(root / packages.relative_to("/"))
    copy(standard_library, root, (*UNUSED_FILES, *UNUSED_MODULES))
    # The image of Python has no compiled files of its standard library, and the file system is read-only later: without
    # this step, every process would compile 200 modules when it starts.
    compileall.compile_dir(root / standard_library.relative_to("/"), quiet=1, stripdir=str(root), prependdir="/")
    copy(python, root)
    for name in os.listdir("/"):  # /lib and others are links into /usr
        if Path("/", name).is_symlink():
            (root / name).symlink_to(os.readlink(f"/{name}"))
    # The links from the environment to Python go over further links.
    link = environment / "bin" / "python"
    while link.is_symlink():
        target = root / link.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_symlink():
            target.symlink_to(os.readlink(link))
        link = link.parent / os.readlink(link)
    binaries = [python, *(file for file in root.rglob("*.so*") if file.is_file())]
    for library in sorted(list_libraries(binaries)):
        if not library.is_relative_to(root):
            real = library.resolve()
            copy(real, root)
            name = root / library.parent.resolve().relative_to("/") / library.name
            if not name.exists():
                name.parent.mkdir(parents=True, exist_ok=True)
                name.symlink_to(os.path.relpath(root / real.relative_to("/"), name.parent))
    # Names of functions that only debuggers read, about 50 MB. A file that `strip` cannot handle stays as it is.
    for library in root.rglob("*.so*"):
        if library.is_symlink() or not library.is_file():
            continue
        subprocess.run(["strip", "--strip-unneeded", str(library)], capture_output=True, check=False)  # noqa: S603, S607
    for path in map(Path, DATA):
        if path.exists():
            copy(path, root)
    (root / "etc/passwd").write_text(f"root:x:0:0::/:\ndeformer:x:{USER_ID}:{USER_ID}::/tmp:\n")
    (root / "etc/group").write_text(f"root:x:0:\ndeformer:x:{USER_ID}:\n")
    shutil.copy2("/healthcheck.py", root / "opt/deformer/healthcheck.py")
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    check = [str(environment / "bin" / "python"), "-c", CHECK]
    subprocess.run(["chroot", f"--userspec={USER_ID}:{USER_ID}", str(root), *check], check=True)  # noqa: S603, S607


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
