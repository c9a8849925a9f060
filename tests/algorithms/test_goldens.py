"""Every recorded number of a peer that asyncrl covers, value and gradient, through the options a user would name.

One file `golden_<topic>.py` a topic beside this one says how: `replay(case)` compares every output of a case with ours,
or raises LeftOut with the reason. A case is either equal or left out by name: nothing else passes.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.algorithms.goldens import LeftOut, load_goldens

TOPICS = sorted(path.stem.removeprefix("golden_") for path in Path(__file__).parent.glob("golden_*.py"))
MIN_COVERED_SHARE = 0.85
"""Of each topic; of all of them together it is 98%."""
PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


@pytest.mark.parametrize("topic", TOPICS)
def test_recorded_numbers_of_peers_are_ours_under_their_convention(topic, capsys):
    replay = importlib.import_module(f"tests.algorithms.golden_{topic}").replay
    covered, left_out, failures = Counter[str](), Counter[tuple[str, str]](), []
    for case in load_goldens(topic):
        try:
            replay(case)
        except LeftOut as reason:
            left_out[case.peer, str(reason)] += 1
        except Exception as error:
            failures.append(f"{case.id}: {type(error).__name__}: {error}")
        else:
            covered[case.peer] += 1
    total = len(load_goldens(topic))
    with capsys.disabled():
        print(f"\n{topic}: {covered.total()} of {total} covered: {dict(sorted(covered.items()))}")
        for (peer, reason), number in sorted(left_out.items()):
            print(f"  left out: {number} of {peer}: {reason}")
    assert not failures, f"{len(failures)} of {total} cases of {topic} differ:\n" + "\n".join(failures[:20])
    assert covered.total() >= MIN_COVERED_SHARE * total
    assert f"| `{topic}` | {covered.total()} of {total} |" in PAGE  # and what is left out, with the reason
    for (peer, reason), number in left_out.items():
        assert f"| `{topic}` | {number} of {peer} | {reason} |" in PAGE


def test_the_pages_sums_by_peer_are_those_of_the_recorded_calls():
    # Mutation: a peer's calls added without its row, or counted twice.
    rows = re.findall(r"^\| `(\w+)` \| (\d+) of (\d+) \| ([\w, ]+) \|$", PAGE, re.MULTILINE)
    calls = Counter(case.peer for topic in TOPICS for case in load_goldens(topic))
    assert {peer: int(total) for peer, _, total, _ in rows} == calls
    covered = sum(int(number) for _, number, _, _ in rows)
    assert f"{covered} of {calls.total()} are equal" in PAGE
    for peer, _, _, topics in rows:
        assert topics.split(", ") == [t for t in TOPICS if any(c.peer == peer for c in load_goldens(t))]
