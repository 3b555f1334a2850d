"""The wheel in an environment of its own, away from the checkout, does what the README does.

The other packages are those of the environment that runs the tests; only brayx comes from the wheel.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml

from brayx.ports import free_port
from tests.end_to_end.jobs import FREE_PORTS, ROOT, Command, said_on_failure, serve_run, setting
from tests.end_to_end.test_serve_run import play, status

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the commands of the environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    wheel = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([*pip, *wheel], check=True)
    venv.create(folder / "env")
    python = folder / "env" / "bin" / "python"
    (file,) = folder.glob("brayx-*.whl")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(file)], check=True)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    (python.parent / "serve").write_text(f"#!{python}\nfrom ray.serve.scripts import cli\ncli()\n")
    (python.parent / "serve").chmod(0o755)
    return python.parent


def test_it_has_everything_but_the_checkout(scripts: Path, tmp_path: Path) -> None:
    words = [str(scripts / "python"), "-c", "import brayx, deployments, pipelines; print(brayx.__file__)"]
    path = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert Path(path.strip()).is_relative_to(scripts.parent)
    job = str(scripts / "brayx")
    subprocess.run([job, "new", "walk"], cwd=tmp_path, check=True, capture_output=True)
    subprocess.run([job, "check", "walk/walk.yaml"], cwd=tmp_path, check=True, capture_output=True)


def test_it_runs_the_demo_and_serves_its_champion(scripts: Path, tmp_path: Path) -> None:
    options = setting(*FREE_PORTS, "actor.gamecores.0.num=2", "trainer.num_steps=1500")
    with Command([str(scripts / "brayx"), "demo", "--games", "1", *options], tmp_path) as demo, said_on_failure(demo):
        assert demo.ended() in (0, 1), "so short a training may or may not reach the target"
        assert "champion: cartpole version 1" in demo.out
        demo.gone()
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    port = config["http_options"]["port"] = free_port()
    (application,) = config["applications"]
    (package,) = (scripts.parent / "lib").glob("python*/site-packages/pipelines")
    application["args"] |= {
        "config": str(package / "templates" / "cartpole.yaml"),
        "tracking": str(tmp_path / "mlflow.db"),
    }
    (tmp_path / "serve_config.yaml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{port}"
    words = [str(scripts / "serve"), "run", "serve_config.yaml"]
    with serve_run(words, tmp_path, lambda: status(url).get("mode") == "serve"):
        assert set(play(url)) <= {0, 1}
