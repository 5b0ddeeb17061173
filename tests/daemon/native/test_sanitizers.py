"""The core under the compiler's sanitizers, driven on a kernel library in plain C."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from needs import lacking

HERE = Path(__file__).parent
CORE = HERE.parents[2] / "daemon" / "native"
FLAGS = ["-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{CORE}"]
LIBRARIES = ["-lm", "-ldl", "-lpthread"]
DRIVERS = {
    "driver": ("driver.c", "sampling_tests.c", "system.c"),
    "store_driver": ("store_driver.c", "running.c", "expert_program.c", "system.c"),
}
WRAPPED = (  # in system.c
    *("aligned_alloc", "calloc", "memfd_create", "mmap", "mprotect", "pread", "strdup"),
    *("pthread_cond_wait", "pthread_create"),
)


def compiler(sanitizers: str, folder: Path) -> str:
    """A C compiler with these sanitizers; skips the test where there is none."""
    path = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if path is None:
        lacking("there is no C compiler")
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    works = subprocess.run(
        [path, f"-fsanitize={sanitizers}", str(probe), "-o", str(folder / "probe")],
        capture_output=True,
        check=False,
    )
    if works.returncode != 0 or subprocess.run([folder / "probe"], check=False).returncode != 0:
        lacking(f"{path} has no working -fsanitize={sanitizers}")
    return path


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
@pytest.mark.parametrize("name", DRIVERS)
def test_driver(tmp_path: Path, name: str, sanitizers: str) -> None:
    cc = compiler(sanitizers, tmp_path)
    flags = [*FLAGS, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    kernels, driver = tmp_path / "kernels.so", tmp_path / "driver"
    subprocess.run(
        [cc, *flags, "-shared", "-fPIC", str(HERE / "kernels.c"), "-o", str(kernels)], check=True
    )
    own = [str(HERE / source) for source in DRIVERS[name]]
    sources = [*own, *(str(path) for path in sorted(CORE.glob("*.c")))]
    wraps = [f"-Wl,--wrap={function}" for function in WRAPPED]
    subprocess.run(
        [cc, *flags, "-rdynamic", *wraps, *sources, "-o", str(driver), *LIBRARIES], check=True
    )
    bank = [tmp_path / "experts.bin"] if name == "store_driver" else []
    result = subprocess.run(
        [driver, kernels, *bank], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
