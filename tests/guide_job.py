"""The jobs that docs/guide-godot.md and docs/guide-unity.md make of demonstrations."""

from __future__ import annotations

from pathlib import Path

from yaml import safe_dump, safe_load

from tests.end_to_end.jobs import ROOT, TEMPLATES
from tests.unit.test_docs import snippets_of


def guide_job(folder: Path, engine: str, *left_out: str) -> str:
    """Writes the job: a copy of the engine's template with what its guide replaces or adds; returns the file's name.

    Args:
        folder: gets the file.
        engine: ``godot`` or ``unity``.
        left_out: components that the guide leaves out.
    """
    (part,) = (snippet for snippet in snippets_of(ROOT / "docs" / f"guide-{engine}.md") if snippet.language == "yaml")
    job = safe_load((TEMPLATES / f"{engine}.yaml").read_text()) | safe_load(part.text)
    (folder / "clone.yaml").write_text(safe_dump({name: part for name, part in job.items() if name not in left_out}))
    return "clone.yaml"
