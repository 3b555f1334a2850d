"""Builds the three images, tries them together, and prints sizes and times: `make images`.

A champion that is trained in `train` is served from `serve` and played from `client`, each with a read-only root and as
user 1000. Docker builds and runs them if its daemon is there. Otherwise, as root, Debian's buildah builds them and
namespaces run them; if no registry answers, mmdebstrap makes their base. In the environment:

BASE          image to build on, instead of docker/Dockerfile's
TORCH_INDEX   as docker/Dockerfile has it
BUILD_OPTIONS further options of `docker build` or `buildah build`

buildah's own variables hold, too: STORAGE_DRIVER=vfs where overlay cannot be mounted.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS = ("client", "train", "serve")
DEFAULT_BASE = "python:3.11-slim"
DEBIAN = "localhost/debian-python"
NUM_STEPS = 20_000
URL = "http://127.0.0.1:8000/"
READY_S, TRAIN_S, PLAY_S = 300.0, 1800.0, 300.0
ENTER = r"""
root=$0 data=$1; shift
mount --make-rprivate / && mount --rbind "$root" "$root" && mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc" && mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp" && mount --bind "$data" "$root/data"
exec chroot --userspec=1000:1000 "$root" /usr/bin/env --chdir=/data "$@"
"""
"""Runs a command in an image's files with a read-only root; the network is this machine's."""


def run(*words: str) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def works(*words: str) -> bool:
    return shutil.which(words[0]) is not None and subprocess.run(words, capture_output=True).returncode == 0


class Docker:
    """Builds and runs by Docker's daemon."""

    build = ("docker", "build")

    def base(self) -> str:
        return os.environ.get("BASE", "")

    def size(self, image: str) -> int:
        return int(run("docker", "image", "inspect", "--format", "{{.Size}}", image))

    @contextmanager
    def command(self, image: str, data: Path, words: list[str]) -> Iterator[list[str]]:
        options = ["--rm", "--init", "--read-only", "--tmpfs", "/tmp", "--shm-size", "1g", "--network", "host"]
        yield ["docker", "run", *options, "--volume", f"{data}:/data", image, *words]


class Buildah:
    """Builds by buildah, and runs in namespaces, for which no daemon is needed."""

    build = ("buildah", "build", "--layers", "--format", "docker")

    def __init__(self) -> None:
        os.environ.setdefault("BUILDAH_ISOLATION", "chroot")

    def base(self) -> str:
        if "BASE" in os.environ or works("buildah", "pull", f"docker.io/library/{DEFAULT_BASE}"):
            return os.environ.get("BASE", "")
        if not works("buildah", "inspect", "--type", "image", DEBIAN):
            with tempfile.TemporaryDirectory() as folder:
                mirror = ["--variant=minbase", "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"]
                packages = "--include=usr-is-merged,python3,python3-venv,ca-certificates,wget"
                without = [f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale")]
                run("mmdebstrap", *mirror, packages, *without, "bookworm", f"{folder}/base.tar")
                (Path(folder) / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
                run("buildah", "build", "--tag", DEBIAN, folder)
        return DEBIAN

    def size(self, image: str) -> int:
        container = run("buildah", "from", image)
        try:
            return int(run("du", "--summarize", "--bytes", run("buildah", "mount", container)).split()[0])
        finally:
            run("buildah", "rm", container)

    @contextmanager
    def command(self, image: str, data: Path, words: list[str]) -> Iterator[list[str]]:
        container = run("buildah", "from", image)
        try:
            settings = json.loads(run("buildah", "inspect", container))["OCIv1"]["config"]
            inside = ["--ignore-environment", *settings["Env"], *(words or settings["Cmd"])]
            namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", ENTER]
            yield [*namespaces, run("buildah", "mount", container), str(data), *inside]
        finally:
            run("buildah", "rm", container)


def is_served() -> bool:
    """Whether the champion is."""
    try:
        with urllib.request.urlopen(URL, timeout=2.0) as reply:
            return bool(json.loads(reply.read()).get("registered"))
    except (OSError, ValueError):
        return False


def try_out(images: Docker | Buildah, data: Path) -> None:
    """Trains, serves and plays; prints how long serving took to start."""
    train = ["brayx", "train", "cartpole.yaml", "--set", f"trainer.num_steps={NUM_STEPS}"]
    with images.command("brayx-train", data, train) as words:
        subprocess.run(words, check=True, timeout=TRAIN_S)
    with images.command("brayx-serve", data, []) as words:
        started = time.monotonic()
        server = subprocess.Popen(words, start_new_session=True)
        try:
            while not is_served():
                if server.poll() is not None or time.monotonic() > started + READY_S:
                    sys.exit("brayx-serve did not start")
                time.sleep(0.1)
            print(f"brayx-serve answered after {time.monotonic() - started:.1f} s", flush=True)
            play = ["brayx", "gamecore", "gym", "CartPole-v1", "--url", URL.replace("http", "ws"), "--games", "3"]
            with images.command("brayx-client", data, play) as played:
                subprocess.run(played, check=True, timeout=PLAY_S)
        finally:
            os.killpg(server.pid, signal.SIGINT)  # `unshare` itself ignores it
            server.wait(60.0)


def build(images: Docker | Buildah) -> None:
    """Builds the images; prints their sizes."""
    options = shlex.split(os.environ.get("BUILD_OPTIONS", ""))
    if base := images.base():
        options += ["--build-arg", f"BASE={base}"]
    if (index := os.environ.get("TORCH_INDEX")) is not None:
        options += ["--build-arg", f"TORCH_INDEX={index}"]
    for target in TARGETS:
        words = [*images.build, *options, "--target", target, "--tag", f"brayx-{target}", "--file", "docker/Dockerfile"]
        subprocess.run([*words, "."], check=True, cwd=ROOT)
    for target in TARGETS:
        print(f"brayx-{target}: {images.size(f'brayx-{target}') / 1e6:,.0f} MB", flush=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it; so would the server
    if works("docker", "info"):
        images: Docker | Buildah = Docker()
    elif shutil.which("buildah") is not None and os.geteuid() == 0:
        images = Buildah()
    else:
        sys.exit("make images: needs Docker's daemon, or Debian's buildah and mmdebstrap and root")
    build(images)
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 1000, 1000)
        try_out(images, Path(folder))


if __name__ == "__main__":
    main()
