# SPDX-License-Identifier: MIT OR Apache-2.0
"""The administrator's rules: who may have memory of which provider, how near, and how much.

::

    from p2pmem.rules import Rule, Rules

    rules = Rules()
    rules.add(Rule("10-lab", gid=5001, action="allow"))
    rules.add(Rule("99-nobody-else", action="deny"))
    for state in rules.list():
        print(state.rule.name, state.status)

Only root can change rules. ``Device.set_rules()`` sets the rules of a program for itself.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Union

from . import _native
from ._types import AnyPathClass, path_class

__all__ = ["Loaded", "Rule", "RuleState", "Rules", "Usage"]


@dataclass(frozen=True)
class Rule:
    """A rule. An attribute that is None matches everything, or sets nothing."""

    #: Two digits, a dash, and letters, digits, dots, dashes, and underscores. Rules apply in the order of their names.
    name: str
    #: The memory: a PCI address, or vendor:device as four hexadecimal digits each.
    provider: str | None = None
    #: The device that does DMA, in the same form.
    client: str | None = None
    #: Users: a number, or numbers and ranges such as ``1000,100000-165535``.
    uid: Union[int, str, None] = None
    #: A group that the user is a member of.
    gid: int | None = None
    action: Literal["allow", "deny", "prefer", "avoid"] | None = None
    #: The farthest path class.
    max_class: AnyPathClass | None = None
    #: Bytes that each user may hold.
    quota: int | None = None
    #: Bytes that the members of the group, or the users of ``uid``, may hold together.
    group_quota: int | None = None
    #: Bytes of each provider that are set aside.
    reserve: int | None = None
    #: For which users the reserve is.
    reserve_for: Literal["kernel", "group"] | None = None
    #: Whether the rule is in force.
    enabled: bool = True


@dataclass(frozen=True)
class Usage:
    """Bytes that count under a rule."""

    #: ``user``, ``group``, or ``reserve``.
    of: Literal["user", "group", "reserve"]
    bytes: int
    #: The user.
    uid: int | None = None
    #: Id of the provider.
    provider: int | None = None


@dataclass(frozen=True)
class RuleState:
    """A rule, and its state in the module."""

    rule: Rule
    #: The module's message about the rule.
    status: str
    usage: tuple[Usage, ...]


@dataclass(frozen=True)
class Loaded:
    """The result of ``Rules.load()``: names of rules."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    unchanged: tuple[str, ...]


class Rules:
    """The rules of this machine. ``root`` is where configfs is mounted."""

    def __init__(self, root: str | os.PathLike[str] = "/sys/kernel/config") -> None:
        self._native = _native.Rules(root)

    def list(self) -> builtins.list[RuleState]:
        """Returns all rules, in the order in which they apply."""
        return self._native.list()

    def get(self, name: str) -> RuleState:
        """Returns a rule."""
        return self._native.get(name)

    def add(self, rule: Rule) -> RuleState:
        """Adds a rule. If the module refuses the rule, nothing is added."""
        return self._native.add(rule)

    def remove(self, name: str) -> None:
        """Removes a rule. Buffers stay."""
        self._native.remove(name)

    def replace(self, rule: Rule) -> RuleState:
        """Replaces the rule of the same name. One of the two is in force at every moment."""
        return self._native.replace(rule)

    def load(self, rules: Iterable[Rule], *, only: bool = False) -> Loaded:
        """Adds rules, or changes those of the same name. With ``only``, removes all others. After an error, the rules are as
        before."""
        return self._native.load([*rules], only)


def rule_state(fields: dict[str, Any]) -> RuleState:
    """Makes a RuleState of the library's fields."""
    fields = dict(fields)
    status = fields.pop("status")
    usage = tuple(Usage(**each) for each in fields.pop("usage"))
    fields["max_class"] = path_class(fields["max_class"])
    return RuleState(Rule(**fields), status, usage)


def loaded(fields: dict[str, Any]) -> Loaded:
    """Makes a Loaded of the library's fields."""
    return Loaded(**{name: tuple(names) for name, names in fields.items()})
