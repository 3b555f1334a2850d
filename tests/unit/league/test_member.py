"""`brayx.league.member`."""

from __future__ import annotations

import pytest

from brayx.errors import LeagueError
from brayx.league.member import Member


@pytest.mark.parametrize(("member", "label"), [(Member("main"), "main"), (Member("main", 7), "main:7")])
def test_a_label_names_its_member(member: Member, label: str) -> None:
    assert member.label == label
    assert Member.parse(label) == member


@pytest.mark.parametrize("label", ["", ":7", "main:", "main:0", "main:-1", "main:1.5", "main:7:8", "main:²"])
def test_what_is_no_label_is_refused(label: str) -> None:
    with pytest.raises(LeagueError) as refused:
        Member.parse(label)
    assert refused.value.details == {"member": label}
