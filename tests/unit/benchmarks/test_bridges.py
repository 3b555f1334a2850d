"""The course of a run, as `benchmarks.bridges` measures it."""

import json
from pathlib import Path

from benchmarks.bridges import Course


def test_a_course_has_its_first_step_every_256_and_the_end(tmp_path: Path) -> None:
    course = Course(tmp_path / "course", 2)
    for number in range(150):
        course.add([1.0, 0.5], [number % 10 == 9, False])
    course.write()
    lines = [json.loads(line) for line in (tmp_path / "course").read_text().splitlines()]
    assert [steps for _, steps, _, _ in lines] == [2, 258, 300]
    assert [(episodes, mean) for *_, episodes, mean in lines] == [(0, None), (12, 10.0), (15, 10.0)]
    times = [time_s for time_s, *_ in lines]
    assert times == sorted(times)
