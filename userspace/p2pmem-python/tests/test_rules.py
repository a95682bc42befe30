# SPDX-License-Identifier: MIT OR Apache-2.0
"""The administrator's rules, in a folder that stands for configfs."""

from __future__ import annotations

import errno
from pathlib import Path

import p2pmem
import pytest
from p2pmem.rules import Rule, Rules, RuleState, Usage

ATTRIBUTES = {
    "provider": "0000:03:00.0",
    "client": "any",
    "uid": "1000,100000-165535",
    "gid": "5001",
    "action": "deny",
    "max_class": "SW",
    "quota": "1048576",
    "group_quota": "none",
    "reserve": "none",
    "reserve_for": "none",
    "enable": "1",
    "status": "in force",
    "usage": "uid 1000 4096\ngroup 8192\nprovider 2 12288",
}
RULE = Rule(
    "10-lab",
    provider="0000:03:00.0",
    uid="1000,100000-165535",
    gid=5001,
    action="deny",
    max_class=p2pmem.PathClass.SAME_SWITCH,
    quota=1 << 20,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "p2pmem" / "rules" / "10-lab"
    folder.mkdir(parents=True)
    for name, text in ATTRIBUTES.items():
        (folder / name).write_text(text + "\n")
    return tmp_path


def test_rules_are_read(root: Path) -> None:
    usage = (Usage("user", 4096, uid=1000), Usage("group", 8192), Usage("reserve", 12288, provider=2))
    assert Rules(root).list() == [RuleState(RULE, "in force", usage)]
    (root / "p2pmem/rules/10-lab/uid").write_text("1000\n")
    (root / "p2pmem/rules/10-lab/max_class").write_text("none\n")
    rule = Rules(str(root)).get("10-lab").rule
    assert (rule.uid, rule.max_class, rule.enabled) == (1000, None, True)


def test_rules_that_cannot_be(root: Path) -> None:
    rules = Rules(root)
    with pytest.raises(p2pmem.NotFoundError, match="there is no rule 20-x") as missing:
        rules.remove("20-x")
    assert missing.value.errno == errno.ENOENT
    with pytest.raises(p2pmem.AlreadyExistsError) as exists:
        rules.add(RULE)
    assert exists.value.errno == errno.EEXIST
    with pytest.raises(p2pmem.InvalidRequestError, match="is not a valid rule name"):
        rules.add(Rule("lab"))
    with pytest.raises(ValueError, match="is none of"):
        rules.add(Rule("10-x", action="forbid"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not a list of user ids"):
        rules.add(Rule("10-x", uid="root"))
    with pytest.raises(ValueError, match="out of range"):
        rules.add(Rule("10-x", quota=-1))
    with pytest.raises(p2pmem.InvalidRequestError, match="two rules 10-x"):
        rules.load([Rule("10-x"), Rule("10-x")])
    assert [state.rule.name for state in rules.list()] == ["10-lab"]


def test_unchanged_rules_stay(root: Path) -> None:
    loaded = Rules(root).load(iter([RULE]), only=True)
    assert (loaded.unchanged, loaded.added, loaded.changed, loaded.removed) == (("10-lab",), (), (), ())


def test_without_the_module(tmp_path: Path) -> None:
    with pytest.raises(p2pmem.NotFoundError) as caught:
        Rules(tmp_path / "config").list()
    assert caught.value.remedy is not None and "modprobe p2pmem" in caught.value.remedy
