"""Every notebook runs from top to bottom in a new kernel, as for a new user, and leaves nothing running."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import psutil
import pytest

from brayx.shutdown import marked
from tests.end_to_end.jobs import without_ray

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
MARK = "BRAYX_TEST_NOTEBOOK"
CELL_S = 420
"""For the slowest cell, which trains, on a machine that does other things too."""
GONE_S = 60.0
LONG = ("league", "serving", "trials")

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(path, id=path.stem, marks=[pytest.mark.cluster] if path.stem in LONG else [])
        for path in sorted(NOTEBOOKS.glob("*.ipynb"))
    ],
)
def notebook(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A notebook that has been run; its metadata has processes ``left``, files ``written`` and imports of ``ray``."""
    folder = tmp_path_factory.mktemp("notebook")
    mark = secrets.token_hex(8)
    read = _read(request.param)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(MARK, mark)
        environment.setenv("BRAYX_QUICK", "1")
        environment.setenv("IPYTHONDIR", str(folder / "ipython"))
        environment.setenv("JUPYTER_RUNTIME_DIR", str(folder / "jupyter"))
        for name, value in without_ray(folder).items():
            environment.setenv(name, value)
        workplace = folder / "workplace"
        workplace.mkdir()
        client = nbclient.NotebookClient(read, timeout=CELL_S, resources={"metadata": {"path": str(workplace)}})
        try:
            client.execute()
        finally:
            read.metadata["left"] = _left(mark)
    read.metadata["name"] = request.param.stem
    read.metadata["written"] = sorted(path.name for path in workplace.iterdir())
    imported = folder / "imported.txt"
    read.metadata["ray"] = imported.read_text() if imported.exists() else ""
    return read


def test_it_is_committed_with_the_outputs_of_one_run() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = [cell for cell in _read(path).cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), path.name
        outputs = [output for cell in cells for output in cell.outputs]
        assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
        assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
        assert not re.findall(r"/tmp/|/home/|/root/|/work/", path.read_text()), "nothing of the machine that ran it"


def test_it_uses_the_python_front_only() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        source = "\n".join(cell.source for cell in _read(path).cells if cell.cell_type == "code")
        assert not re.findall(r"(?:from|import) (?:brayx\.|pipelines|deployments|ray)", source)


SAYS = {
    "quickstart": ["the game was over after", "champion: cartpole version 1"],
    "trainer": ["nearest is 'learning_rate'", "the game was over after"],
    "league": ["'exploiter': 'exploiter'", "beats the one below", "against expert"],
    "recordings": ["actions are equal", "the console is http://127.0.0.1:"],
    "serving": ["one tick in a hundred", "doors: http, tcp, ws"],
    "trials": ["the champion is version", "inputs: ['obs'] outputs: ['logits', 'value']"],
    "your_game": ["champion: walk version 1", "the walker arrived after"],
}
TRAININGS = {"trials": 3}
"""Trainings of a notebook, if not one."""


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == SAYS.keys()


def test_it_draws_and_finishes_a_game(notebook: Any) -> None:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert [line for line in SAYS[notebook.metadata.name] if line not in _text(outputs)] == []


def test_its_progress_is_one_picture_drawn_over(notebook: Any) -> None:
    panels = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if re.search("return.*env steps", output.get("data", {}).get("text/html", ""), re.S)
    ]
    assert len(panels) == TRAININGS.get(notebook.metadata.name, 1)


def test_it_says_nothing_on_standard_error(notebook: Any) -> None:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []


def test_it_imports_no_ray(notebook: Any) -> None:
    assert notebook.metadata.ray == ""


def test_it_leaves_nothing(notebook: Any) -> None:
    assert notebook.metadata.left == []
    assert notebook.metadata.written == []


def _read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def _text(outputs: list[Any]) -> str:
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def _left(mark: str) -> list[str]:
    """Command lines of the processes started under ``mark`` that do not end; ended here then."""
    deadline = time.monotonic() + GONE_S
    while (processes := marked(MARK, mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline())[:160])
            process.kill()
    return lines
